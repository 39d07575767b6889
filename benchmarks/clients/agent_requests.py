"""Bodies of many conversations: short ones, and those of agents, which send 48 KB with each turn.

An agent's request has the parts and sizes that Claude Code and Codex send: a dozen tools with schemas, a long system
prompt, and turns with calls of tools and their results. Tools and system prompt are the same in all conversations.
"""

from typing import Any, Final

import msgspec

CONVERSATIONS: Final = 64
AGENT_BYTES: Final = 48_000
_TOOLS: Final = ("Bash", "Read", "Write", "Edit", "Glob", "Grep", "Fetch", "Search", "Task", "Todo", "Notebook", "Ask")
_ADVICE: Final = (
    "Use it only if the task needs it, state paths from the root, quote those that have blanks, and never guess what a "
    "file has: read it first. Several independent calls go into one turn. "
)
_RULES: Final = (
    "Answer shortly and to the point. Follow the conventions of the code that is there, look at its neighbours before "
    'you write, run the tests afterwards, and say "not sure" where you are not.\n'
)
_RESULT: Final = (
    '    def read(self, path: str) -> bytes:\n        """Return a file."""\n        return self._open(path)\n'
)


def list_short_bodies() -> list[bytes]:
    """Return the body of a short request of each conversation."""
    return [
        b'{"model":"tiny","messages":[{"role":"system","content":"You are a helpful assistant."},'
        b'{"role":"user","content":"Say hello to number %d in one word."}],"temperature":0.7,"max_tokens":16}' % number
        for number in range(CONVERSATIONS)
    ]


def list_agent_bodies() -> list[bytes]:
    """Return the body of a request of an agent of each conversation."""
    return [_write_agent_body(number) for number in range(CONVERSATIONS)]


def _write_agent_body(conversation: int) -> bytes:
    """Return the body of a turn, which has about `AGENT_BYTES`."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that writes software.\n" + 60 * _RULES},
        {"role": "user", "content": f"Repair test number {conversation} of this project."},
    ]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "tools": _list_tools(), "tool_choice": "auto"}
    size_bytes = len(msgspec.json.encode(body | {"messages": messages}))
    while size_bytes < AGENT_BYTES:
        number = len(messages)
        function = {"name": "Read", "arguments": f'{{"path":"/src/files/{conversation}/{number}.py"}}'}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        turn: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": 20 * _RESULT},
        ]
        messages += turn
        size_bytes += len(msgspec.json.encode(turn))
    return msgspec.json.encode(body | {"messages": messages})


def _list_tools() -> list[dict[str, Any]]:
    properties = {
        "path": {"type": "string", "description": "The file, from the root."},
        "lines": {"type": "integer", "description": "So many lines at most.", "minimum": 1, "maximum": 2000},
        "mode": {"type": "string", "enum": ["text", "binary", "summary"], "description": "The form of the result."},
        "items": {"type": "array", "items": {"type": "string"}, "maxItems": 16, "description": "Names of the parts."},
    }
    schema = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    return [
        {"type": "function", "function": {"name": name, "description": 4 * _ADVICE, "parameters": schema}}
        for name in _TOOLS
    ]
