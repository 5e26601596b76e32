"""A test that leaves something behind fails: a process, a descriptor, a thread, a name in /dev/shm.

What a test finds when it starts is not held against it, so fixtures of a wider scope may hold
resources open. Looking costs well under a millisecond; garbage is collected, and things that end by
themselves are waited for, only when something seems to be left.
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
    "/dev/shm/triton_python_backend_": "a tritonserver that no test started; whose, not every user may see",
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
    """Return the paths of the entries in /dev/shm that may be of this user's processes. Those of root's may be any user's."""
    names = [f"{SHM}/{name}" for name in os.listdir(SHM)] if os.path.isdir(SHM) else []
    found = set()
    for name in names:
        # Programs that run beside this one remove theirs at any moment.
        with suppress(FileNotFoundError):
            is_ours = os.geteuid() in (0, os.lstat(name).st_uid)
            if is_ours and not name.startswith(tuple(LASTING_PATHS)):
                found.add(name)
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return str(pid)
    ended = " (ended, never waited for)" if state == "Z" else ""
    return f"{pid}{ended} {b' '.join(words).decode(errors='replace').strip()}"[:300]


def _is_used_elsewhere(name: str) -> bool:
    """Return true if another program on this machine has the entry open or mapped. Then the entry is not ours."""
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) != os.getpid():
            # Processes end while they are being listed, and those of other users cannot be read.
            with suppress(OSError):
                if name in Path(f"/proc/{process}/maps").read_text(errors="replace"):
                    return True
                for fd in os.listdir(f"/proc/{process}/fd"):
                    if os.readlink(f"/proc/{process}/fd/{fd}") == name:
                        return True
    return False


def names_left(before: set[str]) -> set[str]:
    """Return the entries that /dev/shm has since `before`, and that no other program has open or mapped."""
    return {name for name in shm_names() - before if not _is_used_elsewhere(name)}


def left_since(before: Holdings) -> list[str]:
    """Return the things that this process did not hold before and still holds after GRACE_S."""
    lasting = before.lasting
    if not Holdings(lasting).beyond(before):
        return []
    # This does not wait for entries of programs that run beside this one.
    others = {name for name in shm_names() - before.names if _is_used_elsewhere(name)}
    deadline, look_s = Deadline(GRACE_S), FIRST_LOOK_S

    def are_gone() -> bool:
        return not _without(Holdings(lasting), others).beyond(before)

    # A thread may drop the last reference to something that refers to itself at any moment before the deadline. But most things
    # end by themselves, and to collect garbage takes longer than to look.
    while not deadline.is_over:
        with suppress(AssertionError):
            wait_until(are_gone, min(look_s, deadline.remaining_s))
            # The test has passed now. Another look might find a descriptor that is open for a moment.
            return []
        gc.collect()
        look_s *= 2
    now = Holdings(lasting)
    now.names = {name for name in now.names - before.names if not _is_used_elsewhere(name)}
    # Programs that run beside this one remove theirs meanwhile.
    now.names = {name for name in now.names if os.path.exists(name)}
    return now.beyond(before)


def _without(holdings: Holdings, names: set[str]) -> Holdings:
    holdings.names -= names
    return holdings


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
