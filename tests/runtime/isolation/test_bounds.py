"""Limits of a stub, enforced by the process itself, its group or the watcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.recorder import config

from moonpool.ipc.policy import Policy
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation import bounds
from moonpool.runtime.isolation.bounds import Bounds
from moonpool.runtime.isolation.cgroups import CgroupPlace, Groups
from moonpool.runtime.isolation.plan import _limits, check_processors
from moonpool.runtime.isolation.watcher import Watcher
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.source import ModelSource

LIMITS = {"memory_bytes": 1 << 30, "tasks": 64, "open_files": 99}


class Left(Groups):
    """Makes its groups in a folder that imitates one of the kernel's."""

    def __init__(self, folder: Path, *controllers: str) -> None:
        super().__init__()
        self._place = CgroupPlace(folder, frozenset(controllers))


def bound(groups: Groups, monkeypatch: pytest.MonkeyPatch, **limits: int) -> Bounds:
    monkeypatch.setattr(bounds, "GROUPS", groups)
    policy = Policy(limits=limits or LIMITS, nice=5)
    return Bounds("m_0", policy, ModelOptions(cpu_weight=33), Watcher())


def test_without_a_group_the_process_limits_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bound(Left(tmp_path), monkeypatch).policy
    assert (policy.limits, policy.nice) == (LIMITS, 5)


@pytest.mark.parametrize("name", ["memory_bytes", "data_bytes"])
def test_a_limit_of_the_cgroup_is_not_set_again_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    groups = Left(tmp_path, "memory", "pids", "cpu")
    policy = bound(groups, monkeypatch, **{name: 1 << 30, "tasks": 64}).policy
    assert (policy.limits, policy.nice) == ({"tasks": 64}, 0)
    (group,) = tmp_path.iterdir()
    told = {file.name: file.read_text() for file in group.iterdir()}
    assert told["memory.max"] == str(1 << 30)
    assert (told["pids.max"], told["cpu.weight"]) == ("64", "33")


@pytest.mark.parametrize(("kind", "name"), [("CPU", "memory_bytes"), ("GPU", "data_bytes")])
def test_addresses_are_not_limited_where_a_gpu_needs_them(kind: str, name: str) -> None:
    group = {"kind": f"KIND_{kind}", "count": 1, **({"gpus": [0]} if kind == "GPU" else {})}
    changes: dict[str, Any] = {"name": "m", "instance_group": [group]}
    read = ModelConfig.from_dict(config(**changes))
    source = ModelSource("triton", Path("/m/1/model.py"), None, Path("/m"), Path("/m/1"))
    model = Model(read, ModelOptions(memory_limit_bytes=1 << 30), 1, source)
    assert _limits(model) == {name: 1 << 30}


@pytest.mark.parametrize(("forks", "tasks"), [(True, 192), (False, 64)])
def test_a_template_has_the_tasks_of_all_its_forks_and_each_fork_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool, tasks: int
) -> None:
    monkeypatch.setattr(bounds, "GROUPS", Left(tmp_path, "pids"))
    policy = Policy(limits={"tasks": 192}, forks=forks)
    Bounds("m_0", policy, ModelOptions(task_limit=64), Watcher())
    (group,) = tmp_path.iterdir()
    assert (group / "pids.max").read_text() == str(tasks)


def test_a_death_in_a_full_group_names_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = bound(Left(tmp_path, "memory"), monkeypatch)
    assert held.death_in_words(-9, "python", [])[0].startswith("was killed by SIGKILL")
    (group,) = tmp_path.iterdir()
    (group / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert held.death_in_words(-9, "python", []) == (
        "was ended by the kernel, as it reached its memory limit of 1073741824 bytes (MOONPOOL_MEMORY_LIMIT_BYTES),",
        "",
    )


def test_a_group_that_does_not_take_the_process_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        pid = 1

    held = bound(Left(tmp_path, "pids"), monkeypatch)
    (group,) = tmp_path.iterdir()
    for file in group.iterdir():
        file.unlink()
    group.rmdir()
    with pytest.raises(LoadFailed, match=r"m_0' cannot be put into its group .*moonpool"):
        held.hold(Process(), lambda _: None)  # type: ignore[arg-type]


def test_processors_that_cannot_be_had_are_told_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4})
    check_processors([0, 4])
    with pytest.raises(LoadFailed, match=r"names 3, 5-7, .* it may run on 0-2, 4"):
        check_processors([2, 3, 5, 6, 7])
