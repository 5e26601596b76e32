"""Resources that the kernel counts for all processes of a user, or not at all. A contained model has few of each, or
none.

Each row of the table in docs/site/SANDBOX_KERNEL.md has its test here. At `off` the same attempts succeed, which shows
that the tests can fail.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.conftest import Attackers

MIB = 1 << 20
# A contained model has so many descriptors by default.
OPEN_FILES = 256
# The limit counts pending signals and timers.
PENDING = 1024
LOCKED_BYTES = 8 * MIB
PIPE_BYTES = 64 << 10
SOCKET_BYTES = int(Path("/proc/sys/net/core/wmem_default").read_text())
SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 7, 8, 32, 33

# A model gets none of these. Each has the attempt, and its outcome at `off` if that is the same everywhere.
NOT_GIVEN: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "watches of epoll": ("resources.epoll_watches", {}, "done"),
    "watches of inotify": ("resources.inotify", {}, "done"),
    "watches of fanotify": ("kernel.make", {"name": "fanotify_init", "arguments": [0x200, 0]}, None),
    "notifications of folders": ("resources.notification", {}, "done"),
    "leases": ("resources.lease", {}, "done"),
    "locks of descriptions": ("resources.locked_bytes_of_descriptions", {"most": 1000}, "done"),
    "larger pipes": ("resources.enlarge_pipe", {}, "done"),
    "larger buffers to send": ("resources.enlarge_buffer", {"option": SO_SNDBUF}, "done"),
    "larger buffers to receive": ("resources.enlarge_buffer", {"option": SO_RCVBUF}, "done"),
    "forced buffers to send": ("resources.enlarge_buffer", {"option": SO_SNDBUFFORCE}, None),
    "forced buffers to receive": ("resources.enlarge_buffer", {"option": SO_RCVBUFFORCE}, None),
    "descriptors on their way": ("resources.send_descriptor", {}, "done"),
    "POSIX queues": ("resources.message_queue", {}, None),
    "queues of System V": ("resources.system_v_queue", {}, "done"),
    "semaphores of System V": ("resources.system_v_semaphore", {}, "done"),
    "memory of System V": ("memory.system_v", {"count_bytes": MIB}, "done"),
    "files in memory": ("memory.memory_file", {"count_bytes": MIB}, "done"),
    "asynchronous input and output": ("resources.asynchronous_io", {}, None),
    "rings": ("kernel.with_bad", {"name": "io_uring_setup"}, None),
    "keys": ("kernel.with_bad", {"name": "add_key"}, None),
    "programs for the kernel": ("kernel.with_bad", {"name": "bpf"}, None),
    "page faults": ("kernel.with_bad", {"name": "userfaultfd"}, None),
    "descriptors of processes": ("resources.process_descriptor", {}, "done"),
    "rules of Landlock": ("resources.ruleset", {}, None),
    "filters": ("kernel.make", {"name": "seccomp", "arguments": [2, 0, 0]}, None),
    "namespaces": ("kernel.with_bad", {"name": "unshare"}, None),
    "all memory locked": ("memory.lock_all", {}, None),
    "more locked memory": ("resources.lock_memory", {"count_bytes": 2 * LOCKED_BYTES}, None),
}


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It gets little or nothing of what the kernel counts for all processes of a user, or for nobody.",
)
@pytest.mark.promise(
    "Layers of the sandbox",
    "Everything that the kernel holds for a contained model, apart from its memory, is bounded "
    "or refused. Without a sandbox a model gets more.",
)
@pytest.mark.parametrize("what", NOT_GIVEN)
def test_a_contained_model_has_none_of_some_resources(attackers: Attackers, what: str) -> None:
    attempt, arguments, _ = NOT_GIVEN[what]

    outcome = attackers("strict").tries(attempt, **arguments)

    assert outcome.word in ("EPERM", "ENOMEM", "ENOSYS", "killed"), outcome


@pytest.mark.parametrize("what", [name for name, (_, _, off) in NOT_GIVEN.items() if off])
def test_without_a_sandbox_there_are_some(attackers: Attackers, what: str) -> None:
    attempt, arguments, word = NOT_GIVEN[what]

    outcome = attackers("off").tries(attempt, **arguments)

    assert outcome.word == word, outcome


@pytest.mark.promise("Layers of the sandbox", "Locks on parts of files …")
def test_locks_on_files_that_nobody_else_writes_are_none_in_the_kernel(attackers: Attackers) -> None:
    """The kernel counts them for nobody. A filter cannot count them, so it answers, and the kernel makes none."""

    def held(level: str) -> int:
        attacker = attackers(level)
        assert attacker.finds("resources.hold_locks", most=1000) == 1000
        lines = Path("/proc/locks").read_text().splitlines()
        return sum(line.split()[-4:-3] == [str(attacker.pid)] for line in lines)

    assert held("strict") == 0
    assert held("off") == 1000


# A model gets some of these. Each has the attempt with the number tried, and the most that it may get.
BOUNDED: dict[str, tuple[str, dict[str, Any], int]] = {
    "timers": ("memory.timers", {"count": 3000}, PENDING),
    "signals that wait": ("resources.waiting_signals", {"most": 3000}, PENDING),
    "descriptors of timers": ("resources.timer_descriptors", {"most": 1000}, OPEN_FILES),
    "descriptors of signals": ("resources.signal_descriptors", {"most": 1000}, OPEN_FILES),
    "counters of events": ("resources.event_counters", {"most": 1000}, OPEN_FILES),
    "locks on whole files": ("resources.locked_files", {"most": 1000}, OPEN_FILES),
    "bytes in pipes": ("resources.bytes_in_pipes", {}, OPEN_FILES * PIPE_BYTES),
    # The last packet may exceed the limit of its socket.
    "bytes in sockets": ("resources.bytes_in_sockets", {}, OPEN_FILES * 2 * SOCKET_BYTES),
}


@pytest.mark.promise("The sandbox: `strict`", "It gets little …")
@pytest.mark.promise("Layers of the sandbox", "Everything that the kernel holds …")
@pytest.mark.parametrize("what", BOUNDED)
def test_a_contained_model_has_bounded_amounts_of_others(attackers: Attackers, what: str) -> None:
    attempt, arguments, most = BOUNDED[what]

    found = attackers("strict").finds(attempt, **arguments)

    assert 0 < found <= most


@pytest.mark.promise("Layers of the sandbox", "Everything that the kernel holds …")
@pytest.mark.parametrize("what", BOUNDED)
def test_without_a_sandbox_it_has_more(attackers: Attackers, what: str) -> None:
    attempt, arguments, most = BOUNDED[what]
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= OPEN_FILES:
        pytest.skip("this user has no more descriptors than a contained model")
    if what == "bytes in sockets":
        arguments = {"enlarge": True, "enough": most}

    assert attackers("off").finds(attempt, **arguments) > most


def test_pairs_of_sockets_work_and_locks_on_files_too(attackers: Attackers) -> None:
    """Event loops and caches of files need both."""
    attacker = attackers("strict")

    assert attacker.finds("resources.locked_files", most=1) == 1
    assert attacker.finds("resources.lock_memory", count_bytes=4096) is None
