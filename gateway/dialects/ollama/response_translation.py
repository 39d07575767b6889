"""The choice of the body that turns an engine's answer into Ollama's."""

from gateway.dialects.ollama.answer_lines import JSON_FIELDS, NDJSON_FIELDS, AnswerLines, AnswerTimes
from gateway.dialects.ollama.chat_answer import OllamaAnswer, OllamaStream
from gateway.dialects.ollama.embed_answer import OllamaVectors
from gateway.dialects.ollama.request_translation import OllamaCall
from gateway.proxy.response_body import ResponseBody, ResponseTranslator, TimedRequest


class OllamaTranslator(ResponseTranslator):
    """The translation of the answer to one call, whose client gets the model by its own name for it."""

    def __init__(self, call: OllamaCall) -> None:
        self._model = call.model
        self._route = call.route
        self._streams = call.streams
        self._texts = call.embed_input.size
        self._dimensions = call.dimensions

    def translate(self, response: ResponseBody, request: TimedRequest) -> tuple[ResponseBody, bytes]:
        """Return the body for the client, which stands behind `response`, and the lines of its header fields."""
        times = AnswerTimes(request.arrived, request.queued_seconds)
        if self._route in ("embed", "embeddings"):
            model = self._model if self._route == "embed" else None
            return OllamaVectors(response, model, self._texts, self._dimensions, times), JSON_FIELDS
        lines = AnswerLines(self._model, is_chat=self._route == "chat")
        if response.is_stream:
            return OllamaStream(response, lines, times), NDJSON_FIELDS
        fields = NDJSON_FIELDS if self._streams else JSON_FIELDS
        return OllamaAnswer(response, lines, times, streams=self._streams), fields
