"""The states of two controllers that disturb each other are compared without the numbers of processes."""

from tests.support.crash_world import State, renumber_processes


def state(*names: str, hosts: tuple[str, ...] = ("h1", "h2")) -> State:
    processes = zip(names, hosts, strict=False)
    slices = {name: {"ownerReferences": [{"name": name}]} for name in names}
    return {
        "metalprocesses": {name: {"metadata": {"name": name}, "spec": {"hostName": host}} for name, host in processes},
        "slices": slices,
    }


def test_numbers_do_not_count_and_specs_and_replicas_do() -> None:
    assert renumber_processes(state("chat-a-1")) == renumber_processes(state("chat-a-0"))
    assert renumber_processes(state("chat-a-9", "chat-a-11")) == renumber_processes(state("chat-a-0", "chat-a-1"))
    assert renumber_processes(state("chat-a-0")) != renumber_processes(state("chat-b-0"))
    assert renumber_processes(state("chat-a-0")) != renumber_processes(state("chat-a-0", "chat-a-1"))


def test_hosts_count_and_not_which_number_is_on_which() -> None:
    one = renumber_processes(state("chat-a-0", "chat-a-1", hosts=("h1", "h2")))
    assert renumber_processes(state("chat-a-1", "chat-a-0", hosts=("h1", "h2"))) == one
    assert renumber_processes(state("chat-a-0", "chat-a-1", hosts=("h1", "h1"))) != one
