"""The watcher: measurements of a process from outside, and the acts after it exceeds a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.runtime.isolation import watcher
from moonpool.runtime.isolation.scratch import size_of_folder
from moonpool.runtime.isolation.watcher import Watched, Watcher, memory_and_threads, tasks_of
from moonpool.runtime.process.child import ChildProcess, SpawnedProcess

BUSY = """
import subprocess, sys, threading, time
for _ in range(5):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
child = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
kept = bytearray(64 << 20)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def busy() -> Iterator[ChildProcess]:
    """A process of 6 threads with 64 MiB and two descendants."""
    popen = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True)
    process = SpawnedProcess(popen)
    assert popen.stdout is not None
    with popen.stdout:
        assert popen.stdout.readline() == b"ready\n"
    wait_until(lambda: (memory_and_threads(process) or (0, 0))[0] > 64 << 20)
    yield process
    process.kill()
    process.wait(60.0)
    process.close()


def test_memory_and_tasks_of_a_process_are_seen(busy: ChildProcess) -> None:
    found = memory_and_threads(busy)
    assert found is not None
    rss_bytes, threads = found
    assert 64 << 20 < rss_bytes < 128 << 20
    assert threads == 6
    assert tasks_of(busy, threads) == 8


def test_a_process_that_has_ended_has_nothing() -> None:
    process = SpawnedProcess(subprocess.Popen(["true"], start_new_session=True))
    process.wait(60.0)
    assert memory_and_threads(process) is None
    process.close()
    assert memory_and_threads(process) is None


def test_shared_memory_of_the_runtime_is_nobodys_growth() -> None:
    hold = (
        "import mmap, os, sys; fd = os.memfd_create('x'); os.truncate(fd, 1 << 26); "
        "m = mmap.mmap(fd, 1 << 26); m[:] = bytes(1) * (1 << 26); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as popen:
        process = SpawnedProcess(popen)
        popen.stdout.readline()  # type: ignore[union-attr]
        found = memory_and_threads(process)
        assert found is not None
        assert found[0] < 48 << 20
        process.kill()
        process.wait(60.0)
        process.close()


def test_the_size_of_a_folder_is_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "b").write_bytes(bytes(200_000))
    (tmp_path / "elsewhere").symlink_to("/usr")
    assert 300_000 <= size_of_folder(str(tmp_path), 1 << 30) < 340_000
    assert size_of_folder(str(tmp_path / "none"), 1 << 30) == 0


def test_empty_files_are_not_free(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert size_of_folder(str(tmp_path), 50_000) > 50_000


def test_folders_too_deep_to_be_read_exceed_the_limit(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_DIRECTORY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=at)
        below = os.open("d" * 250, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    assert size_of_folder(str(tmp_path), 1 << 30) > 1 << 30
    subprocess.run(["rm", "-rf", str(tmp_path / ("d" * 250))], check=True)


class Ends:
    """Collect the reasons for which a watcher would end a process, and the memory of grown ones."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.grown: list[int] = []

    def end(self, reason: BaseException) -> None:
        self.reasons.append(str(reason))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    monkeypatch.setattr(watcher, "_PERIOD_S", 0.01)
    return Watcher()


def test_a_process_with_more_tasks_than_it_may_have_is_ended(busy: ChildProcess, quick: Watcher) -> None:
    ends = Ends()
    for limit in (8, 7, 5):
        watched = Watched("m_0", busy, ends.end, tasks=limit)
        watched.look()
    assert ends.reasons == [
        f"Stub process 'm_0' reached its task limit of {limit} processes and threads "
        f"(MOONPOOL_TASK_LIMIT), as it had {had}, and was ended"
        for limit, had in ((7, 8), (5, 6))
    ]
    quick.add(watched)
    wait_until(lambda: len(ends.reasons) > 3)
    quick.remove(watched)


def test_a_process_that_fills_its_folder_is_ended(busy: ChildProcess, tmp_path: Path) -> None:
    ends = Ends()
    watched = Watched("m_0", busy, ends.end, scratch=str(tmp_path), scratch_bytes=1 << 20)
    watched.look()
    assert ends.reasons == []
    (tmp_path / "big").write_bytes(bytes(2 << 20))
    watched.look()
    (reason,) = ends.reasons
    assert "reached its scratch limit of 1048576 bytes (MOONPOOL_SCRATCH_BYTES)" in reason


@pytest.mark.promise("Limits", "An instance whose resident memory grows …")
def test_only_a_process_that_grows_beyond_the_limit_is_told_of(
    busy: ChildProcess, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()
    watched = Watched("m_0", busy, ends.end, rss_bytes=1 << 20)
    watched.look()
    watched.serves(ends.grown.append)
    watched.look()
    assert ends.grown == []
    assert "it is not recycled for its memory" in caplog.text
    watched = Watched("m_0", busy, ends.end, rss_bytes=1 << 30)
    watched.serves(ends.grown.append)
    watched.rss_bytes = 1 << 20
    watched.look()
    assert len(ends.grown) == 1


def is_watching() -> bool:
    return any(each.name == "moonpool-watcher" for each in threading.enumerate())


def test_a_watcher_has_a_thread_only_while_there_is_something_to_watch(busy: ChildProcess, quick: Watcher) -> None:
    ends = Ends()
    watched = Watched("m_0", busy, ends.end, tasks=1)
    for _ in range(2):
        quick.add(watched)
        assert is_watching()
        wait_until(lambda: ends.reasons)
        quick.remove(watched)
        wait_until(lambda: not is_watching())
