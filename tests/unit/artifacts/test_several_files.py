"""Artifacts of several files, inspected, fetched and stored: folders of safetensors and split GGUF models."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact
from artifacts.fetch_source import fetch_source
from artifacts.inspect import Inspection, check_stored, inspect
from artifacts.source import parse
from artifacts.weights_store import WeightsStore
from tests.support.file_server import COMMIT, FileServer, TransferFault
from tests.support.source_access import take_access, take_expected
from tests.support.tiny_models import tiny_gguf, tiny_mlx, tiny_split
from tests.unit.artifacts.stored_weights import HURRIED, obtain

INDEX = "model.safetensors.index.json"


async def inspect_source(server: FileServer, source: str, *files: str, **options: Any) -> Inspection:
    access = take_access(options, endpoint=server.url, patience=HURRIED)
    return await inspect(parse(source, files), access, **options)


async def fetch_files(server: FileServer, to: Path, source: str, *files: str, **options: Any) -> FetchedArtifact:
    access = take_access(options, endpoint=server.url, patience=HURRIED)
    options.setdefault("on_progress", lambda _done, _total: None)
    return await fetch_source(parse(source, files), to, access, take_expected(options), **options)


async def refused(call: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await call
    assert "\n" not in caught.value.message
    return caught.value


def write_folder(folder: Path, *, shards: int = 2, written_for: str = "pt", **config: Any) -> Path:
    """Write a model in the layout of a hub's repository, with what a repository has beside it."""
    tiny_mlx.write(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {key: names[position % shards] for position, key in enumerate(tensors)}
    for name in names:
        part = {key: tensors[key] for key in tensors if weight_map[key] == name}
        save_file(part, folder / name, metadata={"format": written_for})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))
    for name in ("pytorch_model.bin", "model.onnx", "modeling.py", "consolidated.safetensors", "original/model.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"another copy")
    return folder


@pytest.fixture
def folder(server: FileServer) -> Path:
    return write_folder(server.root / "acme" / "tiny")


@pytest.fixture
def parts(server: FileServer) -> list[Path]:
    return tiny_split.write(server.root / "acme" / "split" / "F32")


def count_elements(folder: Path) -> int:
    weights = [load_file(path) for path in folder.glob("model-*.safetensors")]
    return sum(tensor.size for tensors in weights for tensor in tensors.values())


def list_fetched(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith((".lock", ".verified.json"))}


class TestSafetensors:
    async def test_folder_is_inspected_by_its_headers(self, server: FileServer, folder: Path) -> None:
        inspection = await inspect_source(server, "hf://acme/tiny")
        elements = count_elements(folder)
        assert (inspection.format, inspection.revision, inspection.file, inspection.sha256) == (
            "safetensors",
            COMMIT,
            "",
            "",
        )
        assert (inspection.tensor_bytes, inspection.total_parameters, inspection.active_parameters) == (
            4 * elements,
            elements,
            None,
        )
        assert inspection.gguf.quantization == "float32"
        assert inspection.layout is not None
        assert inspection.layout.tensor_bytes == 4 * elements
        assert not server.seen(".bin") + server.seen("consolidated.safetensors") + server.seen(".py")

    async def test_files_for_an_engine_are_fetched_and_verified(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        inspection = await inspect_source(server, "hf://acme/tiny")
        progress: list[tuple[int, int | None]] = []
        done = await fetch_files(
            server,
            tmp_path / "to",
            "hf://acme/tiny",
            revision=inspection.revision,
            size_bytes=inspection.size_bytes,
            on_progress=lambda here, total: progress.append((here, total)),
        )
        assert (done.path, done.size_bytes, done.sha256) == (tmp_path / "to", inspection.size_bytes, "")
        assert list_fetched(done.path) == {
            *("config.json", "tokenizer.json", "tokenizer_config.json", INDEX),
            *(f"model-{number:05}-of-00002.safetensors" for number in (1, 2)),
        }
        assert all((done.path / name).read_bytes() == (folder / name).read_bytes() for name in list_fetched(done.path))
        assert progress[-1] == (inspection.size_bytes, inspection.size_bytes)

    async def test_fetched_folder_has_the_facts_of_its_inspection(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        inspection = await inspect_source(server, "hf://acme/tiny")
        done = await fetch_files(server, tmp_path / "to", "hf://acme/tiny", revision=inspection.revision)
        stored = check_stored(parse("hf://acme/tiny"), done.path)
        assert (stored.format, stored.total_parameters) == (inspection.format, count_elements(folder))

    async def test_interrupted_fetch_continues_with_the_missing_bytes(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        name = "model-00002-of-00002.safetensors"
        server.latency_seconds = 0
        await fetch_files(server, tmp_path / "to", "hf://acme/tiny")
        (tmp_path / "to" / name).unlink()
        server.requests.clear()
        await fetch_files(server, tmp_path / "to", "hf://acme/tiny")
        fetched = {Path(request.path).name for request in server.requests if request.port == server.cdn_port}
        assert fetched == {name, INDEX}, "the index is read to choose the files"
        assert (tmp_path / "to" / name).read_bytes() == (folder / name).read_bytes()

    @pytest.mark.parametrize(
        ("written_for", "config", "format_", "quantization"),
        [
            ("mlx", {}, "mlx", "float32"),
            ("pt", {"quantization": {"bits": 4, "group_size": 64}}, "mlx", "4-bit"),
            ("pt", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "safetensors", "awq 4-bit"),
            ("pt", {"quantization_config": {"quant_method": "gptq", "bits": 8}}, "safetensors", "gptq 8-bit"),
            ("pt", {"quantization_config": {"quant_method": "fp8"}}, "safetensors", "fp8"),
            ("pt", {"quantization_config": {"quant_method": "mxfp4"}}, "safetensors", "mxfp4"),
            (
                "pt",
                {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
                "safetensors",
                "nvfp4",
            ),
            (
                "pt",
                {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
                *("safetensors", "bitsandbytes 4-bit"),
            ),
            (
                "pt",
                {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
                *("safetensors", "nvfp4"),
            ),
            (
                "pt",
                {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "format": "pack-quantized",
                        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
                    }
                },
                *("safetensors", "compressed-tensors 4-bit"),
            ),
            ("pt", {"quantization_config": [7]}, "safetensors", "float32"),
            (
                "pt",
                {"quantization_config": {"quant_method": {}, "bits": "x", "config_groups": [1]}},
                "safetensors",
                "float32",
            ),
        ],
    )
    async def test_format_and_quantization_are_found(
        self, server: FileServer, written_for: str, config: dict[str, Any], format_: str, quantization: str
    ) -> None:
        write_folder(server.root / "acme" / "tiny", written_for=written_for, **config)
        inspection = await inspect_source(server, "hf://acme/tiny")
        assert (inspection.format, inspection.gguf.quantization) == (format_, quantization)

    async def test_quantization_of_modelopt_is_found_in_its_own_file(self, server: FileServer, folder: Path) -> None:
        (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
        assert (await inspect_source(server, "hf://acme/tiny")).gguf.quantization == "nvfp4"

    async def test_cut_weights_are_refused_with_the_name_of_the_file(self, server: FileServer, folder: Path) -> None:
        path = folder / "model-00002-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        error = await refused(inspect_source(server, "hf://acme/tiny"))
        assert error.reason == "HeaderInvalid"
        assert error.message.startswith(f"hf://acme/tiny@main: {path.name}: has tensors up to byte")

    async def test_other_bytes_than_the_hub_states_are_refused(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        name = "model-00001-of-00002.safetensors"
        server.digests[name] = "0" * 64
        error = await refused(fetch_files(server, tmp_path / "to", "hf://acme/tiny"))
        assert (error.reason, name in error.message) == ("ChecksumMismatch", True)
        assert name not in list_fetched(tmp_path / "to")
        assert (folder / name).exists()

    async def test_hostile_names_in_a_listing_are_not_fetched(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        server.listed += ["../../escape.json", "/etc/escape.json", ".config.json", "a\nb.json", "a/../../escape.json"]
        done = await fetch_files(server, tmp_path / "to", "hf://acme/tiny")
        assert not server.seen("escape.json")
        assert list_fetched(done.path) <= list_fetched(folder)
        assert list_fetched(tmp_path) <= {"to", "www"}

    @pytest.mark.parametrize(
        ("status", "reason"), [(401, "SourceUnauthorized"), (403, "SourceUnauthorized"), (404, "SourceNotFound")]
    )
    async def test_refusal_of_the_hub_is_told(
        self, server: FileServer, folder: Path, tmp_path: Path, status: int, reason: str
    ) -> None:
        del folder
        server.statuses.extend([status] * 2)
        assert (await refused(inspect_source(server, "hf://acme/tiny"))).reason == reason
        error = await refused(fetch_files(server, tmp_path / "to", "hf://acme/tiny"))
        assert (error.reason, f"HTTP {status}" in error.message) == (reason, True)

    async def test_space_for_all_files_is_required_before_the_first(
        self, server: FileServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del folder
        usage = os.statvfs(tmp_path)
        monkeypatch.setattr(
            "artifacts.partial_download.shutil.disk_usage", lambda _path: type("Usage", (), {"free": usage.f_frsize})
        )
        error = await refused(fetch_files(server, tmp_path / "to", "hf://acme/tiny"))
        assert (error.reason, error.retryable) == ("NoSpace", True)
        assert not any(request.path.endswith("00001-of-00002.safetensors") for request in server.requests)


class TestSplitModels:
    async def test_split_model_has_the_facts_of_the_whole(
        self, server: FileServer, parts: list[Path], tmp_path: Path
    ) -> None:
        tiny_gguf.write(tmp_path / "whole.gguf")
        whole = await inspect_source(server, f"file://{tmp_path}/whole.gguf", file_root=tmp_path)
        sources = (
            ("hf://acme/split/F32/tiny-00001-of-00003.gguf",),
            ("hf://acme/split", "F32/*.gguf"),
            (f"{server.url}/acme/split/F32/tiny-00001-of-00003.gguf",),
        )
        for source in sources:
            inspection = await inspect_source(server, *source)
            assert (inspection.format, inspection.file, inspection.sha256) == ("gguf", parts[0].name, "")
            assert inspection.size_bytes == sum(path.stat().st_size for path in parts)
            assert (inspection.layout, inspection.total_parameters) == (whole.layout, whole.total_parameters)
            assert inspection.gguf.tensor_count == whole.gguf.tensor_count
        inspection = await inspect_source(server, f"file://{parts[0]}", file_root=server.root)
        assert (inspection.layout, inspection.file) == (whole.layout, parts[0].name)

    @pytest.mark.parametrize("scheme", ["hf", "http"])
    async def test_parts_are_fetched_as_a_set_beside_the_first(
        self, server: FileServer, parts: list[Path], tmp_path: Path, scheme: str
    ) -> None:
        base = "hf://acme/split" if scheme == "hf" else f"{server.url}/acme/split"
        source = f"{base}/F32/{parts[0].name}"
        inspection = await inspect_source(server, source)
        done = await fetch_files(
            server, tmp_path / "to", source, revision=inspection.revision, size_bytes=inspection.size_bytes
        )
        assert (done.path, done.revision) == (tmp_path / "to" / parts[0].name, inspection.revision)
        assert list_fetched(tmp_path / "to") == {path.name for path in parts}
        assert check_stored(parse(source), done.path).layout == inspection.layout
        (tmp_path / "to" / parts[1].name).unlink()
        with pytest.raises(ArtifactError, match=f"{parts[1].name} is missing"):
            check_stored(parse(source), done.path)

    async def test_changed_part_of_a_web_server_is_refused(
        self, server: FileServer, parts: list[Path], tmp_path: Path
    ) -> None:
        source = f"{server.url}/acme/split/F32/{parts[0].name}"
        inspection = await inspect_source(server, source)
        os.utime(parts[2], (1, 1))
        error = await refused(fetch_files(server, tmp_path / "to", source, revision=inspection.revision))
        assert error.reason == "SourceChanged"

    async def test_missing_part_is_named(self, server: FileServer, parts: list[Path]) -> None:
        parts[1].unlink()
        error = await refused(inspect_source(server, "hf://acme/split", "*.gguf"))
        assert (error.reason, parts[1].name in error.message) == ("SourceNotFound", True)
        error = await refused(inspect_source(server, f"{server.url}/acme/split/F32/{parts[0].name}"))
        assert (error.reason, parts[1].name in error.message) == ("SourceNotFound", True)

    async def test_part_of_another_model_is_refused(self, server: FileServer, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        error = await refused(inspect_source(server, "hf://acme/split", "*.gguf"))
        assert error.reason == "HeaderInvalid"
        assert f"{parts[1].name}: its header says that it is part 2 of 3" in error.message

    async def test_pattern_for_one_file_takes_its_digest(
        self, server: FileServer, parts: list[Path], tmp_path: Path
    ) -> None:
        del parts
        tiny_gguf.write(server.root / "acme" / "split" / "tiny-Q8_0.gguf", ftype="q8_0")
        digest = hashlib.sha256((server.root / "acme" / "split" / "tiny-Q8_0.gguf").read_bytes()).hexdigest()
        inspection = await inspect_source(server, "hf://acme/split", "*Q8_0*.gguf", sha256=digest)
        assert (inspection.file, inspection.sha256) == ("tiny-Q8_0.gguf", digest)
        done = await fetch_files(server, tmp_path / "to", "hf://acme/split", "*Q8_0*.gguf", sha256=digest)
        assert (done.path.name, done.sha256) == ("tiny-Q8_0.gguf", digest)

    @pytest.mark.parametrize(
        ("source", "reason", "says"),
        [
            (["hf://acme/split", "*Q8_0*.gguf"], "ChecksumMismatch", "expected sha256 0000"),
            (["hf://acme/split", "F32/*.gguf"], "SourceInvalid", "3 files, which have no one sha256"),
            (["hf://acme/split/F32/tiny-00001-of-00003.gguf"], "SourceInvalid", "a split model has no sha256"),
        ],
        ids=["of other bytes", "of several files", "of a split model"],
    )
    async def test_digest_that_cannot_hold_is_refused(
        self, server: FileServer, parts: list[Path], source: list[str], reason: str, says: str
    ) -> None:
        quantized = server.root / "acme" / "split" / "tiny-Q8_0.gguf"
        tiny_gguf.write(quantized, ftype="q8_0")
        server.digests[quantized.name] = hashlib.sha256(quantized.read_bytes()).hexdigest()
        assert parts[0].exists()
        error = await refused(inspect_source(server, *source, sha256="0" * 64))
        assert (error.reason, says in error.message) == (reason, True), error.message

    async def test_active_parameters_follow_from_the_experts(self, server: FileServer, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "moe.gguf", "qwen3moe")
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((8, 4, 32), np.float32))
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float32))
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        inspection = await inspect_source(server, f"file://{tmp_path}/moe.gguf", file_root=tmp_path)
        assert (inspection.total_parameters, inspection.active_parameters) == (1024 + 1024, 1024 + 256)


class TestStore:
    async def test_host_serves_a_split_model_by_its_first_part(
        self, store: WeightsStore, server: FileServer, parts: list[Path]
    ) -> None:
        source = f"hf://acme/split/F32/{parts[0].name}"
        held = await obtain(store, source)
        assert held.path.name == parts[0].name
        assert [held.path.with_name(part.name).read_bytes() for part in parts] == [part.read_bytes() for part in parts]
        server.requests.clear()
        again = store.lock_stored(parse(source), None, None)
        assert again is not None
        assert (again.path, server.requests) == (held.path, [])

    async def test_same_parts_of_two_sources_are_one_object(
        self, store: WeightsStore, server: FileServer, parts: list[Path]
    ) -> None:
        for base in ("hf://acme/split", f"{server.url}/acme/split"):
            await obtain(store, f"{base}/F32/{parts[0].name}")
        assert len(store.stored()) == 1

    async def test_two_patterns_of_one_repository_are_two_objects(
        self, store: WeightsStore, server: FileServer
    ) -> None:
        folder = server.root / "acme" / "both"
        folder.mkdir(parents=True)
        for ftype in ("f32", "q8_0"):
            tiny_gguf.write(folder / f"tiny-{ftype}.gguf", ftype=ftype)
        options = {"sha256": None, "revision": COMMIT, "token": None, "on_progress": lambda _a, _b: None}
        for ftype in ("f32", "q8_0", "f32"):
            held = await store.obtain(parse("hf://acme/both", [f"*{ftype}.gguf"]), **options)  # type: ignore[arg-type]
            assert held.path.name == f"tiny-{ftype}.gguf"

    async def test_private_split_model_is_used_by_those_whom_the_hub_lets_in(
        self, store: WeightsStore, server: FileServer, parts: list[Path]
    ) -> None:
        del parts
        server.token = "open-sesame"
        source, options = "hf://acme/split/F32/tiny-00001-of-00003.gguf", {"revision": COMMIT}
        await obtain(store, source, token="open-sesame", tenant="a", **options)
        server.requests.clear()
        await obtain(store, source, token="open-sesame", tenant="b", **options)
        assert not server.bytes_sent(".gguf") > 1
        with pytest.raises(ArtifactError, match="HTTP 401"):
            await obtain(store, source, token="wrong", tenant="c", **options)

    async def test_owner_serves_one_file_of_his_folder(self, store: WeightsStore, tmp_path: Path) -> None:
        folder = tmp_path / "files" / "models"
        tiny_split.write(folder)
        held = await store.obtain(
            parse(f"file://{folder}/", ["tiny-*.gguf"]),
            sha256=None,
            revision=None,
            token=None,
            on_progress=lambda _here, _total: None,
        )
        assert held.path == folder / "tiny-00001-of-00003.gguf"


class TestVolumes:
    async def test_cut_fetch_of_a_folder_is_completed_by_another(
        self, server: FileServer, folder: Path, tmp_path: Path
    ) -> None:
        del folder
        server.faults.extend([TransferFault(10)] * HURRIED.attempts)
        await refused(fetch_files(server, tmp_path / "to", "hf://acme/tiny"))
        server.faults.clear()
        done = await fetch_files(server, tmp_path / "to", "hf://acme/tiny")
        assert "model-00002-of-00002.safetensors" in list_fetched(done.path)
