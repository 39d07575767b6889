"""The field `options` of a request: Ollama's names for the settings of one answer, and those of engines."""

from typing import Any, Final

import msgspec

from gateway.dialects.ollama.request_fields import decode_small, wrong_field

_INTEGERS: Final = {"seed": "seed", "num_predict": "max_tokens"}
"""Options that mean nothing if they are negative, or for num_predict 0: an answer has no limit then."""
_WHOLE_NUMBERS: Final = {"top_k": ("top_k",), "repeat_last_n": ("repeat_last_n",)}
_NUMBERS: Final = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "typical_p": ("typical_p",),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
}
"""With the names of llama.cpp and, where it is another one, of vLLM, mlx-lm and SGLang; each ignores the other."""


def translate_options(text: bytes) -> list[tuple[str, bytes]]:
    """Return OpenAI's fields for the JSON text of `options`, which is empty if there are none.

    Options of how a model is loaded, such as num_ctx, are those of the service, and are ignored like unknown ones.
    Raises RequestError: an option has a wrong type.
    """
    options: dict[str, Any] = decode_small("options", text, dict[str, Any]) if text else {}
    fields: list[tuple[str, bytes]] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in _INTEGERS:
            number = _read_integer(name, value)
            if number > 0 or (number == 0 and name == "seed"):
                fields.append((_INTEGERS[name], b"%d" % number))
        elif name in _WHOLE_NUMBERS:
            number = _read_integer(name, value)
            fields.extend((engine_name, b"%d" % number) for engine_name in _WHOLE_NUMBERS[name])
        elif name in _NUMBERS:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise wrong_field(f"options.{name}", "it has to be a number")
            fields.extend((engine_name, msgspec.json.encode(value)) for engine_name in _NUMBERS[name])
        elif name == "stop":
            fields.append((name, msgspec.json.encode(_read_stops(value))))
    return fields


def _read_integer(name: str, value: Any) -> int:
    """Return a number without its fraction, as Ollama reads it. Raises RequestError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= 1 << 63:
        raise wrong_field(f"options.{name}", "it has to be an integer")
    return int(value)


def _read_stops(value: Any) -> list[str]:
    """Return the texts that end an answer; a single one may stand without a list. Raises RequestError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong_field("options.stop", "it has to be a list of strings")
    return texts
