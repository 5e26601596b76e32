"""Why a stub did not start, or is gone, in a sentence that says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.limits import limit_in, reached
from moonpool.runtime.process import exit_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIGINT, _SIGKILL, _SIGXFSZ, _SIGSYS = -2, -9, -25, -31
# As many as a C++ exception that nobody catches, or an allocator that gives up, needs to say so.
_LAST_LINES = 5


def start_failure(python: str, error: OSError) -> str:
    """The interpreter could not be started at all."""
    if error.errno == errno.ENOENT:
        if os.path.lexists(python):
            target = os.path.realpath(python)
            return (
                f"the interpreter {python} cannot be started: it needs {target} or a loader, which "
                "is not there; make the environment again on this machine"
            )
        return f"there is no interpreter {python}; check EXECUTION_ENV_PATH"
    if error.errno == errno.EACCES:
        return f"the interpreter {python} is not executable for this user; check its permissions"
    if error.errno == errno.ENOEXEC:
        return f"{python} is no program for this machine; check EXECUTION_ENV_PATH"
    return f"the interpreter {python} cannot be started: {error.strerror}"


def exec_failure(python: str, number: str) -> str:
    """The same, where the sandbox's launcher says with which error; "" where that is none."""
    known = number in map(str, errno.errorcode)
    return start_failure(python, OSError(int(number), os.strerror(int(number)))) if known else ""


def death_in_words(
    code: int, python: str, tail: list[str], limits: Mapping[str, int], *, oom_killed: bool
) -> tuple[str, str]:
    """`was killed by SIGSEGV`, with the likely cause; and the last words where they help.

    `limits` are those that the process had set itself.
    """
    words = exit_in_words(code)
    words = f"was {words}" if code < 0 else words
    # OpenBLAS sends itself SIGINT where it gets no threads, and Python shows where, at length.
    last_lines = tail if code == _SIGINT else tail[-_LAST_LINES:]
    limit = limit_in("\n".join(last_lines), limits)
    if limit:
        return f"{words}: it {limit}", f"; its last words were: {_last_words(tail)}"
    if code == _SIGXFSZ and "file_bytes" in limits:
        return f"{words}: it {reached('file_bytes', limits['file_bytes'])}", ""
    if code == _SIGKILL:
        who = "by somebody else than moonpool, often the kernel's out-of-memory killer"
        if oom_killed:
            return f"{words}: the kernel's out-of-memory killer was at work", ""
        return f"{words} {who}", ""
    if code == _SIGSYS:
        return f"{words}: it made a system call that its sandbox does not allow", ""
    if code >= 0 and tail:
        last = _last_words(tail)
        if "No module named" in last or "SyntaxError" in last:
            return words, f"; {python} said: {last}"
        return words, f"; its last words were: {last}"
    return words, ""


def _last_words(tail: list[str]) -> str:
    for line in reversed(tail):
        if line.strip():
            return line.strip()[:500]
    return "nothing"


def oom_kills() -> int:
    """How many processes of this machine, or container, the out-of-memory killer has ended."""
    total = 0
    for path, key in ((Path("/proc/vmstat"), "oom_kill"), *_cgroup_events()):
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.split()[0] == key)
    return total


def _cgroup_events() -> list[tuple[Path, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = [line.split("::", 1)[1] for line in lines if line.startswith("0::")]
    return [(Path("/sys/fs/cgroup" + path) / "memory.events", "oom_kill") for path in paths]
