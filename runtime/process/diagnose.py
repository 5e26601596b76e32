"""Explains why a stub did not start, or why it died, in a sentence that says what to do.

A filter ends a process without a message to anybody but the audit system. If no audit daemon runs, the kernel writes
the record to its log, which root may read, and other users if `kernel.dmesg_restrict` is 0. `fatal_call` reads it
there.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from moonpool.ipc import syscalls
from moonpool.ipc.policy import limit_in, limit_named, reached
from moonpool.runtime.process.child import exit_in_words

_SIGINT, _SIGBUS, _SIGKILL, _SIGXFSZ, _SIGSYS = -2, -7, -9, -25, -31
# Enough for the message of an uncaught C++ exception, or of an allocator that gives up.
_LAST_LINES = 5
# The line that faulthandler writes before the stacks.
_STACKS = "Fatal Python error: "


def start_failure(python: str, error: OSError) -> str:
    """Explain why the interpreter could not be started."""
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
        return f"{python} is not a program for this machine; check EXECUTION_ENV_PATH"
    return f"the interpreter {python} cannot be started: {error.strerror or error}{remedy(error)}"


def remedy(error: OSError) -> str:
    """Return `; raise …` for an error that comes from a limit of open files, else an empty text."""
    if error.errno in (errno.EMFILE, errno.ETOOMANYREFS):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"; raise the limit of open files (ulimit -n), which is {most}"
    if error.errno == errno.ENFILE:
        return "; raise the limit of open files of the machine (fs.file-max)"
    return ""


def exec_failure(python: str, number: str) -> str:
    """Explain why the sandbox's launcher could not become the interpreter, from the error's number; "" if it is not
    one.
    """
    if number not in map(str, errno.errorcode):
        return ""
    target = os.path.realpath(python)
    if int(number) == errno.ENOENT and os.path.exists(target):
        # The file exists for the runtime. An instance sees only the files that its user may reach.
        return (
            f"the interpreter {python} cannot be started: the instance does not see {target} or its loader; make the "
            "environment again with an interpreter that all users can read, such as one below /usr or /opt"
        )
    return start_failure(python, OSError(int(number), os.strerror(int(number))))


def death_in_words(
    code: int,
    python: str,
    tail: list[str],
    limits: Mapping[str, int],
    *,
    oom_killed: bool,
    fatal_call: Callable[[], str] = str,
) -> tuple[str, str]:
    """Return words such as `was killed by SIGSEGV`, with the likely cause, and the process's last words if they help.

    `limits` are those that the process had set itself. `fatal_call` finds the system call for which its sandbox ended
    it, or "".
    """
    words = exit_in_words(code)
    words = f"was {words}" if code < 0 else words
    tail = _before_stacks(tail)
    # OpenBLAS sends itself SIGINT if it gets no threads. Then Python writes a long traceback after OpenBLAS's message.
    last_lines = tail if code == _SIGINT else tail[-_LAST_LINES:]
    limit = limit_in("\n".join(last_lines), limits)
    if limit:
        return f"{words}: it {limit}", f"; its last words were: {_last_words(tail)}"
    if code == _SIGXFSZ and "file_bytes" in limits:
        return f"{words}: it {reached('file_bytes', limits['file_bytes'])}", ""
    if code == _SIGBUS and "file_bytes" in limits:
        # It wrote to memory for which its file system had no room. Others can cut none of its files short.
        limit = limit_named("file_bytes", limits["file_bytes"])
        return f"{words}, perhaps because its shared memory and files reached their {limit},", ""
    if code == _SIGKILL:
        if oom_killed:
            return f"{words}: the kernel's out-of-memory killer was at work", ""
        return f"{words} (not sent by moonpool; often by the kernel's out-of-memory killer)", ""
    if code == _SIGSYS:
        call = fatal_call()
        which = f": {call}" if call else ""
        return f"{words}: it made a system call that its sandbox does not allow{which}", ""
    if code >= 0 and tail:
        last = _last_words(tail)
        if "No module named" in last or "SyntaxError" in last:
            return words, f"; {python} said: {last}"
        return words, f"; its last words were: {last}"
    return words, ""


def _before_stacks(tail: list[str]) -> list[str]:
    """Return the lines before the stacks of all threads, which Python writes at a fatal signal."""
    for number, line in enumerate(tail):
        if line.startswith(_STACKS):
            return tail[:number] or tail
    return tail


def _last_words(tail: list[str]) -> str:
    for line in reversed(tail):
        if line.strip():
            return line.strip()[:500]
    return "nothing"


def oom_kills() -> int:
    """Return the number of processes of this machine, or container, that the out-of-memory killer has ended."""
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


_KERNEL_LOG = "/dev/kmsg"
# The record may come to the log a moment after the process ended.
_WAIT_S = 0.2
_MOST_RECORDS = 100_000
_RECORD_BYTES = 8192
_RECORD = re.compile(
    rb"^[0-9]+,[0-9]+,([0-9]+),[^;]*;audit: type=1326 .* pid=([0-9]+) comm=.* sig=31 "
    rb"arch=([0-9a-f]+) syscall=([0-9]+) "
)
# The first PID namespace of the machine. The log has the numbers of that namespace.
_FIRST_NAMESPACE = "pid:[4026531836]"
_SLACK_US = 5_000_000


def fatal_call(pid: int, since_s: float) -> str:
    """Return the system call for which a filter ended a process that began at `since_s` of the monotonic clock.

    Returns "" if the log does not say, or cannot be read. Waits a fifth of a second at most.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE:
            return ""
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _found(fd, pid, since_s)
    finally:
        os.close(fd)


def _found(fd: int, pid: int, since_s: float) -> str:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline_s = time.monotonic() + _WAIT_S
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return ""
            continue
        except BrokenPipeError:  # the next records were overwritten
            continue
        except OSError:
            return ""
        name = call_in(record, pid, since_s)
        if name:
            return name
    return ""


def call_in(record: bytes, pid: int, since_s: float) -> str:
    """Return the name of the call if this record of the log is about the end of this process, else ""."""
    found = _RECORD.match(record)
    if found is None or int(found[2]) != pid:
        return ""
    # An earlier process may have had the same pid.
    if int(found[1]) + _SLACK_US < since_s * 1_000_000:
        return ""
    number = int(found[4])
    for machine, architecture in syscalls.ARCHITECTURES.items():
        if architecture == int(found[3], 16):
            names = {each: name for name, each in syscalls.numbers(machine).items()}
            return names.get(number, f"number {number}")
    return f"number {number} of another kind of machine"
