"""The form in which a model writes tool calls and thoughts, by the marks in its chat template.

A template is a program of a stranger: it is searched, and neither run nor stored. One that is in doubt has no form: a
parser without its tokens stops vLLM at its start, and one of thoughts takes the answers of a model that does not think.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

TEMPLATE: Final = "chat_template.jinja"
"""File beside the weights, which precedes the template of the tokenizer."""
TOKENIZER: Final = "tokenizer_config.json"
MOST_TEMPLATE_BYTES: Final = 256 << 10
THINKS: Final = "-think"
"""End of a form by which the model thinks before it answers, unless a request turns that off."""

_LISTS_TOOLS: Final = re.compile(r"\{%[^%{}]{0,99}\btools\b")
"""A template that shows the model no tools, as that of DeepSeek R1, only repeats calls that were made by another."""
_GAP: Final = r"(?:\\n|\s){0,8}"
_FORMS: Final[Mapping[str, str]] = {
    "gpt-oss": r"<\|channel\|>",
    "gemma-4": r"<\|tool_call>",
    "glm-4.7": r"<tool_call>\{function-name\}<arg_key>",
    "glm-4.5": rf"<tool_call>\{{function-name\}}{_GAP}<arg_key>",
    "minimax-m2": r"<minimax:tool_call>",
    "seed-oss": r"<seed:tool_call>",
    "nemotron-3": rf"<tool_call>{_GAP}<function=",
    "qwen3-coder": rf"<tool_call>{_GAP}<function=",
    "granite": r"<\|tool_call\|>",
    "mistral": r"\[TOOL_CALLS\]",
    "lfm2": r"<\|tool_(?:call|list)_start\|>",
    "llama-3": r"parameters\\?\": dictionary of argument name",
    "hermes": rf"<tool_call>{_GAP}\{{\\?[\"']",
}
"""Marks by form, of which the first that is found counts: those of SGLang 0.5.15 (managers/template_detection.py), else
those in the models' own templates."""
_ARCHITECTURES: Final = {"gpt-oss": "gpt_oss", "nemotron-3": "nemotron_h", "granite": "granite"}
"""Begin of the architectures of a form whose marks others have, too."""
_TOKENS: Final = {"mistral": b'"[TOOL_CALLS]"', "lfm2": b'"<|tool_call_start|>"', "llama-3": b'"<|python_tag|>"'}
"""Token that vLLM's parser needs, as the tokenizer's JSON has it and no template in it can. Llama 4 lacks Llama 3's."""
_THOUGHTS: Final = {"gpt-oss": "<|channel|>", "gemma-4": "<|channel>", "seed-oss": "<seed:think>", "mistral": "[THINK]"}
"""Mark of templates whose models think in a form of their own; others think in <think>."""
_THINKS: Final = re.compile(
    # Each answer begins with thoughts, or it does unless a request turns that off.
    rf"add_generation_prompt[^%]{{0,99}}%\}}\s{{0,20}}\{{\{{[^{{}}]{{0,99}}<think>(?!{_GAP}</think>)"
    r"|enable_thinking is (?:defined and (?:not enable_thinking|enable_thinking (?:is|==) [Ff]alse)"
    r"|not defined or enable_thinking|defined else [Tt]rue)"
)
_THINKS_IF_ASKED: Final = re.compile(r"enable_thinking ?= ?[Ff]alse")


class _Tokenizer(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    """With names, templates are for tools, for documents and for neither."""


def find_chat_format(configs: Mapping[str, bytes], architecture: str) -> str:
    """Return the form of the chat template among a folder's configurations; empty if it is not known for certain."""
    tokenizer = configs.get(TOKENIZER, b"{}")
    try:
        template = configs[TEMPLATE].decode() if TEMPLATE in configs else _read_template(tokenizer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if len(template) > MOST_TEMPLATE_BYTES:
        return ""
    form = "plain"
    if _LISTS_TOOLS.search(template):
        forms = (form for form in _FORMS if architecture.startswith(_ARCHITECTURES.get(form, "")))
        form = next((form for form in forms if re.search(_FORMS[form], template)), "")
        if not form or _TOKENS.get(form, b"") not in tokenizer:
            return ""
    thinks = _THINKS.search(template) and not _THINKS_IF_ASKED.search(template)
    if _THOUGHTS[form] in template if form in _THOUGHTS else thinks:
        return form + THINKS
    return "" if form == "plain" else form


def _read_template(tokenizer: bytes) -> str:
    """Return all templates of a tokenizer as one text."""
    stated = msgspec.json.decode(tokenizer, type=_Tokenizer).chat_template or ""
    return stated if isinstance(stated, str) else "\n".join(named.get("template", "") for named in stated)
