"""A request for inference to Ollama's API: translated for an engine, and its answer translated back.

Between the two it is a request to OpenAI's path, with its queue, slots, health and counts. While it waits, its stream
has nothing that could be sent: a line that says nothing is no part of Ollama's form.
"""

from http import HTTPStatus
from typing import Final

import msgspec

from crds.text import make_name, name_model
from gateway.dialects.ollama.answer_lines import JSON_FIELDS, AnswerLines, render_end
from gateway.dialects.ollama.request_fields import read_fields
from gateway.dialects.ollama.request_translation import EngineRoute, OllamaCall, OllamaRoute, read_call
from gateway.dialects.ollama.response_translation import OllamaTranslator
from gateway.http.exchange import Exchange
from gateway.proxy.errors import RequestError
from gateway.proxy.inference_head import read_translated_head
from gateway.proxy.inference_request import InferenceRequest, SharedResources
from gateway.proxy.model_control import ModelControl
from gateway.proxy.request_body import RequestBody, run_in_turns
from gateway.proxy.router import Router
from gateway.proxy.service import RequestedModel, Service, ServiceAdapter

ROUTES: Final[dict[str, OllamaRoute]] = {
    "/api/chat": "chat",
    "/api/generate": "generate",
    "/api/embed": "embed",
    "/api/embeddings": "embeddings",
}
_ENGINE_PATHS: Final[dict[EngineRoute, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
_OLLAMA: Final = "ollama"
"""The engine that is an Ollama itself."""
_LATEST: Final = "latest"
"""The tag that clients add to a name without one."""


class OllamaRequest(InferenceRequest):
    """A request to one of Ollama's paths for inference. Raises RequestError."""

    def __init__(
        self, exchange: Exchange, label: str, router: Router, shared: SharedResources, control: ModelControl
    ) -> None:
        """Begin with the head alone; `label` names the path in metrics and log. Raises RequestError."""
        self._ollama_route = ROUTES[exchange.head.path]
        self._control = control
        engine_route: EngineRoute = "embeddings" if self._ollama_route.startswith("embed") else "chat"
        head = read_translated_head(exchange.head, label, _ENGINE_PATHS[engine_route])
        super().__init__(exchange, head, router, shared)

    def send_error(self, error: RequestError) -> None:
        """Send an error; a full queue is 503, which Ollama's clients know."""
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            error.status = HTTPStatus.SERVICE_UNAVAILABLE
        super().send_error(error)

    async def _read_body(self) -> RequestBody | None:
        """Return the body for an engine; None: it only loads or unloads a model, and the client has got its answer."""
        turns = self._shared.scan_turns
        call = read_call(self._ollama_route, await run_in_turns(read_fields(self._content), turns))
        name, model = find_ollama_model(self.router, call.model, self._ollama_route)
        service = find_service(model)
        self.keep_alive_seconds = call.keep_alive_seconds
        if not call.asks_engine:
            await self._change_model(call, service)
            return None

        self._reserve(2 * len(self._content))  # the translation is there as well, and parts of it, for a while
        is_ollama = any(backend.engine == _OLLAMA for backend in service.config.backends)
        self._replace_content(await run_in_turns(call.translate(name, is_ollama=is_ollama), turns))
        self.head = read_translated_head(self.exchange.head, self.head.label, _ENGINE_PATHS[call.engine_route])
        self.route = self.head.route
        self.translator = OllamaTranslator(call)
        return await super()._read_body()

    async def _change_model(self, call: OllamaCall, service: Service) -> None:
        """Load or unload a model, and answer. Raises RequestError."""
        reason = "unload" if call.keep_alive_seconds == 0 else "load"
        if reason == "unload":
            await self._control.unload(service)
        else:
            await self._control.load(service, call.keep_alive_seconds)
        if self._ollama_route == "embed":
            body = msgspec.json.encode({"model": call.model, "embeddings": []})
        else:
            body = AnswerLines(call.model, is_chat=self._ollama_route == "chat").render(end=render_end(reason))
        self.end()
        self.exchange.respond(HTTPStatus.OK, JSON_FIELDS + self.client_fields + service.header_line, body)


def find_ollama_model(router: Router, name: str, route: str = "") -> tuple[str, RequestedModel]:
    """Return the model that a client names, with its name at the router; a tag such as `:latest` may be left out.

    Ollama's clients write MODEL:TAG. A service has one model, so the name before the tag decides, unless the tag is an
    adapter of the service. A model that was pulled has the name that was derived of the one that the client uses.
    Raises RequestError, in Ollama's words.
    """
    if not name and route not in ("generate", "embed"):
        raise RequestError(HTTPStatus.BAD_REQUEST, "missing_model", "model is required", param="model")
    base, _, tag = name.rpartition(":")
    try:
        if name and (not base or name in router.services()):
            return name, router.find_model(name)
        if base:
            model = router.find_model(base)
            has_adapters = isinstance(model, Service) and bool(model.adapters)
            return (name, router.find_model(name)) if has_adapters and tag != _LATEST else (base, model)
    except RequestError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
    for derived in (name_model(name), make_name(name)):
        if derived in router.services():
            return derived, router.find_model(derived)
    raise _not_found(name, router.listed_names())


def find_service(model: RequestedModel) -> Service:
    """Return the service that has a model, or to which an adapter belongs."""
    if isinstance(model, ServiceAdapter):
        return model.service
    if not isinstance(model, Service):
        raise TypeError(f"{model.title} is no service of this machine")
    return model


def _not_found(name: str, served: list[str]) -> RequestError:
    """404: a model that is not served, in the words that Ollama's clients look for."""
    shown = name[:200]
    way = f"set it to one that is served: {', '.join(served[:20])}" if served else "no model is served here now"
    return RequestError(HTTPStatus.NOT_FOUND, "model_not_found", f"model '{shown}' not found: {way}", param="model")
