"""A name that people type for a model is sorted by its form; one that nothing has is answered with the way out."""

import pytest

from standalone.model_names import CatalogName, HubName, ModelName, ModelNameError, OllamaName, SourceName
from standalone.model_names import parse_model_name as parse_with

CATALOG = ("qwen3-8b", "gemma-4-e2b")
OLLAMA = ("gemma3:4b", "llama3.2:latest", "mannix/phi3:q4")
PATHS = ("/models/tiny.gguf", "models/tiny.gguf", "qwen3-8b", "./qwen3-8b", "acme/here")


def parse(text: str) -> ModelName:
    return parse_with(text, catalog=CATALOG, ollama=OLLAMA, is_path=PATHS.__contains__)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3-8b", CatalogName("qwen3-8b")),
        ("Qwen3-8B", CatalogName("qwen3-8b")),
        ("unsloth/Qwen3-8B-GGUF", HubName("unsloth/Qwen3-8B-GGUF", "main", "")),
        ("unsloth/Qwen3-8B-GGUF:q4_k_m", HubName("unsloth/Qwen3-8B-GGUF", "main", "Q4_K_M")),
        ("unsloth/Qwen3-8B-GGUF@v2:UD-Q4_K_XL", HubName("unsloth/Qwen3-8B-GGUF", "v2", "UD-Q4_K_XL")),
        ("hf://unsloth/Qwen3-8B-GGUF:Q8_0", HubName("unsloth/Qwen3-8B-GGUF", "main", "Q8_0")),
        ("hf://mlx-community/Qwen3-8B-4bit", HubName("mlx-community/Qwen3-8B-4bit", "main", "")),
        ("hf.co/acme/here", HubName("acme/here", "main", "")),
        ("https://huggingface.co/acme/tiny", HubName("acme/tiny", "main", "")),
        ("hf://acme/tiny/tiny.gguf", SourceName("hf://acme/tiny/tiny.gguf")),
        ("hf://acme/tiny@v1/tiny.gguf", SourceName("hf://acme/tiny@v1/tiny.gguf")),
        ("https://models.example/tiny.gguf", SourceName("https://models.example/tiny.gguf")),
        ("oci://registry.example/tiny:1", SourceName("oci://registry.example/tiny:1")),
        ("ollama://gemma3:4b", OllamaName("gemma3:4b")),
        ("ollama://unknown:1b", OllamaName("unknown:1b")),
        ("gemma3:4b", OllamaName("gemma3:4b")),
        ("llama3.2", OllamaName("llama3.2")),
        ("mannix/phi3:q4", OllamaName("mannix/phi3:q4")),
        ("/models/tiny.gguf", SourceName("file:///models/tiny.gguf")),
    ],
)
def test_form_of_a_name_decides_where_it_is_looked_for(text: str, name: ModelName) -> None:
    assert parse(text) == name


@pytest.mark.parametrize("text", ["models/tiny.gguf", "./qwen3-8b", "acme/here"])
def test_path_that_exists_is_no_repository(text: str) -> None:
    name = parse(text)
    assert isinstance(name, SourceName)
    assert name.source.startswith("file:///")
    assert name.source.endswith(text.removeprefix("./"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("qwen3-8", "no model and no file has this name: did you mean qwen3-8b?"),
        ("QWEN3-8C", "did you mean qwen3-8b?"),
        ("tiny.gguf", "no model and no file has this name: give a name of `pomona catalog`"),
        ("gemma3:4c", "get it by `ollama pull gemma3:4c`; or did you mean gemma3:4b?"),
        ("unknown:7b", "Ollama has no such model here: get it by `ollama pull unknown:7b`"),
        ("./missing", "no such file"),
        ("~/missing.gguf", "no such file"),
        ("models/missing.gguf", "no such file"),
        ("acme/tiny/tiny.gguf", "no such file: give hf://acme/tiny/tiny.gguf if it is a file of the hub"),
        ("what is this", "no model and no file has this name"),
        ("", "no model and no file has this name"),
    ],
)
def test_unknown_name_is_repeated_with_the_forms_that_are_possible(text: str, problem: str) -> None:
    with pytest.raises(ModelNameError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith(f"{text}: ")
    assert problem in message
    assert "ORG/REPO:Q4_K_M of the hub" in message
