"""The memory that is left, as files of the kernel say."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.ipc.region import headroom_bytes

pytestmark = pytest.mark.promise("Executing in a tritonserver", "Memory of an instance grows as …")

KIB, MIB = 1 << 10, 1 << 20


def _machine(folder: Path, groups: str, available_kib: int = 1024 * KIB, swap_kib: int = 0) -> None:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    (folder / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\nSwapFree: {swap_kib} kB\n"
    )


def _group(folder: Path, path: str, limit: str, used: str, cache: str = "inactive_file 0") -> None:
    base = folder / "cgroup" / path
    base.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if not path.startswith("memory"):
        names = ("memory.max", "memory.current")
    for name, text in (*zip(names, (limit, used), strict=True), ("memory.stat", cache)):
        (base / name).write_text(text + "\n")


def _headroom(folder: Path) -> int | None:
    return headroom_bytes(str(folder / "proc"), str(folder / "cgroup"))


def _less_a_sixteenth(size_bytes: int) -> int:
    return size_bytes - size_bytes // 16


def test_this_machine_tells() -> None:
    left = headroom_bytes()

    assert left is not None
    assert 0 < left < 1 << 60


def test_the_machine_alone_counts_where_there_are_no_groups(tmp_path: Path) -> None:
    _machine(tmp_path, "", available_kib=100 * KIB, swap_kib=28 * KIB)

    assert _headroom(tmp_path) == _less_a_sixteenth(128 * MIB)


def test_nothing_is_known_where_nothing_is_told(tmp_path: Path) -> None:
    assert _headroom(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_counts_what_it_may_still_use_and_its_idle_cache(tmp_path: Path, version: int) -> None:
    _machine(tmp_path, "0::/app\n" if version == 2 else "9:cpu:/x\n4:memory,cpu:/app\n")
    path = "app" if version == 2 else "memory/app"
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    _group(tmp_path, path, str(64 * MIB), str(48 * MIB), f"anon 5\n{cache} {16 * MIB}")

    assert _headroom(tmp_path) == _less_a_sixteenth(32 * MIB)


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/a/b\n")
    _group(tmp_path, "", "max", "1")
    _group(tmp_path, "a", str(64 * MIB), str(60 * MIB))
    _group(tmp_path, "a/b", str(64 * MIB), str(10 * MIB))

    assert _headroom(tmp_path) == _less_a_sixteenth(4 * MIB)


def test_in_a_container_the_group_is_what_is_mounted(tmp_path: Path) -> None:
    _machine(tmp_path, "4:memory:/docker/0123abcd\n")
    _group(tmp_path, "memory", str(64 * MIB), str(32 * MIB))

    assert _headroom(tmp_path) == _less_a_sixteenth(32 * MIB)


@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712"])
def test_a_group_without_a_limit_does_not_count(tmp_path: Path, unlimited: str) -> None:
    path = "app" if unlimited == "max" else "memory/app"
    _machine(tmp_path, "0::/app\n4:memory:/app\n", available_kib=10 * KIB)
    _group(tmp_path, path, unlimited, str(32 * MIB))

    assert _headroom(tmp_path) == _less_a_sixteenth(10 * MIB)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/app\n")
    _group(tmp_path, "app", str(1 * MIB), str(2 * MIB))

    assert _headroom(tmp_path) == 0
