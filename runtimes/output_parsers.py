"""The parsers of tool calls and thoughts with which vLLM and SGLang start, by the form of the model's chat template.

Without one, vLLM refuses requests with tools, and SGLang answers with the text of the call. vLLM does not start with a
name that it does not have: all names here are those of the versions in the engines' images.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from artifacts.formats.chat_template import THINKS
from runtimes.pod import PodServing

ParserTable = Mapping[str, tuple[str, str]]
"""Names of an engine's parsers of tool calls and of thoughts, by form; empty: it has none."""

_TOOL: Final = "--tool-call-parser"
_REASONING: Final = "--reasoning-parser"
_NAMES: Final = {
    # Form: tool calls and thoughts in vLLM, then in SGLang. qwen3 of vLLM reads all thoughts in <think>, and starts
    # where that is no token, as deepseek_r1 does not.
    "plain": ("", "qwen3", "", "qwen3"),
    "hermes": ("hermes", "qwen3", "qwen", "qwen3"),
    "qwen3-coder": ("qwen3_coder", "qwen3", "qwen3_coder", "qwen3"),
    "nemotron-3": ("qwen3_coder", "nemotron_v3", "qwen3_coder", "nemotron_3"),
    "glm-4.5": ("glm45", "glm45", "glm", "glm45"),
    "glm-4.7": ("glm47", "glm47", "glm47", "glm45"),
    "minimax-m2": ("minimax_m2", "minimax_m2", "minimax-m2", "minimax"),
    "gpt-oss": ("openai", "openai_gptoss", "gpt-oss", "gpt-oss"),
    "gemma-4": ("gemma4", "gemma4", "gemma4", "gemma4"),
    "seed-oss": ("seed_oss", "seed_oss", "", ""),
    "mistral": ("mistral", "mistral", "mistral", "mistral"),
    "llama-3": ("llama3_json", "", "llama3", ""),
    "granite": ("granite", "", "", ""),
    "lfm2": ("lfm2", "", "lfm2", ""),
}
"""Names: vLLM 0.33.0 (tool_parsers/, reasoning/), SGLang 0.5.15.post1 (function_call/, parser/reasoning_parser.py)."""
VLLM_PARSERS: Final[ParserTable] = {form: (tool, thoughts) for form, (tool, thoughts, _, _) in _NAMES.items()}
SGLANG_PARSERS: Final[ParserTable] = {form: (tool, thoughts) for form, (_, _, tool, thoughts) in _NAMES.items()}


def render_parsers(pod: PodServing, table: ParserTable, tool_switches: Sequence[str] = ()) -> list[str]:
    """Render the arguments that choose parsers; of a kind that the user states, none is added.

    `tool_switches` are arguments that the engine takes before a parser of tool calls.
    """
    options = pod.serving.options
    if options.mode != "chat":
        return []
    stated = {argument.partition("=")[0] for argument in options.extra_args}
    form = pod.chat_format.removesuffix(THINKS)
    tool, reasoning = table.get(form, ("", ""))
    arguments = [*tool_switches, _TOOL, tool] if tool and _TOOL not in stated else []
    if reasoning and form != pod.chat_format and _REASONING not in stated:
        arguments += [_REASONING, reasoning]
    return arguments
