"""The requests to a listener: authorized, and answered by their path; `inference_request` has those for inference."""

import msgspec

from gateway.http.control_messages import JSON_FIELDS
from gateway.http.exchange import Exchange, RequestHandling, RequestReceiver
from gateway.proxy import errors, paths
from gateway.proxy.cors import is_preflight, render_cors_fields, render_preflight_fields
from gateway.proxy.engine_metrics import PodReports
from gateway.proxy.errors import RequestError
from gateway.proxy.inference_head import read_inference_head
from gateway.proxy.inference_request import InferenceRequest, SharedResources
from gateway.proxy.ollama_api import OllamaApi
from gateway.proxy.request_record import log_refusal
from gateway.proxy.router import ListenerRouter, Router


def handle_requests(
    router: ListenerRouter, shared: SharedResources, pod: PodReports | None = None, ollama: OllamaApi | None = None
) -> RequestHandling:
    """Return the handling of the requests to the listener of `router`.

    `pod` is given for the listener of a pod, and `ollama` for that of one machine's router.
    """

    def begin(exchange: Exchange) -> RequestReceiver | None:
        """Begin the work on a request; return its receiver, or None if the response was sent.

        The connection calls this when the head has come, and then gives the body to the receiver. From the outer
        function come `router`, which has the services and tokens of this listener, `shared`, which all requests use,
        and `pod`, the reports of a pod's proxy; None: this is the proxy of a host.
        """
        head = exchange.head
        if router.web_origins:
            exchange.further_fields = render_cors_fields(head.headers, router.web_origins)
        try:
            if router.web_origins is not None and is_preflight(head):
                exchange.respond(200, render_preflight_fields(head.headers, router.web_origins), b"")
                return None
            if head.method == "GET" and b"websocket" in head.headers.offered_protocols():
                exchange.keep_alive = False
                raise errors.websocket_not_served()
            # Requests for inference are POSTs to some paths; `read_inference_head` returns None for others.
            if head.method == "POST":
                client_router = router.authorize(head.headers)
                if inference := read_inference_head(head):
                    return InferenceRequest(exchange, inference, client_router, shared)
            return _answer_other(exchange, router, pod, ollama)
        except RequestError as error:
            route = paths.route_name(head.path)
            log_refusal(router, route, error)
            exchange.respond(error.status, error.fields(), error.encode_body(route))
        return None

    return RequestHandling(begin, render_invalid_request)


def render_invalid_request(status: int, reason: str) -> tuple[bytes, bytes]:
    """Return the header fields and the body of a response to bytes that are no request."""
    error = errors.invalid_http(status, reason)
    return error.fields(), error.body


def _answer_other(
    exchange: Exchange, router: ListenerRouter, pod: PodReports | None, ollama: OllamaApi | None
) -> RequestReceiver | None:
    """Answer a request that is not for inference, or begin to; all but those for the health need authorization.

    Return the receiver of the body; None if the response was sent. Raises RequestError.
    """
    # 1. Without authorization: anyone may ask for the health, so the answer has no name of a service.
    path, method = paths.resolve_alias(exchange.head.path), exchange.head.method
    if path == paths.HEALTH and method == "GET":
        _report_service(exchange, serves=router.is_serving)
        return None
    if path == paths.ENGINE_LIVENESS and method == "GET" and pod:
        _report_service(exchange, serves=not pod.engine_hangs())
        return None

    # 2. With it: Ollama's API, the metrics of a pod, and the models. Anything else is refused.
    client_router = router.authorize(exchange.head.headers)
    if ollama and ollama.serves(path):
        return ollama.begin(exchange, client_router)
    if path in paths.INFERENCE:  # a POST to it does not come here
        raise errors.method_not_allowed(method, path, "POST")
    if path == paths.METRICS and method == "GET" and pod:
        return pod.begin_metrics(exchange)
    if path != paths.MODELS and not path.startswith(f"{paths.MODELS}/"):
        raise errors.unknown_url(path)
    if method != "GET":
        raise errors.method_not_allowed(method, path, "GET")
    _list_models(exchange, client_router, path.removeprefix(paths.MODELS)[1:])
    return None


def _report_service(exchange: Exchange, *, serves: bool) -> None:
    """Answer 200 if the service works, else 503."""
    if serves:
        exchange.respond(200, JSON_FIELDS, b'{"status":"ok"}')
    else:
        error = errors.service_unavailable("this endpoint")
        exchange.respond(error.status, error.fields(), error.body)


def _list_models(exchange: Exchange, router: Router, only_name: str) -> None:
    """Answer with all models that the router lists or, if `only_name` is not empty, with the one of that name.

    A model whose engine on this machine loads, or has failed, is not listed: clients offer to their users what they
    find here. Raises RequestError.
    """
    services = router.services()
    served = router.listed_names()
    if only_name and only_name not in served:
        if only_name in services:
            raise errors.service_unavailable(services[only_name].title)
        raise errors.model_not_found(only_name, served)

    # One model is an object of its own; all of them are a list.
    models = [
        {"id": name, "object": "model", "created": services[name].created, "owned_by": "pomona"}
        | services[name].describe()
        | ({"parent": name.partition(":")[0]} if ":" in name else {})  # of an adapter, as vLLM has it
        for name in ([only_name] if only_name else served)
    ]
    answer = models[0] if only_name else {"object": "list", "data": models}
    exchange.respond(200, JSON_FIELDS, msgspec.json.encode(answer))
