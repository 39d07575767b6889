"""The comparison of the states of two worlds."""

from tests.support.crash_world import State, renumber_processes


def state(*names: str) -> State:
    slices = {"chat.host": {"metadata": {"ownerReferences": [{"name": name} for name in names]}}}
    return {"metalprocesses": {name: {"metadata": {"name": name}} for name in names}, "endpointslices": slices}


def test_numbers_of_processes_are_compared_by_their_order_alone() -> None:
    assert renumber_processes(state("chat-a-1")) == renumber_processes(state("chat-a-0"))
    assert renumber_processes(state("chat-a-9", "chat-a-11")) == renumber_processes(state("chat-a-0", "chat-a-1"))
    assert renumber_processes(state("chat-a-0")) != renumber_processes(state("chat-b-0"))
    assert renumber_processes(state("chat-a-0")) != renumber_processes(state("chat-a-0", "chat-a-1"))
