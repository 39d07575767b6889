"""Short chat templates with the marks of real families, and what a model of each writes when it calls a tool.

They are written for the tests; only the marks are those of the models.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
JSON_CALL: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
XML_CALL: Final = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


class Family(NamedTuple):
    """One family of models."""

    name: str
    form: str
    """Expected form; empty: none is certain."""
    template: str
    architecture: str = ""
    tokens: tuple[str, ...] = ()
    """Tokens that its tokenizer states."""
    thoughts: str = ""
    """Text before its answer; the prompt may have opened it."""
    call: str = ""
    """Text of the call get_weather(city="Rome")."""


def chatml(instructions: str, prompt: str, history: str = "") -> str:
    """Return a template in the form of ChatML; `history` is how it prints an earlier answer."""
    return (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}\n"
        "    {%- for tool in tools %}\n        {{- tool | tojson }}\n    {%- endfor %}\n"
        f"    {{{{- '</tools>\\n\\n{instructions}<|im_end|>\\n' }}}}\n"
        "{%- endif %}\n{%- for message in messages %}\n"
        "    {%- set content = message.content %}\n"
        f"{history}    {{{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}}}\n"
        f"{{%- endfor %}}\n{{%- if add_generation_prompt %}}\n{prompt}{{%- endif %}}\n"
    )


_AS_JSON: Final = (
    r"For each function call, return a json object within <tool_call></tool_call> XML tags:\n"
    r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
)
_AS_XML: Final = (
    r"If you choose to call a function ONLY reply in the following format:\n\n<tool_call>\n"
    r"<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>"
)
_ANSWER: Final = "    {{- '<|im_start|>assistant\\n' }}\n"
_OPENED: Final = "    {{- '<|im_start|>assistant\\n<think>\\n' }}\n"
_CLOSED_IF_OFF: Final = (
    _ANSWER + "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n"
)
_OPENED_UNLESS_OFF: Final = _CLOSED_IF_OFF.replace(
    "    {%- endif %}", "    {%- else %}\n        {{- '<think>\\n' }}\n    {%- endif %}"
)
_CLOSED_UNLESS_ON: Final = (
    _ANSWER + "    {%- if enable_thinking is defined and enable_thinking is true %}\n        {{- '<think>\\n' }}\n"
    "    {%- else %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n"
)
_STRIPS_THOUGHTS: Final = (
    "    {%- if '</think>' in content %}\n"
    "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n"
)
_R1_CALLS: Final = (
    "{%- for tool in message['tool_calls'] %}{{'<|tool▁calls▁begin|><|tool▁call▁begin|>' + tool['type'] + "
    "'<|tool▁sep|>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + "
    "'\\n```<|tool▁call▁end|><|tool▁calls▁end|>'}}{%- endfor %}"
)
_R1: Final = (
    "{%- if not add_generation_prompt is defined %}{%- set add_generation_prompt = false %}{%- endif %}"
    "{%- for message in messages %}{%- set content = message['content'] %}"
    + _STRIPS_THOUGHTS
    + _R1_CALLS
    + "{{'<|User|>' "
    "+ content}}{%- endfor %}{%- if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|>OPENED'}}{%- endif %}"
)
_GLM: Final = (
    "[gMASK]<sop>\n{%- if tools -%}\n<|system|>\n<tools>\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n"
    "</tools>\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}GAP<arg_key>{arg-key-1}</arg_key>GAP<arg_value>{arg-value-1}</arg_value></tool_call>"
    "{%- endif -%}\n{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}\n{%- if add_generation_prompt "
    "-%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}"
    "{%- endif -%}"
)
_MISTRAL: Final = (
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- bos_token }}"
    "{%- for message in messages %}{%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + "
    "'[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if message.tool_calls is defined %}{{- '[TOOL_CALLS] [' + "
    "message.tool_calls | tojson + ']' + eos_token }}{%- else %}{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- endif %}{%- endfor %}"
)
_LLAMA_3: Final = (
    "{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}{{- 'Environment: ipython\\n' }}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}'
    "{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>' }}{%- endif %}"
)
_GEMMA_4: Final = (
    "{{ bos_token }}{%- if (enable_thinking is defined and enable_thinking) or tools -%}{{- '<|turn>system\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}"
    "{%- for tool in tools %}{{- '<|tool>' + tool | tojson + '<tool|>' -}}{%- endfor %}{{- '<turn|>\\n' -}}{%- endif %}"
    "{%- for message in messages %}{{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' -}}"
    "{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|turn>model\\n' -}}"
    "{%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}{%- endif -%}"
)
_GPT_OSS: Final = (
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '\\n# Valid channels: analysis, final.' }}"
    "{%- if developer_message or tools %}{{- '<|start|>developer<|message|># Tools\\n' + tools | tojson + '<|end|>' }}"
    "{%- endif %}{%- for message in messages %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + "
    "'<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
_MINIMAX: Final = (
    "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}\n{#- Only the last turn keeps interleaved thinking -#}\n"
    "{%- if tools -%}{{- '# Tools\\n' ~ tools | tojson }}\n<invoke name=\"tool-name-1\">\n</invoke>{%- endif -%}"
    "{%- for message in messages -%}{{- ']~b]' ~ message.role ~ '\\n' ~ message.content ~ '[e~[\\n' }}{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}\n{%- endif -%}\n"
)
_SEED: Final = (
    "{%- set toolcall_begin_token = '<seed:tool_call>' -%}{%- set think_begin_token = '<seed:think>' -%}"
    "{%- for item in tools if item.type == 'function' %}\nFunction:\ndef {{ item.function.name }}(){%- endfor %}\n"
    '{{"\\n<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1</parameter>"}}'
)
_GRANITE: Final = (
    "{%- if tools %}{{- \"When a tool is required to answer the user's query, respond with <|tool_call|> followed by a "
    'JSON list of tools used." + tools | tojson }}{%- endif %}{%- for message in messages %}{{- message.content }}'
    "{%- endfor %}"
)
_LFM2: Final = (
    "{%- if tools -%}{%- set system_prompt = 'List of tools: <|tool_list_start|>' + tools | tojson + "
    "'<|tool_list_end|>' -%}{%- endif -%}{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"
)
_PLAIN: Final = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_THOUGHTS: Final = "hm</think>\n\n"

FAMILIES: Final = (
    Family("Qwen2.5", "hermes", chatml(_AS_JSON, _ANSWER), call=JSON_CALL),
    Family(
        "Qwen3",
        "hermes-think",
        chatml(_AS_JSON, _CLOSED_IF_OFF, _STRIPS_THOUGHTS),
        thoughts=f"<think>\n{_THOUGHTS}",
        call=JSON_CALL,
    ),
    Family("Qwen3 Instruct 2507", "hermes", chatml(_AS_JSON, _ANSWER, _STRIPS_THOUGHTS), call=JSON_CALL),
    Family(
        "Qwen3 Thinking 2507",
        "hermes-think",
        chatml(_AS_JSON, _OPENED, _STRIPS_THOUGHTS),
        thoughts=_THOUGHTS,
        call=JSON_CALL,
    ),
    Family("Qwen3 Coder", "qwen3-coder", chatml(_AS_XML, _ANSWER), call=XML_CALL),
    Family("Qwen3.5", "qwen3-coder-think", chatml(_AS_XML, _OPENED_UNLESS_OFF), thoughts=_THOUGHTS, call=XML_CALL),
    Family("Qwen3.5, small", "qwen3-coder", chatml(_AS_XML, _CLOSED_UNLESS_ON), call=XML_CALL),
    Family(
        "Nemotron 3",
        "nemotron-3-think",
        "{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
        + chatml(_AS_XML, _ANSWER),
        architecture="nemotron_h",
        thoughts=_THOUGHTS,
        call=XML_CALL,
    ),
    Family(
        "thinks only if asked",
        "hermes",
        "{%- if not enable_thinking is defined %}{%- set enable_thinking = false %}{%- endif %}"
        + chatml(_AS_JSON, _CLOSED_IF_OFF),
        call=JSON_CALL,
    ),
    Family("DeepSeek R1 and its distils", "plain-think", _R1.replace("OPENED", "<think>\\n"), thoughts=_THOUGHTS),
    Family("DeepSeek R1 of January", "", _R1.replace("OPENED", "")),
    Family(
        "DeepSeek V3.1",
        "",
        _R1.replace("OPENED'}}", "'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{{'"),
    ),
    Family(
        "GLM 4.5",
        "glm-4.5-think",
        _GLM.replace("GAP", "\n"),
        thoughts="<think>hm</think>",
        call="<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    ),
    Family(
        "GLM 4.7",
        "glm-4.7-think",
        _GLM.replace("GAP", "").replace("'\\n<think></think>'", "'</think>'").replace("else ''", "else '<think>'"),
        thoughts="hm</think>",
        call="<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    ),
    Family(
        "Mistral",
        "mistral",
        _MISTRAL,
        tokens=("[TOOL_CALLS]",),
        call='[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    ),
    Family(
        "Magistral",
        "mistral-think",
        "{{- '[SYSTEM_PROMPT]First draft your thinking: [THINK]...[/THINK][/SYSTEM_PROMPT]' }}" + _MISTRAL,
        tokens=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        thoughts="[THINK]hm[/THINK]",
        call='[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
    ),
    Family("a tokenizer without Mistral's token", "", _MISTRAL),
    Family("Magistral without tools", "", "{{- '[THINK]' }}" + _PLAIN),
    Family(
        "Llama 3",
        "llama-3",
        _LLAMA_3,
        tokens=("<|python_tag|>",),
        call='{"name": "get_weather", "parameters": {"city": "Rome"}}',
    ),
    Family("Llama 4", "", _LLAMA_3.replace("header_id", "header"), tokens=("<|python_start|>",)),
    Family(
        "Gemma 4",
        "gemma-4-think",
        _GEMMA_4,
        tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        thoughts="<|channel>thought\nhm<channel|>",
        call='<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
    ),
    # vLLM reads its answers by their tokens in an encoding of their own.
    Family("gpt-oss", "gpt-oss-think", _GPT_OSS, architecture="gpt_oss"),
    Family("marks of gpt-oss elsewhere", "", _GPT_OSS, architecture="llama"),
    Family(
        "MiniMax M2",
        "minimax-m2-think",
        _MINIMAX,
        thoughts="hm</think>\n",
        call='<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    Family(
        "Seed-OSS",
        "seed-oss-think",
        _SEED,
        thoughts="<seed:think>hm</seed:think>\n",
        call="<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
    ),
    Family(
        "Granite 3",
        "granite",
        _GRANITE,
        architecture="granitemoe",
        call='<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    ),
    Family("Phi-4 mini", "", _GRANITE, architecture="phi3"),
    Family(
        "LFM2",
        "lfm2",
        _LFM2,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        call="<|tool_call_start|>[get_weather(city='Rome')]<|tool_call_end|>",
    ),
    Family("without tools", "", _PLAIN),
    Family("without a template", "", ""),
    Family("tools of no known form", "", "{%- if tools %}{{- tools | tojson }}{%- endif %}" + _PLAIN),
)


def tokenizer_config(template: object, tokens: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a tokenizer_config.json."""
    added = {str(number): {"content": token, "special": True} for number, token in enumerate(tokens)}
    return {"added_tokens_decoder": added, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}


def write_template(folder: Path, family: Family) -> None:
    """Give a folder of weights the template of a family."""
    path = folder / "tokenizer_config.json"
    stated = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stated | {"chat_template": family.template}))
