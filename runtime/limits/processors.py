"""Which processors a model may be given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moonpool.runtime.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_processors(cpus: Sequence[int]) -> None:
    """Raises `LoadFailed` for one that this process may not run on: the kernel would leave it out, and say nothing."""
    allowed = os.sched_getaffinity(0)
    if refused := sorted(set(cpus) - allowed):
        raise LoadFailed(
            f"MOONPOOL_CPUS names {_listed(refused)}, on which this runtime may not run; it may run on "
            f"{_listed(sorted(allowed))}",
            stage="start",
        )


def _listed(cpus: Sequence[int]) -> str:
    """`0-3, 5`."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ", ".join("-".join(map(str, each)) for each in ranges)
