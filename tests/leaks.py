"""A test that leaves something behind fails: a process, a descriptor, a thread, a name in /dev/shm.

What a test finds when it starts is not held against it, so fixtures of a wider scope may hold
resources open. Nor is what other programs do: tests have a /dev/shm of their own (`spaces.py`). Looking
costs well under a millisecond; garbage is collected, and things that end by themselves are waited for,
only when something seems to be left.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import Deadline, wait_until

# In this time a process that was asked to end, or was killed, is noticed and reaped.
GRACE_S = 20.0
# So long after a test, what it left is looked for before garbage is collected, and twice as long after each collection.
FIRST_LOOK_S = 0.02
SHM = "/dev/shm"

# Paths that begin like this may stay open, for this reason.
LASTING_PATHS = {
    "/dev/nvidia": "the CUDA driver holds its devices open until the process ends",
    "/dev/shm/cuda.shm": "the CUDA driver keeps it until the process ends",
    "/memfd:fake-cuda-lasting": "the fake driver of the tests has such a descriptor, too",
    "/dev/shm/moonpool_tests_": "a tritonserver has its regions until it is stopped, and they are removed then",
}
# On a card, the CUDA driver makes one of these when it needs it, and keeps it.
ON_A_CARD = ("anon_inode:[eventfd]",)


class Holdings:
    """The files, processes and memory of this process at one moment. `lasting` may stay open."""

    def __init__(self, lasting: tuple[str, ...] = ()) -> None:
        self.lasting = lasting
        self.children = _children()
        self.descriptors = _descriptors(lasting)
        self.threads = {thread for thread in threading.enumerate() if not thread.daemon}
        self.names = shm_names()

    def beyond(self, before: Holdings) -> list[str]:
        """A line for each thing that is here now and was not before."""
        descriptors = Counter(self.descriptors.values()) - Counter(before.descriptors.values())
        # An event loop watches the bell of a stub under a number of its own, and gives that up when it is rung for
        # nothing. So a server that serves on may have one more or one less.
        for target in [each for each in descriptors if each.startswith("pipe:")]:
            if target in before.descriptors.values() and descriptors[target] == 1:
                del descriptors[target]
        return [
            *(f"the child process {_command(pid)}" for pid in self.children - before.children),
            *(f"the open descriptor {fd} → {target}" for fd, target in self.descriptors.items()
              if target in descriptors),
            *(f"the thread {thread.name!r}" for thread in self.threads - before.threads),
            *(f"the entry {name}" for name in self.names - before.names),
        ]  # fmt: skip


def _children() -> set[int]:
    """Children of every thread, ended ones that nobody has reaped included."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        # The thread may have ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return found


def _descriptors(lasting: tuple[str, ...]) -> dict[int, str]:
    """The target of each open descriptor, the one that lists them left out."""
    found: dict[int, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith((*LASTING_PATHS, *lasting)):
                found[int(fd)] = target
    return found


def shm_names() -> set[str]:
    """Return the paths of the entries in /dev/shm that are not lasting."""
    names = [f"{SHM}/{name}" for name in os.listdir(SHM)] if os.path.isdir(SHM) else []
    return {name for name in names if not name.startswith(tuple(LASTING_PATHS))}


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return str(pid)
    ended = " (ended, never waited for)" if state == "Z" else ""
    return f"{pid}{ended} {b' '.join(words).decode(errors='replace').strip()}"[:300]


def left_since(before: Holdings) -> list[str]:
    """Return the things that this process did not hold before and still holds after GRACE_S."""
    lasting = before.lasting
    if not Holdings(lasting).beyond(before):
        return []
    deadline, look_s = Deadline(GRACE_S), FIRST_LOOK_S

    def are_gone() -> bool:
        return not Holdings(lasting).beyond(before)

    # A thread may drop the last reference to something that refers to itself at any moment before the deadline. But
    # most things end by themselves, and to collect garbage takes longer than to look.
    while not deadline.is_over:
        with suppress(AssertionError):
            wait_until(are_gone, min(look_s, deadline.remaining_s))
            # The test has passed now. Another look might find a descriptor that is open for a moment.
            return []
        gc.collect()
        look_s *= 2
    return Holdings(lasting).beyond(before)


def _end_children(since: Holdings) -> None:
    """Ends what was left, so that the next tests and the end of the run are not disturbed."""
    for pid in _children() - since.children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Holdings(ON_A_CARD if request.node.get_closest_marker("gpu") else ())
    yield
    left = left_since(before)
    if left:
        _end_children(before)
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)
