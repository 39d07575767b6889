"""The files that an engine gets of a listing, and what a user reads when they are not one model."""

import contextlib
import json
import re
from collections.abc import Mapping

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.file_choice import choose_files, choose_indexed
from artifacts.repositories.repository import Listing, RepositoryFile, is_wanted
from artifacts.source import SourceError, parse

COMMON = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")
SHARDED = (*COMMON, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
QUANTS = ("README.txt", "x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-F16.gguf")
SPLIT = tuple(f"Q4_K_M/x-Q4_K_M-{number:05}-of-00003.gguf" for number in (1, 2, 3))


def listing(*paths: str) -> Listing:
    return Listing("c", [RepositoryFile(path, 7, None) for path in sorted(paths)])


def choose(paths: tuple[str, ...], *files: str, source: str = "hf://acme/x") -> list[str]:
    return [file.path for file in choose_files(parse(source, files), listing(*paths))]


def refused(paths: tuple[str, ...], *files: str, source: str = "hf://acme/x") -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        choose(paths, *files, source=source)
    return caught.value


def narrow(paths: tuple[str, ...], weight_map: Mapping[str, str], *files: str, is_mounted: bool = False) -> list[str]:
    source = parse("hf://acme/x", files)
    chosen = choose_files(source, listing(*paths, INDEX))
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return [file.path for file in choose_indexed(source, chosen, index, is_mounted=is_mounted)]


def test_folder_has_weights_configuration_and_tokenizer_only() -> None:
    others = ("original/model.safetensors", "consolidated.safetensors", "x.gguf", "consolidated.safetensors.index.json")
    assert choose((*SHARDED, *others)) == sorted(SHARDED)


def test_weights_of_the_author_are_taken_if_there_are_no_others() -> None:
    assert "consolidated.safetensors" in choose((*COMMON, "consolidated.safetensors"))


def test_index_decides_which_weights_are_taken() -> None:
    named = {"a": SHARDED[-2], "b": SHARDED[-1], "c": SHARDED[-1]}
    assert narrow((*SHARDED, "model.fp16.safetensors"), named) == sorted((*SHARDED, INDEX))


def test_patterns_choose_other_weights_than_the_index_names() -> None:
    paths = (*SHARDED, "model.fp16.safetensors")
    assert narrow(paths, {"a": SHARDED[-1]}, "*fp16*") == sorted((*COMMON, "model.fp16.safetensors"))
    assert INDEX in narrow(paths, {"a": SHARDED[-1]}, SHARDED[-1])


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "config.json", ""])
def test_index_that_names_a_file_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match=r"model\.safetensors\.index\.json names") as caught:
        narrow(SHARDED, {"a": name})
    assert caught.value.reason == "HeaderInvalid"


def test_index_that_names_an_absent_file_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"names gone\.safetensors, which is missing") as caught:
        narrow(SHARDED, {"a": "gone.safetensors", "b": SHARDED[-1]})
    assert caught.value.reason == "SourceNotFound"


OF_FOUR = {f"t{number}": f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)}


@pytest.mark.parametrize("weights", [("model.safetensors",), SHARDED[-2:], ("model-00000-of-00001.safetensors",)])
def test_index_of_another_build_is_left_out(weights: tuple[str, ...]) -> None:
    assert narrow((*COMMON, *weights), OF_FOUR) == sorted((*COMMON, *weights))
    with pytest.raises(ArtifactError, match="names none of the weights beside it, so engines would load none: delete"):
        narrow((*COMMON, *weights), OF_FOUR, is_mounted=True)


@pytest.mark.parametrize("index", [(), (INDEX,)])
def test_weights_that_are_not_whole_by_their_own_numbers_are_refused(index: tuple[str, ...]) -> None:
    for numbers, missing in (((1,), 2), ((2,), 1), ((0,), 1)):
        parts = tuple(f"model-{number:05}-of-00002.safetensors" for number in numbers)
        with pytest.raises(ArtifactError, match=rf"model-0000{missing}-of-00002\.safetensors is missing: .*not whole$"):
            narrow((*COMMON, *parts), OF_FOUR) if index else choose((*COMMON, *parts))
    assert "model-00003-of-00002.safetensors" in choose((*SHARDED, "model-00003-of-00002.safetensors"))


