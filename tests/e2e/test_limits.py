"""Tests of real models at their limits: what is refused or ended, and the limit that the error names."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, is_running, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import LoadFailed, ModelError, StubDied
from moonpool.runtime.isolation import bounds, cgroups
from moonpool.runtime.isolation.cgroups import GROUPS, Groups

pytestmark = pytest.mark.usefixtures("undisturbed")

FILE = MODELS / "greedy.py"
SIGNATURE: Config = {"input": [tensor("COMMAND", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
MIB = 1 << 20
# Address space that an interpreter with numpy needs in any case.
MEMORY = 1024 * MIB


def ask(runtime: moonpool.Runtime, command: str) -> str:
    outputs = runtime.infer("greedy", {"COMMAND": [command]}, timeout_s=60.0)
    return str(outputs["SAID"][0].decode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Put the model into a new directory that everybody may read."""
    version = tmp_path / "greedy" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(FILE.read_text())
    return version.parent


def greedy(**limits: object) -> Config:
    return {**SIGNATURE, **options(**limits)}


def ask_all(runtime: moonpool.Runtime, *commands: str) -> None:
    for command in commands:
        ask(runtime, command)


def is_limited_by_a_group() -> bool:
    group = GROUPS.make({"memory_bytes": MEMORY}, 100)
    if group is None:
        return False
    group.remove()
    return "memory_bytes" in group.limits


@pytest.mark.promise("The sandbox: `standard`", "If a memory …")
@pytest.mark.promise(
    "Limits",
    "If an instance asks for more memory, descriptors, threads or scratch than its limits "
    "allow, it does not get them, or it is ended, at `standard` as at `strict`. The error names "
    "the limit.",
)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_model_that_wants_too_much_memory_is_told_its_limit_and_serves_on(
    runtime: moonpool.Runtime, folder: Path, level: str
) -> None:
    with hosted(runtime, "greedy", folder, greedy(SANDBOX=level, MEMORY_LIMIT_BYTES=MEMORY)):
        expected: type[Exception] = ModelError
        if is_limited_by_a_group():
            expected = StubDied
        with pytest.raises(expected) as raised:
            ask(runtime, f"keep:{2 * MEMORY}")
        assert f"reached its memory limit of {MEMORY} bytes (MOONPOOL_MEMORY_LIMIT_BYTES)" in str(raised.value)
        assert ask(runtime, f"keep:{MIB}") == "done"


@pytest.mark.parametrize("limit", [16 * MIB, 48 * MIB])
def test_a_limit_that_is_too_small_for_a_start_is_named(runtime: moonpool.Runtime, folder: Path, limit: int) -> None:
    """Neither limit is enough for numpy; with a little more it depends on its threads."""
    with pytest.raises(LoadFailed) as raised:
        runtime.load("greedy", folder, config=greedy(MEMORY_LIMIT_BYTES=limit))
    assert f"memory limit of {limit} bytes (MOONPOOL_MEMORY_LIMIT_BYTES)" in str(raised.value)


@pytest.mark.promise("Limits", "If an instance asks for …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_model_that_opens_too_many_descriptors_is_told_its_limit(
    runtime: moonpool.Runtime, folder: Path, level: str
) -> None:
    with hosted(runtime, "greedy", folder, greedy(SANDBOX=level, OPEN_FILES=64)):
        with pytest.raises(ModelError) as raised:
            ask(runtime, "descriptors:100")
        assert "its descriptor limit of 64 open descriptors (MOONPOOL_OPEN_FILES)" in str(raised.value)


@pytest.mark.promise("Limits", "If an instance asks for …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_model_with_too_many_threads_is_refused_them_or_ended(
    runtime: moonpool.Runtime, folder: Path, level: str
) -> None:
    limit = "reached its task limit of 24 processes and threads (MOONPOOL_TASK_LIMIT)"
    with hosted(runtime, "greedy", folder, greedy(SANDBOX=level, TASK_LIMIT=24)):
        with pytest.raises((ModelError, StubDied)) as raised:
            ask_all(runtime, "threads:40", "wait")
        assert limit in str(raised.value)


