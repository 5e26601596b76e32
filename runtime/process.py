"""Child processes: started, watched, ended and reaped without ever naming it by a pid that may be another's."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from moonpool.runtime.nest import Nest, begin_nested
from moonpool.runtime.spawner import spawn

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

_STUB = Path(__file__).resolve().parents[1] / "stub"
_BOOT, _CONFINE = str(_STUB / "boot.py"), str(_STUB / "confine.py")
_MSGPACK = str(Path(msgpack.__file__).parent)
# As `stub/confine.py` looks for it.
_HANDED_ON = "MOONPOOL_HANDED_ON"


class ChildProcess(ABC):
    """A process in a session of its own that this one may end. Any thread may call any method."""

    # Ends everything that the process starts, if it may start something.
    nest: Nest | None = None

    def __init__(self, pid: int, pidfd: int) -> None:
        """Own the pidfd from now on."""
        self.pid = pid
        self.pidfd = pidfd
        self._signalling = threading.Lock()
        self._exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not been waited for yet."""
        return self._exit_code is None

    def is_there(self) -> bool:
        """Whether `pid` is still its number: it runs, or was not reaped yet."""
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where the process is gone."""
        with self._signalling:
            if self._exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End it at once, with what it started in its session."""
        with self._signalling:
            if self._exit_code is None:
                self._kill_group()
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, negative for a signal; None if it is still there after so long. Reaps it."""
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return None
            self._reap()
        return self._exit_code

    @abstractmethod
    def _kill_group(self) -> None:
        """Kill what it started in its session."""

    @abstractmethod
    def _reap(self) -> None:
        """It has ended: find its exit code, unless another thread has."""

    def close(self) -> None:
        """Close the pidfd. The process has been waited for."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def __repr__(self) -> str:
        if self._exit_code is None:
            return f"<process {self.pid}, running>"
        return f"<process {self.pid}, {exit_in_words(self._exit_code)}>"


class SpawnedProcess(ChildProcess):
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes] | int) -> None:
        """Reap a process, which may be given by its pid alone, from now on. Raises OSError, and then it has ended."""
        pid = process if isinstance(process, int) else process.pid
        if not isinstance(process, int):
            # Reaped by its pidfd below; Popen must not try to, nor warn that nobody did.
            process.returncode = 0
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # this process has no descriptor to spare
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        super().__init__(pid, pidfd)

    def _kill_group(self) -> None:
        # Not reaped, so the pid, which is its group's number too, is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with self._signalling:
            if self._exit_code is not None:
                return
            # What it started in its own session goes with it.
            self._kill_group()
            try:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            except ChildProcessError:  # somebody reaps all children of this process
                warnings.warn(
                    f"process {self.pid} was reaped by somebody else",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self._exit_code = 0
            else:
                code = result.si_status if result else 0
                by_signal = result is not None and result.si_code != os.CLD_EXITED
                self._exit_code = -code if by_signal else code


class StubProcess(SpawnedProcess):
    """The process of a stub that this process started."""

    def __init__(
        self,
        name: str,
        python: str,
        *,
        work_fd: int,
        control_fd: int,
        calls_fd: int,
        output_fd: int,
        environment: Mapping[str, str],
        folder: str,
        is_foreign: bool = False,
        is_nested: bool = False,
        user: int | None = None,
    ) -> None:
        """Start it. Raises OSError where the interpreter cannot be started.

        `is_foreign`: neither the interpreter nor a library of its environment is to run before it is confined.
        `is_nested`: it may start others, which have to end with it; `nest` is None if nothing would end them.
        `user` is the user that it will become, and no other process has.
        """
        if is_foreign:
            environment = _handed_on(environment)
        arguments = [
            *((sys.executable, "-I", "-S", _CONFINE) if is_foreign else ()),
            python,
            _BOOT,
            "triton_python_backend_stub",
            name,
            str(work_fd),
            str(control_fd),
            str(calls_fd),
            str(os.getpid()),
            _MSGPACK,
        ]

        def start(before: Sequence[str], more_fds: Sequence[int]) -> subprocess.Popen[bytes]:
            fds = (work_fd, control_fd, calls_fd, *more_fds)
            return spawn(
                [*before, *arguments],
                environment=environment,
                folder=folder,
                output_fd=output_fd,
                fds=fds,
            )

        if not is_nested:
            super().__init__(start((), ()))
            return
        process, nest = begin_nested(start, user)
        try:
            super().__init__(process)
        except OSError:
            if nest is not None:
                nest.end()
            raise
        self.nest = nest

    def _kill_group(self) -> None:
        super()._kill_group()
        if self.nest is not None:
            self.nest.begin_end()

    def _reap(self) -> None:
        super()._reap()
        # Not before: the keeper can be reaped only after all other processes of its namespace, this one included.
        if self.nest is not None:
            self.nest.end()


def _handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which `confine.py` is started, and gets those of the interpreter that it becomes.

    The dynamic loader would look into the other environment for libraries of the runtime's own interpreter.
    """
    own = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**own, _HANDED_ON: json.dumps(dict(environment))}


def exit_in_words(code: int) -> str:
    """`exited with 3`, `killed by SIGSEGV`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
