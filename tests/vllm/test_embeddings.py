"""An embeddings model on the real vLLM."""

from pathlib import Path

from tests.vllm.real_server import serve


def test_mode_embeddings_answers_with_a_vector(tmp_path: Path) -> None:
    with serve(tmp_path, "embeddings") as server:
        answer = server.ask("POST", "/v1/embeddings", {"model": "chat", "input": "Hi"})
        assert len(answer.json["data"][0]["embedding"]) == 128
        assert server.ask("POST", "/v1/chat/completions", {"model": "chat", "messages": []}).status == 404