@pytest.mark.promise("Limits", "If an instance asks for …")
@pytest.mark.parametrize("how", ["one file", "many files"])
def test_a_model_that_fills_its_scratch_folder_is_refused_or_ended(
    runtime: moonpool.Runtime, folder: Path, how: str
) -> None:
    limits = greedy(SANDBOX="strict", SCRATCH_BYTES=4 * MIB)
    with hosted(runtime, "greedy", folder, limits):
        assert ask(runtime, f"{how}:{MIB}") == "done"
        with pytest.raises((ModelError, StubDied)) as raised:
            ask_all(runtime, f"{how}:{8 * MIB}", "wait")
        assert f"its scratch limit of {4 * MIB} bytes (MOONPOOL_SCRATCH_BYTES)" in str(raised.value)


@pytest.mark.promise(
    "Limits", "An instance runs on its processors only. Processors that the runtime does not have are refused at load."
)
def test_a_model_runs_on_the_processors_that_it_is_given(runtime: moonpool.Runtime, folder: Path) -> None:
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    for level in ("standard", "strict"):
        with hosted(runtime, "greedy", folder, greedy(SANDBOX=level, CPUS=cpu)):
            assert ask(runtime, "processors") == str(cpu)


@pytest.mark.promise("Limits", "An instance runs on its …")
def test_processors_that_the_runtime_has_not_are_refused(runtime: moonpool.Runtime, folder: Path) -> None:
    with pytest.raises(LoadFailed) as raised:
        runtime.load("greedy", folder, config=greedy(CPUS="0,4095"))
    assert "MOONPOOL_CPUS names 4095, on which this runtime may not run" in str(raised.value)


def test_a_weight_becomes_nice_where_there_is_no_group(runtime: moonpool.Runtime, folder: Path) -> None:
    with hosted(runtime, "greedy", folder, greedy(CPU_WEIGHT=33)):
        said = int(ask(runtime, "nice"))
        group = GROUPS.make({}, 33)
        if group is not None:
            group.remove()
        assert said == (0 if group is not None and group.has_weight else 5)
        # The stub has a session of its own, among which the kernel shares processors.
        session = Path(f"/proc/{runtime.instances('greedy')[0]['pid']}/autogroup")
        if session.exists():
            assert session.read_text().endswith(f" nice {said}\n")


def test_an_instance_is_the_first_to_go_where_memory_runs_out(runtime: moonpool.Runtime, folder: Path) -> None:
    with hosted(runtime, "greedy", folder, greedy()):
        pid = runtime.instances("greedy")[0]["pid"]
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """Make groups with any controller that this machine has: most machines for tests have only one to give."""
    made = Groups()
    monkeypatch.setattr(cgroups, "_WANTED", ("memory", "pids", "cpu", "hugetlb"))
    monkeypatch.setattr(bounds, "GROUPS", made)
    place = made._find()
    if place is None:
        pytest.skip(f"no groups can be made: {made.refusal}")
    yield made
    with contextlib.suppress(OSError):
        (place.path / "cgroup.subtree_control").write_text("-hugetlb")


@pytest.mark.promise(
    "Limits",
    "An instance is in its control group before any code of the model runs. The processes that it started end with it.",
)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_an_instance_is_in_a_group_of_its_own_with_all_that_it_starts(
    runtime: moonpool.Runtime, folder: Path, level: str, groups: Groups
) -> None:
    limits = greedy(SANDBOX=level, MEMORY_LIMIT_BYTES=4 * MEMORY, TASK_LIMIT=64)
    children = []
    with hosted(runtime, "greedy", folder, limits):
        (shown,) = runtime.instances("greedy")
        assert shown["sandbox"]["layers"][-1].startswith("cgroup:")
        (line,) = [
            line for line in Path(f"/proc/{shown['pid']}/cgroup").read_text().splitlines() if line.startswith("0::")
        ]
        place = groups._find()
        assert place is not None
        path = place.path / line.rpartition("/")[2]
        assert path.name.startswith(f"moonpool-{os.getpid()}-")
        assert (path / "cgroup.procs").read_text().split() == [str(shown["pid"])]
        if level == "standard":  # strict forks nothing
            children.append(int(ask(runtime, "leave")))
            assert is_running(children[0])
    assert not path.exists()
    wait_until(lambda: not any(is_running(pid) for pid in children))


