"""Tests that an error which a limit causes names the limit and its option."""

from __future__ import annotations

import errno
import socket
import subprocess

import pytest

from moonpool.ipc.policy import Policy
from moonpool.stub import report
from moonpool.stub.report import describe

LIMITS = {"memory_bytes": 1 << 28, "tasks": 64, "open_files": 32, "file_bytes": 1 << 20}
MEMORY = "reached its memory limit of 268435456 bytes (MOONPOOL_MEMORY_LIMIT_BYTES)"
TASKS = "reached its task limit of 64 processes and threads (MOONPOOL_TASK_LIMIT)"
FILES = "reached its descriptor limit of 32 open descriptors (MOONPOOL_OPEN_FILES)"
SCRATCH = "reached its scratch limit of 1048576 bytes (MOONPOOL_SCRATCH_BYTES)"


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "policy", Policy(limits=LIMITS))


@pytest.mark.promise("Limits", "An error that a limit causes names the limit and the option that sets it.")
@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (MemoryError(), MEMORY),
        (MemoryError("Unable to allocate 8.00 GiB for an array"), MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY),
        (ImportError("libx.so: failed to map segment from shared object"), MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."), MEMORY),
        (RuntimeError("OpenBLAS error: Memory allocation still failed after 10 retries"), MEMORY),
        (RuntimeError("can't start new thread"), f"{TASKS}, or {MEMORY}"),
        (OSError(errno.EMFILE, "Too many open files"), FILES),
        (OSError(errno.ENOSPC, "No space left on device"), SCRATCH),
        (OSError(errno.EFBIG, "File too large"), SCRATCH),
    ],
)
def test_an_error_names_the_limit_that_it_comes_of(error: BaseException, limit: str) -> None:
    assert describe(error).endswith(f"; the instance {limit}")


def test_a_process_that_cannot_be_made_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "_fork_exec", refuse)
    with pytest.raises(BlockingIOError) as raised:
        subprocess.run(["true"], check=False, start_new_session=True)
    assert TASKS in describe(raised.value)


def test_an_error_that_has_nothing_to_do_with_a_limit_names_none() -> None:
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    with pytest.raises(BlockingIOError) as raised:
        reading.recv(1)
    reading.close()
    writing.close()
    for error in (raised.value, ValueError("no memory of that"), FileNotFoundError(2, "gone")):
        assert "reached its" not in describe(error)
    for text in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "libgomp.so.1: cannot allocate memory in static TLS block",
    ):
        assert "reached its" not in describe(RuntimeError(text))


def test_where_there_is_no_limit_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "policy", Policy())
    assert describe(MemoryError("all gone")) == "MemoryError: all gone"
    monkeypatch.setattr(report, "policy", Policy(limits={"memory_bytes": 1 << 28}))
    error = RuntimeError("can't start new thread")
    assert describe(error).endswith(MEMORY), "the stacks of threads are memory"
