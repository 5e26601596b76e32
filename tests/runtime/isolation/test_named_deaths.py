"""The death of a process that had reached a limit names it."""

from __future__ import annotations

import signal

import pytest

from moonpool.runtime.process.diagnose import death_in_words

LIMITS = {"memory_bytes": 1 << 28, "tasks": 64, "file_bytes": 1 << 20}
MEMORY = "it reached its memory limit of 268435456 bytes (MOONPOOL_MEMORY_LIMIT_BYTES)"


def words(code: int, *tail: str, limits: dict[str, int] = LIMITS) -> str:
    return "".join(death_in_words(code, "python", list(tail), limits, oom_killed=False))


@pytest.mark.promise("Limits", "If a limit explains the death of a process, the error names the limit.")
@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", MEMORY),
        ("MemoryError", MEMORY),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 16", "it reached its task"),
    ],
)
def test_a_death_that_a_limit_explains_names_it(said: str, limit: str) -> None:
    told = words(-signal.SIGABRT, "begin", said, "")
    assert told.startswith("was killed by SIGABRT: it reached its ")
    assert limit in told
    assert "its last words were" in told


def test_the_stacks_after_the_last_words_hide_no_limit() -> None:
    stacks = ["Fatal Python error: Aborted", "", *["Thread 0x1 (most recent call first):", ""] * 9]
    told = words(-signal.SIGABRT, "terminate called after", "  what():  std::bad_alloc", *stacks)
    assert told == f"was killed by SIGABRT: {MEMORY}; its last words were: what():  std::bad_alloc"


def test_a_library_that_gets_no_threads_when_it_is_imported_names_the_limit() -> None:
    said = "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily"
    told = words(-signal.SIGINT, said, *["  File ..."] * 10, "KeyboardInterrupt")
    assert told.startswith("was killed by SIGINT: it reached its task limit of 64")
    assert MEMORY.removeprefix("it ") in told


def test_a_file_that_grew_too_large_is_named() -> None:
    told = words(-signal.SIGXFSZ)
    assert told.endswith("it reached its scratch limit of 1048576 bytes (MOONPOOL_SCRATCH_BYTES)")


def test_a_death_that_has_nothing_to_do_with_a_limit_names_none() -> None:
    assert words(-signal.SIGSEGV, "MemoryError", *["and then"] * 9) == "was killed by SIGSEGV"
    assert "limit" not in words(-signal.SIGABRT, "std::bad_alloc", limits={})
    assert words(3, "bye") == "exited with 3; its last words were: bye"