# Recycling


@pytest.mark.promise(
    "Limits",
    "Under load from four callers, real instances are recycled as often as the option says, and every answer is right.",
)
@pytest.mark.parametrize("instances", [1, 2])
def test_instances_are_recycled_under_load_and_every_answer_is_right(runtime: moonpool.Runtime, instances: int) -> None:
    callers, each_asks, limit = 4, 60, 40
    wrong: list[object] = []

    def call(first: int) -> None:
        for number in range(first, first + each_asks):
            x = np.arange(number, number + 7, dtype=np.float32)
            try:
                y = runtime.infer("recycled", {"X": x}, timeout_s=60.0)["OUT_X"]
                if not np.array_equal(x, y):
                    wrong.append((x, y))
            except Exception as error:
                wrong.append(error)

    config = {**ECHO, **options(RECYCLE_REQUESTS=limit)}
    with hosted(runtime, "recycled", MODELS / "echo.py", config, instances=instances):
        pids = {each["pid"] for each in runtime.instances("recycled")}
        threads = [threading.Thread(target=call, args=(i * 1000,)) for i in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert wrong == []
        supervisor = hosted_in(runtime, "recycled").supervisor
        # One instance serves all 240 requests, six times 40. Two instances share them in any way.
        least = callers * each_asks // limit if instances == 1 else 1

        def all_are_back() -> bool:
            is_ready = {record.machine.state for record in supervisor.records} == {"READY"}
            return is_ready and supervisor.recycling.counts.total() >= least

        wait_until(all_are_back, 60.0)
        if instances == 1:
            assert supervisor.recycling.counts.total() == least
            assert supervisor.records[0].instance.served == 0
        assert pids != {each["pid"] for each in runtime.instances("recycled")}
        assert [each["restarts"] for each in runtime.instances("recycled")] == [0] * instances


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_recycled_instance_is_forked_from_the_template_where_there_is_one(
    runtime: moonpool.Runtime, folder: Path, level: str
) -> None:
    limits = greedy(SANDBOX=level, PREFORK="imports", RECYCLE_REQUESTS=5, TASK_LIMIT=64)
    with hosted(runtime, "greedy", folder, limits):
        pids = [ask(runtime, "pid") for _ in range(20)]
        assert [len(set(pids[i : i + 5])) for i in range(0, 20, 5)] == [1] * 4
        assert len(set(pids)) == 4
        counts = hosted_in(runtime, "greedy").supervisor.recycling.counts
        wait_until(lambda: counts.total() == 4, 60.0)
        wait_until(lambda: runtime.is_ready("greedy"), 60.0)


@pytest.mark.promise(
    "Limits", "An instance whose resident memory grows over its limit is recycled; one that begins over it is not."
)
def test_an_instance_whose_memory_grows_is_recycled(runtime: moonpool.Runtime, folder: Path) -> None:
    with hosted(runtime, "greedy", folder, greedy(RECYCLE_RSS_BYTES=256 * MIB)):
        first = ask(runtime, "pid")
        assert ask(runtime, f"keep:{64 * MIB}") == "done"
        assert ask(runtime, "pid") == first
        assert ask(runtime, f"keep:{256 * MIB}") == "done"
        wait_until(lambda: ask(runtime, "pid") != first, 60.0)
        (instance,) = runtime.instances("greedy")
        assert instance["restarts"] == 0
        assert "MOONPOOL_RECYCLE_RSS_BYTES is 268435456" in instance["because"]