def test_files_chooses_the_weights_that_are_whole_as_the_message_says() -> None:
    paths = (*COMMON, "model.safetensors", SHARDED[-1])
    error = refused(paths)
    assert "00001-of-00002.safetensors is missing" in error.message
    assert "or name others in files, for example files: ['model.safetensors']" in error.message
    assert choose(paths, "model.safetensors") == sorted((*COMMON, "model.safetensors"))
    both = (*SHARDED, *list(OF_FOUR.values())[:-1])
    with pytest.raises(ArtifactError, match=r"files: \['model-\*-of-00002\.safetensors'\]"):
        narrow(both, OF_FOUR)
    assert narrow(both, OF_FOUR, "model-*-of-00002.safetensors") == sorted(SHARDED)
    with pytest.raises(ArtifactError, match="not whole"):
        choose(SHARDED, SHARDED[-1])


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": {"a": 1}}', b"[" * 100_000, b"\xff"])
def test_index_that_is_not_valid_is_refused(index: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"^model\.safetensors\.index\.json is not valid: ") as caught:
        choose_indexed(parse("hf://acme/x"), listing(*SHARDED).files, index)
    assert caught.value.reason == "HeaderInvalid"


def test_pattern_chooses_one_gguf_model() -> None:
    assert choose(QUANTS, "*Q4_K_M*.gguf") == ["x-Q4_K_M.gguf"]
    assert choose((*QUANTS, *SPLIT), "Q4_K_M/*.gguf") == list(SPLIT)
    assert choose(SPLIT, "*00001-of-00003.gguf") == list(SPLIT), "an engine needs the others, too"
    assert choose(SPLIT, source=f"hf://acme/x/{SPLIT[0]}") == list(SPLIT)


def test_pattern_that_matches_nothing_is_named_with_what_there_is() -> None:
    error = refused(("a.gguf", "b.gguf", "c.gguf", "d.gguf", "e.gguf", "f.gguf"), "*Q9*.gguf")
    assert error.reason == "SourceNotFound"
    assert (
        "'*Q9*.gguf', which matches nothing: there is a.gguf, b.gguf, c.gguf, d.gguf, e.gguf and 1 more"
        in error.message
    )
    assert "a pattern for GGUF files ends in .gguf" in refused(QUANTS, "*Q4_K_M*").message
    assert "there is nothing that an engine reads" in refused((), "*.gguf").message


def test_patterns_for_two_models_or_two_formats_are_refused_with_what_to_write() -> None:
    error = refused(QUANTS, "x-*.gguf")
    assert (error.reason, "files matches 2 models, x-Q4_K_M.gguf, x-Q8_0.gguf" in error.message) == (
        "SourceInvalid",
        True,
    )
    assert "files: ['x-Q4_K_M.gguf']" in error.message
    error = refused((*QUANTS, *SHARDED), "x-Q8_0.gguf", "*.safetensors")
    assert (error.reason, "two formats" in error.message) == ("SourceInvalid", True)


def test_missing_part_is_named() -> None:
    for patterns, source in ((("*.gguf",), "hf://acme/x"), ((), f"hf://acme/x/{SPLIT[0]}")):
        error = refused((SPLIT[0], SPLIT[2]), *patterns, source=source)
        assert error.reason == "SourceNotFound"
        assert "x-Q4_K_M-00002-of-00003.gguf is missing: the model needs all of its 3 files" in error.message


def test_parts_of_the_same_name_in_two_folders_are_two_models() -> None:
    other = tuple(path.replace("Q4_K_M/", "copy/") for path in SPLIT)
    assert "matches 2 models" in refused((*SPLIT, *other), "*.gguf").message


def test_weights_in_a_folder_of_the_repository_are_refused() -> None:
    assert "engines read none there" in refused((*COMMON, "fp8/model.safetensors"), "fp8/*").message


def test_repository_of_gguf_files_needs_a_pattern() -> None:
    assert "files: ['mmproj-F16.gguf']" in refused(QUANTS).message
    assert "FILE.gguf" in refused(COMMON).message


def test_too_many_files_are_refused() -> None:
    error = refused((*SHARDED, *(f"{number}.json" for number in range(1000))))
    assert error.reason == "SourceRefused"


@pytest.mark.parametrize(
    "path",
    [
        *("../x.json", "/x.json", "a//x.json", ".x.json", "a/../x.gguf", "a\n.json", "x.py", "x.bin", ""),
        *("é" * 200 + ".json", "x.safetensors.part.json", "x.verified.json", "a/" * 1024 + "x.json"),
    ],
)
def test_hostile_and_foreign_names_are_not_listed(path: str) -> None:
    assert not is_wanted(path)


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("hf://acme/x/one.gguf", ["*.gguf"]),
        ("https://files/one.gguf", ["*.gguf"]),
        ("file:///models/", ["*.safetensors"]),
        ("hf://acme/x", ["*.gguf"] * 65),
        ("hf://acme/x", ["a" * 252 + ".gguf"]),
        *(
            ("hf://acme/x", [bad])
            for bad in ("", "../*.gguf", "a/../b.gguf", "/a.gguf", "a\n", "a//b", "a/", "a\u202eb", "\x7f")
        ),
    ],
)
def test_patterns_that_are_not_valid_are_refused(source: str, files: list[str]) -> None:
    with pytest.raises(SourceError):
        parse(source, files)


