"""Models that take all they can get: memory, threads, disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker, answers, load_attacker
from tests.hostile.conftest import Attackers
from tests.waiting import wait_until

import moonpool

GIB = 1 << 30
MIB = 1 << 20
LEVELS = ["standard", "strict"]


@pytest.fixture(scope="module", params=LEVELS)
def limited(request: pytest.FixtureRequest, runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One that may have a gibibyte."""
    name = f"limited_{request.param}"
    yield load_attacker(runtime, request.param, model_folder, name, MEMORY_LIMIT_BYTES=GIB)
    runtime.unload(name)


@pytest.mark.promise("The sandbox: `standard`", "If a memory limit is set, it holds, and the error names it.")
@pytest.mark.parametrize("how", ["allocate", "allocate_in_pieces"])
def test_memory_has_an_end_that_is_named(runtime: moonpool.Runtime, limited: Attacker, how: str) -> None:
    # In a cgroup the kernel ends the process. Otherwise an allocation fails.
    outcome = limited.tries(f"memory.{how}", count_bytes=4 * GIB)

    assert outcome.word in ("MemoryError", "died"), outcome
    assert "MOONPOOL_MEMORY_LIMIT_BYTES" in outcome.text or outcome.raised == "MemoryError"
    assert answers(runtime)
    assert limited.finds("memory.allocate", count_bytes=16 * MIB) == 16 * MIB


@pytest.mark.promise("The sandbox: `standard`", "If a memory …")
def test_memory_that_is_shared_is_counted(limited: Attacker) -> None:
    outcome = limited.tries("memory.map_shared", count_bytes=4 * GIB)

    assert outcome.word in ("ENOMEM", "died"), outcome


@pytest.mark.promise("The sandbox: `strict`", "It gets no memory that no limit counts: memfds, System V, locked pages.")
@pytest.mark.parametrize("how", ["memory_file", "system_v"])
def test_memory_that_nobody_counts_is_not_given(attackers: Attackers, how: str) -> None:
    assert attackers("strict").tries(f"memory.{how}", count_bytes=MIB).word == "EPERM"
    assert attackers("off").tries(f"memory.{how}", count_bytes=MIB).word == "done"


