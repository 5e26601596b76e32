"""Effect of the cores on which the two sides run: on a virtual machine it alone makes a factor of ten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Placement(NamedTuple):
    """`ours` and `theirs` are the cores of this process and of the others; None leaves it to the kernel."""

    name: str
    cores: tuple[set[int], set[int]] | None


def placements() -> list[Placement]:
    """Return the placements: free, both sides on one core, and on two where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    found = [Placement("free", None), Placement("one core", ({cores[0]}, {cores[0]}))]
    if len(cores) > 1:
        found.append(Placement("two cores", ({cores[0]}, {cores[1]})))
    return found


@contextlib.contextmanager
def placed(placement: Placement, pids: Sequence[int]) -> Iterator[None]:
    """Bind all threads of this process and of `pids` to these cores within the block."""
    if placement.cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    ours, theirs = placement.cores
    try:
        _move(os.getpid(), ours)
        for pid in pids:
            _move(pid, theirs)
        yield
    finally:
        for pid in (os.getpid(), *pids):
            _move(pid, before)


def _move(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        # A thread may end after it was listed and before it is moved.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