@pytest.mark.parametrize(
    "path", ["My Model (v2).gguf", "UPPER.GGUF", "sub dir/x y.gguf", "ünïcode.gguf", "plus+and,it's.gguf", "a@b.gguf"]
)
def test_any_name_of_the_hub_can_be_chosen(path: str) -> None:
    assert choose((path, "other.gguf"), path) == [path]
    assert choose((path, "other.gguf"), path[:3] + "*" + path[-5:]) == [path]


def follow(error: ArtifactError) -> list[str]:
    """Return the field `files` that a message advises, as YAML reads it."""
    advised = re.search(r"for example (files: \[.*\])$", error.message)
    assert advised, error.message
    files: list[str] = yaml.safe_load(advised[1])["files"]
    return files


@given(
    st.lists(
        st.text(st.characters(codec="utf-8") | st.sampled_from("*?[]!'\"\\ #{}:%@$"), min_size=1, max_size=12),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from([(".gguf",), (".gguf", "*.gguf"), (".GGUF", "*.GGUF"), (".safetensors",)]),
)
def test_what_a_message_advises_is_accepted_and_chooses(names: list[str], case: tuple[str, ...]) -> None:
    suffix, *patterns = case
    paths = tuple(sorted({path for name in names if is_wanted(path := f"{name}{suffix}")}))
    others = (*COMMON, "model-00001-of-00002.safetensors") if suffix == ".safetensors" else ()
    top = [path for path in paths if "/" not in path]
    if not top or (patterns and len(paths) == 1) or any(path.startswith("consolidated") for path in paths):
        return
    chosen = choose((*paths, *others), *follow(refused((*paths, *others), *patterns)))
    assert [path for path in chosen if path.endswith(suffix)] in [[path] for path in paths]


def test_name_that_no_pattern_can_have_is_not_advised() -> None:
    long = "/".join(["a" * 100] * 3) + ".gguf"
    assert "files: ['short.gguf']" in refused((long, "short.gguf")).message
    assert refused((long,)).message.endswith("name one of its GGUF files in files")
    assert "files: ['x.gguf']" in refused(("x.gguf", SPLIT[1].rpartition("/")[2]), "*.gguf").message, "no part is"
    assert "names part 9 of 3" in refused(("x-00009-of-00003.gguf",), "*.gguf").message


def test_later_part_is_refused_with_the_name_of_the_first() -> None:
    with pytest.raises(SourceError, match=r"name the first part, x-00001-of-00003\.gguf"):
        parse("https://files/x-00002-of-00003.gguf")
    for name in ("x-00004-of-00003.gguf", "x-00001-of-99999.gguf", "x-00000-of-00000.gguf"):
        with pytest.raises(SourceError, match="a model has 1 to 500 parts"):
            parse(f"hf://acme/x/{name}")


@given(
    st.lists(st.text(max_size=30) | st.sampled_from([*SHARDED, *SPLIT, *QUANTS])), st.sampled_from(["*", "*.gguf", ""])
)
def test_any_listing_ends_in_files_of_it_or_an_error(paths: list[str], pattern: str) -> None:
    wanted = {path for path in paths if is_wanted(path)}
    with contextlib.suppress(ArtifactError):
        assert set(choose(tuple(wanted), *([pattern] if pattern else []))) <= wanted
