"""The number of idle processors of the machine and of a container."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from moonpool.runtime.process.usage import Reading, reading, spare_cores

pytestmark = pytest.mark.promise("The overview", "A model for which requests wait …")

TICKS = os.sysconf("SC_CLK_TCK")


def files(contents: dict[str, str]) -> Callable[[str], str]:
    """Reads these, and of no others."""

    def read(path: str) -> str:
        if path not in contents:
            raise FileNotFoundError(path)
        return contents[path]

    return read


def stat(*idle_s: float) -> str:
    """A /proc/stat of processors that did nothing for so long, half of it waiting for a disk."""
    lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
    for number, seconds in enumerate(idle_s):
        half = int(seconds * TICKS / 2)
        lines.append(f"cpu{number} 10 20 30 {half} {half} 0 0 0 0 0")
    return "\n".join([*lines, "intr 1 2 3", "ctxt 99"])


def measured(before: dict[str, str], after: dict[str, str], *cpus: int) -> float:
    """Return the spare cores between two readings that are two seconds apart."""
    first, second = reading(files(before)), reading(files(after))
    begin = Reading(0.0, first.idle_s, first.quotas)
    return spare_cores(begin, Reading(2.0, second.idle_s, second.quotas), cpus)


def test_idle_processors_are_counted() -> None:
    before, after = {"/proc/stat": stat(5, 5, 5)}, {"/proc/stat": stat(7, 6, 5)}

    assert measured(before, after, 0, 1, 2) == pytest.approx(1.5)


def test_only_those_that_may_be_used() -> None:
    before, after = {"/proc/stat": stat(5, 5, 5)}, {"/proc/stat": stat(7, 6, 5)}

    assert measured(before, after, 1) == pytest.approx(0.5)
    assert measured(before, after, 77) == 0.0


@pytest.mark.parametrize("group", ["", "/system.slice/moonpool.service"])
def test_a_container_has_no_more_than_its_quota(group: str) -> None:
    place = f"/sys/fs/cgroup{group}"
    before = {
        "/proc/stat": stat(5, 5, 5, 5),
        "/proc/self/cgroup": f"0::{group or '/'}\n",
        f"{place}/cpu.max": "150000 100000\n",
        f"{place}/cpu.stat": "usage_usec 1000000\nuser_usec 5\n",
    }
    after = before | {"/proc/stat": stat(7, 7, 7, 7), f"{place}/cpu.stat": "usage_usec 3000000\nuser_usec 5\n"}

    assert measured(before, after, 0, 1, 2, 3) == pytest.approx(0.5)


def test_a_quota_of_a_group_above_counts() -> None:
    before = {
        "/proc/stat": stat(5, 5, 5, 5),
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/a/b/cpu.stat": "usage_usec 0\n",
        "/sys/fs/cgroup/a/cpu.max": "100000 100000\n",
        "/sys/fs/cgroup/a/cpu.stat": "usage_usec 0\n",
    }
    after = before | {"/proc/stat": stat(7, 7, 7, 7), "/sys/fs/cgroup/a/cpu.stat": "usage_usec 2500000\n"}

    assert measured(before, after, 0, 1, 2, 3) == 0.0


def test_the_quota_of_cgroup_v1_counts() -> None:
    before = {
        "/proc/stat": stat(5, 5),
        "/proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/cpuacct/cpuacct.usage": "0\n",
    }
    after = before | {"/proc/stat": stat(7, 7), "/sys/fs/cgroup/cpuacct/cpuacct.usage": "1000000000\n"}

    assert measured(before, after, 0, 1) == pytest.approx(0.5)


def test_this_machine_tells() -> None:
    before = reading()
    after = reading()

    assert before.idle_s.keys() >= os.sched_getaffinity(0)
    assert 0.0 <= spare_cores(before, after) <= len(os.sched_getaffinity(0))
