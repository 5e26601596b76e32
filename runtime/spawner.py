"""The one thread that starts processes.

A stub asks the kernel to be killed when its parent goes (PR_SET_PDEATHSIG), and the kernel takes "parent" to
be the *thread* that made it. So stubs are made by a thread that lives as long as this process does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_Task = tuple["Future[subprocess.Popen[bytes]]", "Callable[[], subprocess.Popen[bytes]]"]


class _Spawner:
    """Made at the first start, and again in a process that was forked from one that had it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._tasks: SimpleQueue[_Task] = SimpleQueue()

    def submit(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._pid != os.getpid():
                self._begin()
        future: Future[subprocess.Popen[bytes]] = Future()
        self._tasks.put((future, start))
        return future.result()

    def _begin(self) -> None:
        tasks: SimpleQueue[_Task] = SimpleQueue()
        thread = threading.Thread(
            target=self._run, args=(tasks,), name="moonpool-spawner", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        self._pid, self._tasks = os.getpid(), tasks

    @staticmethod
    def _run(tasks: SimpleQueue[_Task]) -> None:
        while True:
            future, start = tasks.get()
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)


_spawner = _Spawner()
# Its lock may have been held, and its thread is not there.
os.register_at_fork(after_in_child=_spawner.__init__)  # type: ignore[misc]


def spawn(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    output_fd: int,
    fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a process that has nothing of ours but `fds`, `output_fd` as its output, and a session of its own.

    Raises OSError where the program cannot be started. The caller reaps it.
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


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the one that spawned it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it has ended before
        os._exit(1)
