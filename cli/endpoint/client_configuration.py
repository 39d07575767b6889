"""The configurations of clients for the gateway, by client: what to put into a shell, or into a file of the client.

A configuration has the key as an expression of the shell, and a program gets it from the environment: in the arguments
of a command, every user of the machine could read it.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

KEY_VARIABLE: Final = "POMONA_API_KEY"
KEY_PLACEHOLDER: Final = f'"${KEY_VARIABLE}"'
"""The expression for a key that the user puts into that variable."""
_MOST_OUTPUT_TOKENS: Final = 32_000
"""Tokens of an answer for which Claude Code asks by itself."""
_OUTPUT_PART: Final = 4
"""A context holds so many times what is left for an answer."""


class EndpointFacts(NamedTuple):
    """The gateway and the model, as the configuration of a client states them."""

    url: str
    """The base URL, without /v1."""
    key: str
    """An expression of the shell for the key."""
    model: str
    context_length: int | None
    """The most tokens of a prompt and its answer; None: it is not known."""

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's API, which has the version."""
        return f"{self.url}/v1"


class ClientConfiguration(NamedTuple):
    """The configuration of one client."""

    list_variables: Callable[[EndpointFacts], Mapping[str, str]]
    """Returns the environment variables that are set, with expressions of the shell."""
    render: Callable[[EndpointFacts], str]
    """Returns what follows them: a command or a program; or, for a client without variables, a file of its own."""
    is_of_anthropic: bool = False
    """True if it uses Anthropic's API, else OpenAI's."""


def render_configuration(client: str, facts: EndpointFacts) -> str:
    """Return the configuration of a client, each line of which ends with a line end."""
    configuration = CLIENTS[client]
    variables = configuration.list_variables(facts)
    exports = "".join(f"export {name}={value}\n" for name, value in variables.items())
    return exports + configuration.render(facts)


def _list_openai(facts: EndpointFacts) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": shlex.quote(facts.openai_url), "OPENAI_API_KEY": facts.key}


def _list_anthropic(facts: EndpointFacts) -> Mapping[str, str]:
    """Return the variables of Anthropic's libraries, which would send a key for Anthropic itself, too."""
    return {"ANTHROPIC_BASE_URL": shlex.quote(facts.url), "ANTHROPIC_AUTH_TOKEN": facts.key, "ANTHROPIC_API_KEY": ""}


def _list_claude_code(facts: EndpointFacts) -> Mapping[str, str]:
    """Return the variables of Claude Code, which has a model for each of its own names.

    It takes a model that it does not know for one of a million tokens, and begins each conversation with a line of
    accounting that differs, so that no engine would find the rest of the prompt in its cache.
    """
    model = shlex.quote(facts.model)
    variables = {
        **_list_anthropic(facts),
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if facts.context_length:
        output_tokens = min(facts.context_length // _OUTPUT_PART, _MOST_OUTPUT_TOKENS)
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(facts.context_length)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(output_tokens)
    return variables


def _list_open_webui(facts: EndpointFacts) -> Mapping[str, str]:
    return {
        "OPENAI_API_BASE_URL": shlex.quote(facts.openai_url),
        "OPENAI_API_KEY": facts.key,
        "ENABLE_OLLAMA_API": "false",
    }


def _list_key(facts: EndpointFacts) -> Mapping[str, str]:
    """Return the variable for the key alone; nothing if it is where the user puts the key."""
    return {} if facts.key == KEY_PLACEHOLDER else {KEY_VARIABLE: facts.key}


def _render_openai(facts: EndpointFacts) -> str:
    return f"""\
python3 - <<'PROGRAM'
from openai import OpenAI

messages = [{{"role": "user", "content": "Hello"}}]
answer = OpenAI().chat.completions.create(model={json.dumps(facts.model)}, messages=messages)
print(answer.choices[0].message.content)
PROGRAM
"""


def _render_anthropic(facts: EndpointFacts) -> str:
    return f"""\
python3 - <<'PROGRAM'
from anthropic import Anthropic

messages = [{{"role": "user", "content": "Hello"}}]
answer = Anthropic().messages.create(model={json.dumps(facts.model)}, messages=messages, max_tokens=1000)
print(*(block.text for block in answer.content if block.type == "text"))
PROGRAM
"""


def _render_codex(facts: EndpointFacts) -> str:
    window = f"model_context_window = {facts.context_length}\n" if facts.context_length else ""
    exports = "".join(f"# export {name}={value}\n" for name, value in _list_key(facts).items())
    return f"""\
# At the begin of ~/.codex/config.toml, before any [table]; codex finds the key in the variable {KEY_VARIABLE}.
{exports}model = {json.dumps(facts.model)}
{window}model_provider = "pomona"

[model_providers.pomona]
name = "Pomona"
base_url = {json.dumps(facts.openai_url)}
env_key = "{KEY_VARIABLE}"
wire_api = "responses"
"""


def _render_open_webui(facts: EndpointFacts) -> str:
    del facts
    return """\
# Open WebUI reads them at its first start; then its settings count (Admin Panel, Settings, Connections).
open-webui serve
"""


def _render_curl(facts: EndpointFacts) -> str:
    question = {"model": facts.model, "messages": [{"role": "user", "content": "Hello"}]}
    url = shlex.quote(f"{facts.openai_url}/chat/completions")
    return f"""\
printf 'Authorization: Bearer %s' "${KEY_VARIABLE}" | curl -sS {url} -H @- -d {shlex.quote(json.dumps(question))}
"""


CLIENTS: Final[Mapping[str, ClientConfiguration]] = {
    "openai": ClientConfiguration(_list_openai, _render_openai),
    "anthropic": ClientConfiguration(_list_anthropic, _render_anthropic, is_of_anthropic=True),
    "claude-code": ClientConfiguration(_list_claude_code, lambda _: "claude\n", is_of_anthropic=True),
    "codex": ClientConfiguration(lambda _: {}, _render_codex),
    "open-webui": ClientConfiguration(_list_open_webui, _render_open_webui),
    "curl": ClientConfiguration(_list_key, _render_curl),
}
"""By the names in `--for`."""
