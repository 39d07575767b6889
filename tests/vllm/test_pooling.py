"""Models for embeddings and reranking on the real vLLM, which are started alike."""

from collections.abc import Iterator

import pytest

from tests.vllm.real_server import RealServer, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with serve(tmp_path_factory.mktemp("vllm"), "embeddings") as running:
        yield running


def test_text_is_embedded_and_chat_is_not_served(server: RealServer) -> None:
    answer = server.ask("POST", "/v1/embeddings", {"model": "chat", "input": "Hi"})
    assert len(answer.json["data"][0]["embedding"]) == 128
    assert server.ask("POST", "/v1/chat/completions", {"model": "chat", "messages": []}).status == 404


def test_documents_are_ranked(server: RealServer) -> None:
    body = {"model": "chat", "query": "Hi", "documents": ["Hi", "a tiny model"]}
    answer = server.ask("POST", "/v1/rerank", body)
    assert [result["index"] for result in answer.json["results"]] == [0, 1]
