"""Groups of the kernel: when they may be made, and their limits. All tests but the last imitate the kernel's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.runtime.isolation.cgroups import GROUPS, CgroupPlace, Group, NotDelegated, find_place

ALL = "memory pids cpu io"


class Machine:
    """/proc and a mounted hierarchy below a folder; this process is in the group `inside`."""

    def __init__(self, folder: Path, inside: str = "/") -> None:
        self.proc, self.mounted = folder / "proc", folder / "cgroup"
        self.inside = inside
        (self.proc / "self").mkdir(parents=True)
        self.own = self.make(self.mounted / inside.lstrip("/"))
        (self.proc / "self/cgroup").write_text(f"4:memory:/elsewhere\n0::{inside}\n")
        (self.proc / "self/mountinfo").write_text(
            f"25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw\n"
            f"33 25 0:28 / {self.mounted} rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw\n"
        )

    def make(self, path: Path, processes: str = "") -> Path:
        path.mkdir(parents=True)
        for name, text in {
            "cgroup.type": "domain",
            "cgroup.controllers": ALL,
            "cgroup.subtree_control": ALL,
            "cgroup.procs": processes,
        }.items():
            (path / name).write_text(text)
        return path

    def find(self, variable: str | None = None) -> CgroupPlace:
        return find_place(self.proc, variable)


def refusal(machine: Machine, variable: str | None = None) -> str:
    with pytest.raises(NotDelegated) as refused:
        machine.find(variable)
    return str(refused.value)


def test_the_highest_group_of_a_container_is_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.find() == CgroupPlace(machine.mounted, frozenset({"memory", "pids", "cpu"}))


@pytest.mark.promise(
    "Limits",
    "Control groups are made only below groups that were delegated to the runtime, and "
    "processes of others are never moved.",
)
def test_a_group_that_is_not_marked_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/system.slice/server.service")
    assert "is not marked as delegated (systemd: Delegate=yes)" in refusal(machine)
    assert sorted(machine.own.glob("moonpool*")) == []


def test_a_group_that_systemd_has_marked_is_ours(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/system.slice/server.service")
    try:
        os.setxattr(machine.own, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    assert machine.find().path == machine.own


def test_a_group_that_is_named_is_ours_if_nobody_is_in_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "/system.slice/server.service")
    named = machine.make(tmp_path / "left")
    assert machine.find(str(named)).path == named
    (named / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert "has processes that are not moonpool's to move" in refusal(machine, str(named))
    assert "which is not a group of cgroup v2" in refusal(machine, str(tmp_path))


def test_this_process_goes_below_a_group_in_which_it_is_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert machine.find().path == machine.own
    moved = machine.own / f"moonpool-{os.getpid()}-runtime" / "cgroup.procs"
    assert moved.read_text() == str(os.getpid())


@pytest.mark.promise("Limits", "Control groups are made only below …")
def test_processes_of_others_are_not_moved(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.own / "cgroup.procs").write_text(f"{os.getpid()}\n77\n")
    (machine.proc / "77").mkdir()
    (machine.proc / "77/stat").write_text("77 (a ) b) S 1 77 77 0")
    assert "has processes that are not moonpool's to move" in refusal(machine)
    assert sorted(machine.own.glob("moonpool*")) == []
    (machine.proc / "77/stat").write_text(f"77 (a ) b) S {os.getpid()} 77 77 0")
    assert machine.find().path == machine.own


def test_why_there_are_no_groups_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.own / "cgroup.subtree_control").write_text("hugetlb")
    (machine.own / "cgroup.controllers").write_text("hugetlb")
    assert "offers neither memory nor pids nor cpu" in refusal(machine)
    (machine.own / "cgroup.subtree_control").unlink()
    assert "may not be written to" in refusal(machine)
    (machine.proc / "self/cgroup").write_text("0::/../../system.slice\n")
    assert "lies outside of what is mounted here" in refusal(machine)
    (machine.proc / "self/cgroup").write_text("4:memory:/\n")
    assert refusal(machine) == "there is no cgroup v2"


def test_groups_of_runtimes_that_are_gone_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    machine = Machine(tmp_path)
    left = machine.own / f"moonpool-{ended.pid}-1"
    ours, others = machine.own / f"moonpool-{os.getpid()}-1", machine.own / "moonpool-x"
    for folder in (left, ours, others):
        folder.mkdir()
    machine.find()
    assert [each.exists() for each in (left, ours, others)] == [False, True, True]


def test_a_group_is_told_its_limits_and_names_the_one_that_was_reached(tmp_path: Path) -> None:
    place = CgroupPlace(tmp_path, frozenset({"memory", "pids", "cpu"}))
    group = Group(place, "one", {"memory_bytes": 1 << 30, "tasks": 64, "open_files": 9}, 50)
    told = {each.name: each.read_text() for each in group.path.iterdir()}
    assert told == {
        "memory.max": str(1 << 30),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "64",
        "cpu.weight": "50",
    }
    assert group.limits == {"memory_bytes": 1 << 30, "tasks": 64}
    assert group.reached() == ""
    events = group.path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 9\noom 0\noom_kill 1\n")
    assert group.reached() == "", "the machine was full, not the group"
    events.write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    assert group.reached() == ("reached its memory limit of 1073741824 bytes (MOONPOOL_MEMORY_LIMIT_BYTES)")


def test_limits_that_the_cgroup_lacks_are_left_to_other_means(tmp_path: Path) -> None:
    place = CgroupPlace(tmp_path, frozenset({"cpu"}))
    group = Group(place, "one", {"memory_bytes": 1 << 30, "tasks": 64}, 100)
    assert group.limits == {}
    assert group.reached() == ""


FORKS = """
import os, sys, time
sys.stdin.readline()
for count in range(100):
    try:
        pid = os.fork()
    except OSError as error:
        print(count, error.errno, flush=True)
        break
    if pid == 0:
        os.setsid()
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.promise(
    "Limits", "An instance that the kernel ends because of its control group ends with all its processes."
)
def test_a_group_of_the_kernel_holds_all_that_a_process_starts_and_ends_it() -> None:
    group = GROUPS.make({"tasks": 8}, 100)
    if group is None or "tasks" not in group.limits:
        if group is not None:
            group.remove()
        pytest.skip(f"no groups with the pids controller: {GROUPS.refusal or 'not offered'}")
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        group.add(process.pid)
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        said = process.stdout.readline()  # type: ignore[union-attr]
        inside = (group.path / "cgroup.procs").read_text().split()
        assert said.split()[0] == "7"
        assert len(inside) == 8
        assert "max 1" in (group.path / "pids.events").read_text()
        group.remove()
        assert not group.path.exists()
        process.wait(60.0)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in inside))