@pytest.fixture(scope="module")
def hoarder(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One that may have sixteen mebibytes of shared memory in each direction."""
    limit = {"REGION_LIMIT_BYTES": 16 * MIB, "OPEN_FILES": 1024}
    yield load_attacker(runtime, "strict", model_folder, "hoarder", **limit)
    runtime.unload("hoarder")


@pytest.mark.promise(
    "The sandbox: `strict`",
    "Shared memory that it was sent counts towards its limit until its process ends, even if it "
    "says that it no longer uses the memory.",
)
@pytest.mark.promise("Containment", "All shared memory that a contained …")
def test_shared_memory_that_was_given_back_and_kept_is_counted(runtime: moonpool.Runtime, hoarder: Attacker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pid = hoarder.pid

    found = hoarder.finds("protocol.keep_and_retire", rounds=200, size=MIB)

    assert found["held"] <= 16 * MIB
    assert found["refused"] > 0
    # The attempt takes no descriptors of the runtime.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 8)
    # The instance serves on with what it has, and is then restarted, because an honest model would need more.
    assert hoarder.finds("kernel.make", name="getpid") > 0

    def is_another() -> bool:
        (instance,) = runtime.instances("hoarder")
        return instance["state"] == "READY" and instance["pid"] not in (pid, None)

    wait_until(is_another)
    because = str(runtime.instances("hoarder")[0]["because"])
    assert "bytes of shared memory, used or not; MOONPOOL_REGION_LIMIT_BYTES is 16777216" in because


@pytest.mark.promise("The sandbox: `strict`", "It gets little …")
def test_timers_are_left_for_other_processes_of_the_user(attackers: Attackers) -> None:
    """The kernel counts those of all of them together."""
    assert attackers("strict").finds("memory.timers", count=3000) <= 1024
    assert attackers("off").finds("memory.timers", count=3000) == 3000


@pytest.mark.promise("The sandbox: `strict`", "It gets no …")
def test_memory_is_not_kept_from_the_others(attackers: Attackers) -> None:
    assert attackers("strict").tries("memory.lock_all").word in ("EPERM", "ENOMEM")


@pytest.mark.promise("The sandbox: `standard`", "A crash, an …")
@pytest.mark.parametrize("level", LEVELS)
def test_a_stack_that_overflows_is_the_model_s_own(attackers: Attackers, level: str) -> None:
    outcome = attackers(level).tries("memory.stack_overflow")

    assert "was killed by SIGSEGV" in str(outcome.died)


@pytest.mark.promise("The sandbox: `strict`", "It starts no …")
def test_threads_have_an_end(runtime: moonpool.Runtime, attackers: Attackers, model_folder: Path) -> None:
    attacker = load_attacker(runtime, "strict", model_folder, "threading", TASK_LIMIT=32)
    try:
        assert attacker.finds("processes.start_threads", count=8) == 8
        outcome = attacker.tries("processes.start_threads", count=200)
        # Without a user or a cgroup of its own, the watcher ends the process.
        assert outcome.word in ("RuntimeError", "died"), outcome
        assert "MOONPOOL_TASK_LIMIT" in outcome.text or outcome.raised == "RuntimeError"
    finally:
        runtime.unload("threading")
    assert attackers("off").finds("processes.start_threads", count=200) == 200


@pytest.fixture(scope="module")
def cramped(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One that has eight mebibytes of scratch."""
    yield load_attacker(runtime, "strict", model_folder, "cramped", SCRATCH_BYTES=8 * MIB, RECYCLE_REQUESTS=1000)
    runtime.unload("cramped")


def test_a_file_grows_no_larger_than_the_scratch_folder(cramped: Attacker) -> None:
    assert cramped.finds("files.fill", count_bytes=4 * MIB) == 4 * MIB

    assert cramped.tries("files.fill", count_bytes=64 * MIB).word in ("ENOSPC", "EFBIG", "died")


@pytest.mark.promise("The sandbox: `strict`", "The scratch folder …")
def test_many_files_have_no_more_room(cramped: Attacker) -> None:
    outcome = cramped.tries("files.fill_in_many", count_bytes=64 * MIB, file_bytes=MIB)

    assert outcome.word in ("ENOSPC", "died"), outcome


@pytest.mark.promise("The sandbox: `strict`", "The scratch folder …")
def test_empty_files_have_an_end(cramped: Attacker) -> None:
    """Each takes memory of the kernel's."""
    outcome = cramped.tries("files.many_empty", count=100_000)

    assert outcome.word in ("ENOSPC", "died"), outcome


@pytest.mark.promise("The sandbox: `strict`", "The scratch folder …")
def test_a_full_scratch_folder_is_the_instance_s_own(cramped: Attacker, attackers: Attackers) -> None:
    cramped.finds("files.fill_and_keep", count_bytes=7 * MIB)

    assert attackers("strict").finds("files.fill", count_bytes=4 * MIB) == 4 * MIB
    assert cramped.tries("self.crash", how="exit").word == "died"
    # The next process has a new scratch folder.
    assert cramped.finds("files.fill", count_bytes=4 * MIB) == 4 * MIB


FULL = """
import os, sys, tempfile
from pathlib import Path
from moonpool.stub.sandbox import mounts, namespaces
namespaces.enter(network=True)
mounts.mount("none", "/", "", mounts._REC | mounts._PRIVATE)
mounts.mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=16m,mode=1777")
with open("/dev/shm/full", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1 << 20))
    except OSError:
        pass
import moonpool
from tests.hostile.attacker import answers, load_attacker, load_sibling
with moonpool.Runtime() as runtime:
    load_sibling(runtime)
    attacker = load_attacker(runtime, "strict", Path(sys.argv[1]))
    print(answers(runtime), attacker.finds("kernel.make", name="getpid") == attacker.pid)
    os.mkdir("/dev/shm/tmp")
    tempfile.tempdir = "/dev/shm/tmp/nowhere"
    try:
        load_attacker(runtime, "strict", Path(sys.argv[1]), "another")
    except moonpool.MoonpoolError as error:
        print(type(error).__name__)
    print(answers(runtime))
"""


@pytest.mark.promise("The sandbox: `standard`", "A model can …")
def test_shared_memory_of_others_may_be_full(tmp_path: Path, model_folder: Path, is_root: bool) -> None:
    """Whoever fills /dev/shm takes nothing from a region, and a folder that cannot be made is an error."""
    if not is_root:
        pytest.skip("only root may mount what is to be filled")
    program = tmp_path / "full.py"
    program.write_text(FULL)
    paths = [str(Path(__file__).parents[2]), *sys.path]

    ended = subprocess.run(
        [sys.executable, program, model_folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout.split() == ["True", "True", "LoadFailed", "True"], ended.stderr
