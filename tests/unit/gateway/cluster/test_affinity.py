"""The number of a conversation: the same in each of its turns, another one in another conversation."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.affinity import PROMPT_BYTES, SHARED_BYTES, USER_BYTES, find_affinity
from gateway.http.headers import Headers
from gateway.proxy.errors import RequestError
from gateway.proxy.request_body import SHORT_BODY_BYTES, read_short_body, scan_body
from tests.support.large_bodies import KINDS

ROUTES = ["chat", "messages", "responses"]
SYSTEM = "You are a coding agent. " * 2000
TOOLS = [{"name": f"tool_{number}", "description": "It edits a file. " * 20} for number in range(12)]
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"


def find(route: str, body: dict[str, Any], namespace: str = "team", **headers: str) -> int | None:
    """Return the affinity of a request, the same for its body as it is decoded and as it is scanned."""
    head = Headers([(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])
    padding = "x" * (SHORT_BODY_BYTES if len(json.dumps(body)) <= SHORT_BODY_BYTES else 0)
    bodies = [read_short_body(json.dumps(body).encode()), scan(json.dumps(body | {"padding": padding}).encode())]
    numbers = {find_affinity(head, route, body.fields, namespace) for body in bodies if body}
    assert len(numbers) == 1
    return numbers.pop()


def scan(content: bytes) -> Any:
    work = scan_body(content)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def write_conversation(route: str, question: str, answers: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the body of the turn of a conversation that follows so many answers."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for number in range(answers):
        turns += [
            {"role": "assistant", "content": f"answer {number} " * 100},
            {"role": "user", "content": f"and then? {number}"},
        ]
    match route:
        case "chat":
            body: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}, *turns], "tools": TOOLS}
        case "messages":
            body = {"messages": turns, "system": SYSTEM, "tools": TOOLS}
        case _:
            body = {"input": turns, "instructions": SYSTEM, "tools": TOOLS}
    return {"model": "chat", **body, **changes}


# Turns


@pytest.mark.parametrize("route", ROUTES)
def test_turns_of_a_conversation_have_one_number(route: str) -> None:
    numbers = {find(route, write_conversation(route, "fix the bug", answers)) for answers in (0, 1, 2, 20, 300)}
    assert len(numbers) == 1
    assert numbers != {None}


@pytest.mark.parametrize("route", ROUTES)
def test_conversations_of_one_agent_have_many_numbers(route: str) -> None:
    """They share tools and a system prompt of 48 KB, and must not all go to one endpoint."""
    numbers = {find(route, write_conversation(route, f"fix bug {number}")) for number in range(20)}
    assert len(numbers) == 20


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("change", ["system", "tools"])
def test_other_agents_have_other_numbers(route: str, change: str) -> None:
    body = write_conversation(route, "hello")
    other = json.loads(json.dumps(body).replace("You are a coding" if change == "system" else "tool_0", "Its name is"))
    assert find(route, body) != find(route, other)


@pytest.mark.parametrize("route", ROUTES)
def test_mark_and_form_of_the_first_turn_may_change(route: str) -> None:
    """Cline sends the newest turns as parts with a mark for the cache, and older ones as texts."""
    body, later = write_conversation(route, 'say "hello"\n'), write_conversation(route, "", answers=3)
    marked = [{"type": "text", "text": 'say "hello"\n', "cache_control": {"type": "ephemeral"}}]
    turns = later["input" if route == "responses" else "messages"]
    next(turn for turn in turns if turn["role"] == "user")["content"] = marked
    assert find(route, body) == find(route, later)


def test_all_that_the_user_says_before_the_first_answer_counts() -> None:
    """Codex sends the folder and the shell as a first turn of the user, the same in all of its conversations."""
    environment = {"role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]}
    bodies = [write_conversation("responses", question) for question in ("fix the bug", "write a test")]
    for body in bodies:
        body["input"] = [{"role": "developer", "content": "be brief"}, environment, *body["input"]]
    assert find("responses", bodies[0]) != find("responses", bodies[1])


def test_greeting_before_the_first_question_is_no_answer() -> None:
    greeting = {"role": "assistant", "content": "Hello! How can I help?"}
    bodies = [
        {"messages": [greeting, *write_conversation("messages", question, answers)["messages"]]}
        for question, answers in (("a", 0), ("a", 5), ("b", 0))
    ]
    first, later, other = (find("messages", body) for body in bodies)
    assert first == later != other


def test_first_turn_that_is_very_long_has_one_number() -> None:
    document = json.dumps(list(range(40_000)))
    first, later = (find("chat", write_conversation("chat", document, answers)) for answers in (0, 10))
    assert first == later != find("chat", write_conversation("chat", f"other: {document}"))


def test_images_of_first_turns_count() -> None:
    images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{digits}"}} for digits in ("AB", "CD")]
    first, other = (find("chat", {"messages": [{"role": "user", "content": [image]}]}) for image in images)
    assert first != other


@pytest.mark.parametrize(
    ("text", "is_same"), [("y" * 5000, True), ("", True), ("x" * PROMPT_BYTES, True), ("z", False)]
)
def test_prompt_may_grow_at_its_end(text: str, is_same: bool) -> None:
    start = "x" * PROMPT_BYTES if is_same else "x" * 10
    assert (find("completions", {"prompt": start + text}) == find("completions", {"prompt": start})) is is_same


@pytest.mark.parametrize("text", ["what is this?", ["a", "b"]])
def test_input_without_turns_counts(text: object) -> None:
    assert find("responses", {"input": text}) not in {None, find("responses", {"input": "hello"})}


# Names of conversations


@pytest.mark.parametrize("name", ["x_claude_code_session_id", "x_session_affinity", "session_id"])
def test_session_header_names_the_conversation(name: str) -> None:
    one, two = (write_conversation("chat", question) for question in ("a", "b"))
    assert find("chat", one, **{name: "s1"}) == find("chat", two, **{name: "s1"}) != find("chat", one, **{name: "s2"})
    assert find("chat", one, **{name: ""}) == find("chat", one)


def test_session_headers_count_in_their_order() -> None:
    names = [b"X-Claude-Code-Session-Id", b"x-session-affinity", b"session-id", b"session_id"]
    fields = [(name, name + b" value") for name in names]
    numbers = [find_affinity(Headers(fields[start:][::-1]), "chat", {}, "team") for start in range(5)]
    alone = [find_affinity(Headers([(b"session-id", value)]), "chat", {}, "team") for _, value in fields]
    assert numbers == [*alone, None]
    assert len(set(numbers)) == 5


def test_cache_key_of_the_body_counts_after_headers() -> None:
    one, two = (write_conversation("responses", text, prompt_cache_key="k1") for text in ("a", "b"))
    assert find("responses", one) == find("responses", two) != find("responses", one | {"prompt_cache_key": "k2"})
    assert find("responses", one, session_id="s1") == find("responses", {"input": "a"}, session_id="s1")


@pytest.mark.parametrize("key", [None, "", 5, {}])
def test_cache_key_that_is_no_text_is_ignored(key: object) -> None:
    body = write_conversation("chat", "hello")
    assert find("chat", body | {"prompt_cache_key": key}) == find("chat", body)


# Claude Code


@pytest.mark.parametrize("mark", [{}, {"cache_control": {"type": "ephemeral"}}])
def test_billing_block_does_not_count(mark: dict[str, Any]) -> None:
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    numbers = [
        find("messages", write_conversation("messages", "hello", system=[billing | mark, *blocks]))
        for billing in ({"type": "text", "text": BILLING.format(version)} for version in ("1c0", "a2b"))
    ]
    assert numbers[0] == numbers[1]
    other = [{"type": "text", "text": BILLING.format("1c0")} | mark, {"type": "text", "text": "You are a poet."}]
    assert find("messages", write_conversation("messages", "hello", system=other)) != numbers[0]


def test_system_prompt_about_the_billing_block_counts() -> None:
    systems = [f"{name} explains {BILLING}" for name in ("Ann", "Bob")]
    numbers = {find("messages", write_conversation("messages", "hello", system=system)) for system in systems}
    assert len(numbers) == 2


# Who gets which number


def test_namespaces_have_numbers_of_their_own() -> None:
    body = write_conversation("chat", "hello")
    assert find("chat", body, "a") != find("chat", body, "b")
    assert find("chat", body, "a", session_id="s1") != find("chat", body, "b", session_id="s1")
    assert find("chat", body, "n" * 63) is not None


@pytest.mark.parametrize("route", ["embeddings", "rerank", "count_tokens", "input_tokens", "models", "other"])
def test_routes_without_a_cache_have_no_number(route: str) -> None:
    assert find(route, {"input": "hello", "messages": [], "prompt_cache_key": "k"}, session_id="s1") is None


def test_body_without_a_prompt_has_no_number() -> None:
    assert find("chat", {"model": "chat"}) is None


def test_numbers_do_not_depend_on_process_or_version() -> None:
    """A replica of the next version must send a conversation to the same endpoint."""
    assert find("chat", {"messages": [{"role": "user", "content": "hello"}]}) == 11686243607384705596
    assert find("chat", {}, session_id="s1") == 3678270455562481358


# Any body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size_bytes", [1 << 10, 200 << 10])
def test_any_body_has_a_number(kind: str, size_bytes: int) -> None:
    try:
        fields = scan(KINDS[kind](size_bytes)).fields
    except RequestError:
        return
    for value in fields.values():
        for route, name in (("chat", "messages"), ("messages", "system"), ("completions", "prompt")):
            assert find_affinity(Headers(), route, {name: value}, "team") is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "user", "system", "developer", "assistant", "tool"])
CONTENTS = st.text(max_size=20) | st.lists(st.fixed_dictionaries({"text": st.text(max_size=20)}), max_size=3)
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS | VALUES}), max_size=6)
QUESTION = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so"}


@given(VALUES, st.sampled_from([*ROUTES, "completions"]))
def test_any_value_has_a_number(value: object, route: str) -> None:
    raw = msgspec.Raw(msgspec.json.encode(value))
    names = ("tools", "system", "messages", "input", "prompt", "prompt_cache_key", "instructions")
    assert find_affinity(Headers(), route, dict.fromkeys(names, raw), "team") is not None


@given(TURNS, TURNS)
def test_turns_after_an_answer_do_not_count(start: list[dict[str, Any]], later: list[dict[str, Any]]) -> None:
    numbers = {number_of(raw) for raw in written([*start, QUESTION, ANSWER], [*start, QUESTION, ANSWER, *later])}
    assert len(numbers) == 1


def written(*conversations: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield each conversation as it is decoded, and as the beginning of one that is too long for that."""
    long = [{"role": "tool", "content": "x" * 1000}] * 200
    for turns in conversations:
        yield msgspec.json.encode(turns)
        yield msgspec.json.encode([*turns, *long])


def number_of(messages: bytes) -> int | None:
    return find_affinity(Headers(), "chat", {"messages": msgspec.Raw(messages)}, "team")


def test_bounds_are_small() -> None:
    assert 2 * SHARED_BYTES + USER_BYTES <= 32 << 10
