"""Inspection of a folder of weights: its files, its configuration, its format, and the memory for serving."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from artifacts.errors import ArtifactError
from artifacts.formats import folder_config
from artifacts.inspect import Inspection, inspect
from artifacts.repositories.repository import SourceAccess
from artifacts.source import parse
from crds.weights_header import Layers
from tests.support.file_server import ALLOWED_NETWORKS, COMMIT, FileServer
from tests.support.tiny_models import tiny_mlx

WEIGHTS_BYTES = 500_000
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "quantization": {"bits": 4, "group_size": 64},
}


def write(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"model.norm.weight": np.zeros(WEIGHTS_BYTES // 4, np.float32)}, folder / "model.safetensors")
    (folder / "run.py").write_text("import os")
    return folder


async def look(
    source: str, *, server: FileServer, file_root: Path | None = None, sha256: str | None = None
) -> Inspection:
    access = SourceAccess(endpoint=server.url, file_root=file_root, allowed_networks=ALLOWED_NETWORKS)
    return await inspect(parse(source), access, sha256=sha256)


async def test_a_repository_is_inspected_without_its_weights(server: FileServer) -> None:
    folder = write(server.root / "acme" / "mlx", LLAMA)

    inspection = await look("hf://acme/mlx", server=server)

    assert inspection.revision == COMMIT
    assert (inspection.file, inspection.sha256) == ("", "")
    assert inspection.size_bytes == sum((folder / name).stat().st_size for name in ("config.json", "model.safetensors"))
    assert inspection.tensor_bytes == WEIGHTS_BYTES
    assert (inspection.gguf.architecture, inspection.gguf.quantization) == ("llama", "4-bit")
    assert inspection.layout
    assert inspection.layout.layers == [Layers(count=3, key_elements=32, value_elements=32)]
    assert server.bytes_sent("/model.safetensors") < WEIGHTS_BYTES


async def test_a_local_folder_is_inspected_in_place(server: FileServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "files" / "mlx", LLAMA)
    inspection = await look(f"file://{folder}/", server=server, file_root=folder.parent)
    assert inspection.layout
    assert inspection.layout.tensor_bytes == WEIGHTS_BYTES
    assert not server.requests


async def test_a_folder_with_an_adapter_has_a_size_and_no_layout(server: FileServer, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    tiny_mlx.write_adapter(folder)
    inspection = await look(f"file://{folder}/", server=server, file_root=tmp_path)
    assert (inspection.format, inspection.gguf.architecture, inspection.layout) == ("mlx", "lora", None)
    assert inspection.size_bytes == sum(path.stat().st_size for path in folder.glob("*"))
    assert inspection.tensor_bytes == sum(
        tensor.nbytes for tensor in load_file(folder / "adapters.safetensors").values()
    )


async def test_folder_with_an_empty_configuration_is_no_adapter(server: FileServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "mlx", {})
    inspection = await look(f"file://{folder}/", server=server, file_root=tmp_path)
    assert (inspection.gguf.architecture, inspection.layout) == ("", None)


async def test_a_link_that_leads_out_of_the_root_is_refused(server: FileServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "files" / "mlx", LLAMA)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "1")
    (folder / "model.safetensors").symlink_to("../blobs/1")  # the layout of the cache of a hub's client
    assert (await look(f"file://{folder}/", server=server, file_root=folder.parent)).tensor_bytes == WEIGHTS_BYTES
    (tmp_path / "secrets.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secrets.json")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json .*--file-root") as caught:
        await look(f"file://{folder}/", server=server, file_root=folder.parent)
    assert caught.value.reason == "SourceForbidden"


@pytest.mark.parametrize("end", ["/", ""])
async def test_an_unreadable_file_is_named(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    gone = tmp_path / "gone.gguf"
    monkeypatch.setattr("artifacts.repositories.local_files.locate", lambda _source, _root: gone)
    with pytest.raises(ArtifactError, match=f"{gone}: No such file") as caught:
        await look(f"file://{gone}{end}", server=server, file_root=tmp_path)
    assert caught.value.reason == "StorageFailed"


async def test_a_folder_without_weights_is_refused_with_the_reason(server: FileServer) -> None:
    folder = write(server.root / "acme" / "mlx", LLAMA)
    for nonsense in (b"[1", b'{"model_type": "\xff"}', b'{"a": ' + b"[" * 100_000):
        (folder / "config.json").write_bytes(nonsense)
        with pytest.raises(ArtifactError, match=r"hf://acme/mlx@main: config\.json is not valid JSON"):
            await look("hf://acme/mlx", server=server)
    (folder / "config.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ArtifactError, match=r"^hf://acme/mlx@main: config\.json is longer than 1\.0 MiB$"):
        await look("hf://acme/mlx", server=server)
    with pytest.raises(ArtifactError, match="404"):
        await look("hf://acme/none", server=server)
    with pytest.raises(ArtifactError, match="pin a commit"):
        await look("hf://acme/mlx", server=server, sha256="0" * 64)


def layers(**changes: object) -> list[Layers] | None:
    layout = folder_config.find_layout(LLAMA | changes, WEIGHTS_BYTES)
    return layout.layers if layout else None


def test_layers_are_grouped_by_their_window() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    assert layers(layer_types=types, sliding_window=512) == [
        Layers(count=1, key_elements=32, value_elements=32),
        Layers(count=2, key_elements=32, value_elements=32, window=512),
    ]
    assert layers(sliding_window=512) == [Layers(count=3, key_elements=32, value_elements=32)]


def test_stated_head_size_and_experts_are_used() -> None:
    layout = folder_config.find_layout(
        LLAMA | {"head_dim": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 100}, WEIGHTS_BYTES
    )
    assert layout
    assert layout.layers[0].key_elements == 256
    assert (layout.feed_forward_size, layout.expert_outputs) == (200, 2)


GEMMA_4 = {"model_type": "gemma4_text", "sliding_window": 512}


def test_layers_of_gemma_4_with_the_whole_context_have_heads_of_their_own() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = GEMMA_4 | {"layer_types": types, "head_dim": 16, "global_head_dim": 64}
    layout = folder_config.find_layout(
        LLAMA | sizes | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "top_k_experts": 2}, WEIGHTS_BYTES
    )
    assert layout
    assert layout.layers == [
        Layers(count=1, key_elements=64, value_elements=64),
        Layers(count=2, key_elements=32, value_elements=32, window=512),
    ]
    assert (layout.attention_size, layout.expert_outputs) == (LLAMA["num_attention_heads"] * 64, 2)
    # Without attention_k_eq_v, transformers ignores the number of heads.
    other = layers(**sizes, num_global_key_value_heads=1)
    assert other
    assert other[0] == Layers(count=1, key_elements=128, value_elements=128)


def test_last_layers_of_gemma_4_reuse_the_cache_of_earlier_ones() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    sizes = GEMMA_4 | {"layer_types": types, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}
    layout = folder_config.find_layout(LLAMA | sizes, WEIGHTS_BYTES)
    assert layout
    assert layout.feed_forward_size == 2 * LLAMA["intermediate_size"]
    assert layout.layers == [
        Layers(count=1),
        Layers(count=1, key_elements=32, value_elements=32),
        Layers(count=1, key_elements=32, value_elements=32, window=512),
    ]
    assert layers(**GEMMA_4, layer_types=types, num_kv_shared_layers=4) is None


def test_model_of_another_type_takes_no_less_memory_by_the_fields_of_gemma_4() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {"layer_types": types, "sliding_window": 512}
    fields = {
        "num_kv_shared_layers": 2,
        "global_head_dim": 1,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    assert layers(**sizes, **fields) == layers(**sizes)


def test_layout_of_a_multimodal_model_is_that_of_its_language_model() -> None:
    assert folder_config.parse(json.dumps({"text_config": LLAMA, "hidden_size": 1}).encode()) == LLAMA


RECURRENT = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
STATE_BYTES = 4 * (3 * (2 * 2 * 8 + 4 * 16) + 4 * 8 * 16)
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    "stated",
    [
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        {"full_attention_interval": 3},
    ],
)
def test_layers_of_gated_delta_rule_attention_keep_a_state(stated: dict[str, object]) -> None:
    assert layers(**RECURRENT, **stated) == [
        Layers(count=2, state_bytes=STATE_BYTES),
        Layers(count=1, key_elements=32, value_elements=32),
    ]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 576), ({"index_head_dim": 128, "layer_types": ["deepseek_sparse_attention"] * 3}, 704)],
)
def test_latent_attention_keeps_no_values(changes: dict[str, object], kept: int) -> None:
    layout = folder_config.find_layout(LLAMA | LATENT | changes, WEIGHTS_BYTES)
    assert layout
    assert layout.layers == [Layers(count=3, key_elements=kept)]
    # As a GGUF file of the same model: the mean of 192, 576 and 512 elements.
    assert layout.attention_size == LLAMA["num_attention_heads"] * 427


def test_dense_layers_of_llama_4_are_wider_than_its_experts() -> None:
    sizes = {"intermediate_size_mlp": 500, "intermediate_size": 300}
    for used, wide in ((1, 500), (2, 600)):
        layout = folder_config.find_layout(LLAMA | sizes | {"num_experts_per_tok": used}, WEIGHTS_BYTES)
        assert layout
        assert (layout.feed_forward_size, layout.expert_outputs) == (wide, used)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": 512},
        LATENT | {"v_head_dim": None},
        LATENT | {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        LATENT | {"linear_num_key_heads": 2},
        {"mamba_d_state": 16},
        {"compress_ratios": [0, 4, 128]},
        {"layer_types": ["linear_attention"] * 3},
        RECURRENT,
        RECURRENT | {"layer_types": ["linear_attention"] * 3},
        RECURRENT | {"full_attention_interval": 3, "linear_conv_kernel_dim": None},
        RECURRENT | {"full_attention_interval": 3, "linear_value_head_dim": 1 << 23, "linear_num_value_heads": 1 << 23},
        {"linear_num_key_heads": 2, "layer_types": ["full_attention"] * 3},
        {"layer_types": ["full_attention"]},
        {"hidden_size": None},
        {"num_hidden_layers": "many"},
        {"intermediate_size": None},
        {"layer_types": [[], {}, None]},
        {"head_dim": 1 << 60},
        {"num_attention_heads": 128},
    ],
)
def test_an_unsupported_configuration_has_no_layout(changes: dict[str, object]) -> None:
    assert layers(**changes) is None


@pytest.mark.parametrize(
    ("changes", "size", "modes"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 16, ["chat", "embeddings"]),
        ({"architectures": ["Qwen3ForSequenceClassification"], "head_dim": 80}, 80, ["embeddings", "rerank"]),
        ({"architectures": ["BertModel"], "head_dim": 256, "global_head_dim": 512}, 256, ["embeddings", "rerank"]),
        ({"architectures": None, "kv_lora_rank": 512}, None, []),
        ({"architectures": [5], "num_attention_heads": 0}, None, []),
    ],
)
def test_modes_and_heads_of_a_folder(changes: dict[str, Any], size: int | None, modes: list[str]) -> None:
    summary = folder_config.summarize(LLAMA | changes)
    assert (summary.key_head_size, summary.value_head_size, summary.modes) == (size, size, modes)


def test_class_of_a_multimodal_model_is_that_of_all_its_parts() -> None:
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": LLAMA}
    assert folder_config.summarize(folder_config.parse(json.dumps(config).encode())).modes == ["chat", "embeddings"]


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *LLAMA,
                "architectures",
                "layer_types",
                "sliding_window",
                "head_dim",
                "global_head_dim",
                "num_kv_shared_layers",
                "full_attention_interval",
                *RECURRENT,
                *LATENT,
            ]
        ),
        st.none() | st.integers() | st.text() | st.lists(st.integers() | st.text()),
    )
)
def test_reader_survives_any_configuration(changes: dict[str, object]) -> None:
    layout = folder_config.find_layout(LLAMA | changes, WEIGHTS_BYTES)
    assert layout is None or all(layer.count > 0 for layer in layout.layers)
    folder_config.summarize(LLAMA | changes)
