"""Questions by LangChain's adapter for Ollama: prints what a program sees, as JSON. It runs in its own environment."""

import json
import sys

from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

url = sys.argv[1]


def weather(city: str) -> str:
    """Return the weather in a city."""
    return city


def refuse(model: str) -> str:
    try:
        ChatOllama(model=model, base_url=url, validate_model_on_init=True)
    except ValueError as error:
        return str(error)
    return ""


chat = ChatOllama(model="chat", base_url=url, validate_model_on_init=True, num_ctx=2048, keep_alive="5m", temperature=0)
caller = ChatOllama(model="caller", base_url=url, reasoning=True)
called = caller.bind_tools([weather]).invoke("hi")
answer = chat.invoke("hi")
print(
    json.dumps(
        {
            "whole": answer.content,
            "reason": answer.response_metadata["done_reason"],
            "counts": answer.usage_metadata["output_tokens"] if answer.usage_metadata else None,
            "stream": "".join(str(part.content) for part in chat.stream("hi")),
            "calls": called.tool_calls,
            "thought": called.additional_kwargs.get("reasoning_content"),
            "text": OllamaLLM(model="chat:latest", base_url=url).invoke("hi"),
            "vectors": [
                len(vector) for vector in OllamaEmbeddings(model="embed", base_url=url).embed_documents(["a", "b"])
            ],
            "json": isinstance(
                json.loads(
                    str(ChatOllama(model="chat", base_url=url, format="json", num_predict=40).invoke("x").content)
                ),
                dict,
            ),
            "unknown": refuse("nobody"),
        }
    )
)
