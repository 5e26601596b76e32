"""The process of a stub that a template forked: a grandchild, which this process cannot wait for."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading
from typing import TYPE_CHECKING

from moonpool.runtime.process import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable

# pidfd_send_signal(2), since Linux 6.9.
_PIDFD_SIGNAL_PROCESS_GROUP = 4


class ForkedProcess(ChildProcess):
    """Known by its pidfd alone, as its pid may be another's once its template has reaped it."""

    def __init__(self, pid: int, pidfd: int, exit_code_of: Callable[[int], int]) -> None:
        """Own the pidfd. `exit_code_of` asks the template, once the process has ended; it may block."""
        super().__init__(pid, pidfd)
        self._exit_code_of = exit_code_of
        self._reaping = threading.Lock()

    def _kill_group(self) -> None:
        try:
            # Its group outlives it, and has its number for as long.
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except OSError as error:
            if error.errno == errno.EINVAL and not self._has_ended():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _reap(self) -> None:
        # Not under the lock of `signal` and `kill`, which do not block.
        with self._reaping:
            if self._exit_code is None:
                self._kill_group()
                self._exit_code = self._exit_code_of(self.pid)
