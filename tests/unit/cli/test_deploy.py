"""`pomona deploy` makes objects of options and files, refuses what a cluster would refuse, and reports progress."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from cli.main import main
from cli.service.logs import choose_replicas
from cli.service.manifests import DeployError, ServiceOptions, build_objects, load_files
from cli.service.progress import PROGRESS_SECONDS, ProgressPrinter
from cli.service.verdict import Verdict
from crds.meta import API_VERSION

SOURCE = "hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
Obj = dict[str, Any]


def deploy(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["deploy", *arguments], prog_name="pomona")
    return result.exit_code, result.output


def test_only_stated_fields_are_applied() -> None:
    model, service = build_objects(ServiceOptions(name="chat", model=SOURCE), "team")
    assert model == {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": "qwen3-8b-q4-k-m", "namespace": "team"},
        "spec": {"source": SOURCE},
    }
    assert service["spec"] == {"modelRef": "qwen3-8b-q4-k-m"}
    assert service["metadata"] == {"name": "chat", "namespace": "team"}


def test_every_option_reaches_its_field() -> None:
    code, output = deploy(
        *("chat", "--model", "hf://Qwen/Qwen3-8B", "--files", "*.safetensors", "--source-secret", "hf"),
        *("--memory", "8GiB", "--accelerator", "nvidia", "--devices", "2", "--replicas", "3", "--parallel", "4"),
        *("--context-length", "8192", "--runtime", "vllm", "--image", "r.example/v:1", "--priority", "high"),
        "--dry-run",
    )
    assert code == 0, output
    model, service = yaml.safe_load_all(output)
    assert model["spec"] == {
        "source": "hf://Qwen/Qwen3-8B",
        "files": ["*.safetensors"],
        "sourceSecretRef": {"name": "hf"},
        "memoryBytes": 8 << 30,
    }
    assert service["spec"] == {
        "modelRef": "qwen3-8b",
        "replicas": 3,
        "contextLength": 8192,
        "parallel": 4,
        "runtime": "vllm",
        "image": "r.example/v:1",
        "priority": "high",
        "hardware": {"accelerator": "nvidia", "count": 2},
    }


def test_name_of_a_model_is_used_as_it_is() -> None:
    (service,) = build_objects(ServiceOptions(name="chat", model="qwen3-8b", replicas=0), None)
    assert service["spec"] == {"modelRef": "qwen3-8b", "replicas": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat"], "chat is not in the catalog (`pomona catalog` lists it): add --model SOURCE"),
        (
            ["qwen3-8"],
            "qwen3-8 is not in the catalog (`pomona catalog` lists it): did you mean qwen3-8b? Otherwise add",
        ),
        (["chat", "--model", SOURCE, "--replicas", "101"], "--replicas: spec.replicas: Invalid value: 101"),
        (["Chat", "--model", "tiny"], "InferenceService Chat: metadata.name: Invalid value"),
        (
            ["chat", "--model", "tiny", "--files", "*"],
            "--model tiny is the name of a Model: leave them out, or give a source",
        ),
        (["chat", "--model", "ollama://a:b"], "an ollama:// source needs spec.memoryBytes"),
        (["chat", "--model", "hf://nowhere"], "--model: "),
        (["chat", "--model", "Qwen/Qwen3-8B"], "--model Qwen/Qwen3-8B: neither a source, such as hf://ORG/REPO/FILE"),
        ([], "nothing to deploy: give NAME, or --file"),
        (["chat", "-f", "."], "--file takes neither NAME nor options of a service"),
        (["-f", ".", "--replicas", "2"], "--file takes neither NAME nor options of a service"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_any_cluster_is_asked(arguments: list[str], message: str) -> None:
    code, output = deploy(*arguments, "--dry-run")
    assert code == 2
    assert message in " ".join(output.split())


def write(path: Path, *objects: Obj) -> Path:
    path.write_text(yaml.safe_dump_all(objects))
    return path


def test_files_are_applied_as_they_are_with_models_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, service = build_objects(ServiceOptions(name="chat", model=SOURCE), None)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    objects = load_files([write(tmp_path / "all.yaml", service, secret, model)], "team")
    assert [manifest["kind"] for manifest in objects] == ["Model", "InferenceService"]
    assert objects[0]["spec"] == {"source": SOURCE}, "no default of the API server becomes a field of ours"
    assert objects[1]["metadata"]["namespace"] == "team"
    (skipped,) = capsys.readouterr().err.splitlines()
    assert "Secret s: ignored: `pomona deploy` applies Models and InferenceServices; use kubectl apply" in skipped


def test_what_a_dry_run_prints_is_read_from_a_file_or_standard_input(tmp_path: Path) -> None:
    for form in ("json", "yaml"):
        _, printed = deploy("chat", "--model", SOURCE, "--dry-run", "-o", form)
        path = tmp_path / f"chat.{form}"
        path.write_text(printed)
        assert deploy("-f", str(path), "--dry-run", "-o", form) == (0, printed)
    with path.open() as given:
        argv = [sys.executable, "-m", "cli.main", "deploy", "-f", "-", "--dry-run", "-o", form]
        done = subprocess.run(argv, check=True, stdin=given, capture_output=True, text=True, timeout=60)
    assert done.stdout == printed


def test_object_of_a_list_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("apiVersion: v1\nkind: List\nitems:\n- kind: Secret\n- 3\n")
    with pytest.raises(DeployError, match=r"list.yaml:5: invalid YAML: a manifest has to be a mapping"):
        load_files([path], None)


def test_problems_of_files_have_their_lines(tmp_path: Path) -> None:
    model, service = build_objects(ServiceOptions(name="chat", model=SOURCE), "theirs")
    path = write(tmp_path / "all.yaml", model, service, service)
    with pytest.raises(DeployError) as caught:
        load_files([path], "ours")
    said = str(caught.value).splitlines()
    assert f"{path}:20: document 3, InferenceService chat: defined in {path}:9 already: rename one of them" in said[0]
    assert f"{path}:5: document 1, Model qwen3-8b-q4-k-m: is in namespace theirs, and --namespace is ours" in said[1]
    with pytest.raises(DeployError, match="neither a Model nor an InferenceService found"):
        load_files([write(tmp_path / "none.yaml", {"apiVersion": "v1", "kind": "Secret"})], None)


def test_progress_is_printed_at_each_change_and_else_every_ten_seconds() -> None:
    now, lines = 0.0, list[str]()
    printer = ProgressPrinter("", lines.append, 80, lambda: now)

    def see(phase: str, reason: str, message: str) -> None:
        printer.print_verdict(phase, Verdict("on its way", message, reason, ""))

    see("Pending", "ModelNotReady", "waiting for Model tiny to be inspected")
    for step in range(4):
        now = 1.0 + step * PROGRESS_SECONDS / 3
        see("Downloading", "Downloading", f"downloaded {step} of 4 GiB")
    see("Progressing", "Probing", "")
    see("Progressing", "Probing", "")
    assert lines == [
        "[  0.0 s] Pending: waiting for Model tiny to be inspected",
        "[  1.0 s] Downloading: downloaded 0 of 4 GiB",
        "[ 11.0 s] Downloading: downloaded 3 of 4 GiB",
        "[ 11.0 s] Progressing",
    ]


def test_replica_is_chosen_by_number_or_name() -> None:
    replicas: list[Obj] = [{"metadata": {"name": "chat-a"}}, {"metadata": {"name": "chat-b"}}]
    assert choose_replicas("chat", replicas, None) == replicas
    assert choose_replicas("chat", replicas, "1") == choose_replicas("chat", replicas, "chat-b") == replicas[1:]
    with pytest.raises(click.ClickException, match=r"chat has no replica 2: choose 0 \(chat-a\), 1 \(chat-b\)"):
        choose_replicas("chat", replicas, "2")
