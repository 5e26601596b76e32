"""Starts processes from one thread, and protects this process from them.

Theory of operation. A stub asks the kernel for a signal when its parent ends (PR_SET_PDEATHSIG). For the kernel, the
parent is the *thread* that forked the stub, and not its process: a stub that a caller's thread had started would die
when that thread ends. So one daemon thread starts all stubs. It begins with the first start and lives as long as the
process. It runs one start at a time; callers wait for theirs in `Future.result`, and get its exception.

`_lock` guards the start of the thread only. After a fork, the child has neither the thread nor a lock that is certainly
free: another thread may have held it at that moment. So the object is made anew in the child, and the next start begins
a thread there, which the number of the process in `_pid` shows to be missing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.threads import start_thread

_log = RuntimeLog("moonpool")
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_privacy = threading.Lock()
_T = TypeVar("_T")
_Task = tuple["Future[Any]", "Callable[[], Any]"]


class _Spawner:
    """The thread and its queue. The thread begins at the first start, and again in a fork of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._tasks: SimpleQueue[_Task] = SimpleQueue()

    def submit(self, act: Callable[[], _T]) -> _T:
        """Act on the thread, and wait for the result. Raises what `act` raises, and `OutOfThreads`."""
        with self._lock:
            if self._pid != os.getpid():
                self._begin()
        future: Future[_T] = Future()
        self._tasks.put((future, act))
        return future.result()

    def _begin(self) -> None:
        tasks: SimpleQueue[_Task] = SimpleQueue()
        thread = threading.Thread(target=self._run, args=(tasks,), name="moonpool-spawner", daemon=True)
        start_thread(thread)
        self._pid, self._tasks = os.getpid(), tasks

    @staticmethod
    def _run(tasks: SimpleQueue[_Task]) -> None:
        while True:
            future, act = tasks.get()
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)


_spawner = _Spawner()
# In a fork, the lock may be held for ever, and the thread does not exist.
os.register_at_fork(after_in_child=_spawner.__init__)  # type: ignore[misc]


def spawn(
    arguments: Sequence[str], *, environment: Mapping[str, str], folder: str, output_fd: int, fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. It inherits only `fds`, and `output_fd` as its output.

    Raises OSError if the program cannot be started, `OutOfThreads` among them. The caller reaps it.
    """
    return _spawner.submit(
        lambda: subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            env=dict(environment),
            cwd=folder,
            pass_fds=tuple(fds),
            start_new_session=True,
        )
    )


def working_folder() -> str:
    """Return the working directory of this process, or / if it was deleted: a child can begin there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def fill_standard_descriptors() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed, as a supervisor may leave them.

    Otherwise the next socket would get the number, and with it everything that is written to the missing stream. And a
    process that inherits a channel could not also have its own output under that number.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest number that is free, which is this one, unless another thread has just taken it.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > 2:
                os.close(opened)


def where_processes_start(act: Callable[[], _T]) -> _T:
    """Act on the thread that starts all processes, whose own properties they inherit, such as its processors. Raises as
    `spawn`.
    """
    return _spawner.submit(act)


def forbid_looking_inside() -> None:
    """Forbid processes of the same user to trace this one, or to read its memory, environment and descriptors.

    The process writes no core dumps either, and only root can look inside. See `PR_SET_DUMPABLE` in prctl(2).
    Raises OSError. Any thread may call it, and many times. The lock makes sure that one call logs it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _privacy:
        if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
            return
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_DUMPABLE was refused")
    _log.info("disabled ptrace and /proc access to process %d: it serves untrusted models", os.getpid())
