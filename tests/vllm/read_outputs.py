"""Reader of outputs of models with vLLM's own parsers: runs in vLLM's environment, without a server or Pomona.

Its input is a JSON list of `{"tool", "reasoning", "tokens", "output", "tools"}`, its output a list of what vLLM would
answer, or of the error with which it would not start.
"""

import importlib
import json
import sys
from typing import Any


def make_tokenizer(tokens: list[str]) -> Any:
    """Return a tokenizer of single letters that has these tokens beside them."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code for code in range(128)}, []))
    made.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in tokens])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def read(case: dict[str, Any]) -> dict[str, Any]:
    """Return the thoughts, the text and the calls of one output."""
    manager: Any = importlib.import_module("vllm.parser.parser_manager")
    protocol: Any = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    tokenizer = make_tokenizer(case["tokens"])
    messages = [{"role": "user", "content": "Hi"}]
    request = protocol.ChatCompletionRequest(model="m", messages=messages, tools=case["tools"], tool_choice="auto")
    try:
        parser = manager.ParserManager.get_parser(
            tool_parser_name=case["tool"] or None,
            reasoning_parser_name=case["reasoning"] or None,
            enable_auto_tools=bool(case["tool"]),
            model_name="m",
        )(tokenizer, request.tools)
    except (RuntimeError, TypeError, KeyError) as error:
        return {"error": str(error)}
    ids = tokenizer.encode(case["output"])
    thoughts, text, calls = parser.parse(case["output"], request, enable_auto_tools=True, model_output_token_ids=ids)
    found = [[call.name, json.loads(call.arguments)] for call in calls or ()]
    return {"thoughts": (thoughts or "").strip(), "text": (text or "").strip(), "calls": found}


if __name__ == "__main__":
    print(json.dumps([read(case) for case in json.load(sys.stdin)]))
