"""Child processes: started, watched, ended and reaped.

Theory of operation. A pid is only safe until the process is reaped; then another process may get the number. So signals
go to a pidfd, which never means another process. Python has no such call for a process group, so `killpg` is used, but
only while the process has not been reaped: its pid, which is the group's number, too, is then still its own.
`_signalling` guards that: `signal`, `kill` and `_reap` hold it, so no thread can signal a group that another thread is
about to free. The exit code is set under the lock, and says that the number must not be used any more.

Any thread may wait. Several threads may find that the process has ended; the first one that gets `_reaping` reaps it,
and the others wait for that. It first ends what the process left in its group, and only then takes the exit code. Then
`StubProcess` ends the tree (`process_tree.py`): its keeper can only be reaped after all other processes of its
namespace.

Some of what is left has work to do: `multiprocessing` and joblib start a process that removes the shared memory,
semaphores and folders of the others when all of them have ended, however that came. Such a process ignores SIGTERM, so
that is how it is known. `_end_group` kills the others, waits for these, `CLEAN_UP_S` at most, and kills what is left.
`signal` and `kill` need not wait for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgpack

from moonpool.runtime.process.process_tree import ProcessTree, start_in_tree
from moonpool.runtime.process.spawner import spawn

_STUB = Path(__file__).resolve().parents[2] / "stub"
_BOOT, _CONFINE = str(_STUB / "boot.py"), str(_STUB / "confine.py")
_MSGPACK = str(Path(msgpack.__file__).parent)
# As `stub/confine.py` looks for it.
_HANDED_ON = "MOONPOOL_HANDED_ON"
# The most time that a process which cleans up after others has, and the pause between two looks.
CLEAN_UP_S = 1.0
_LOOK_S = 0.005
# The place of the group in proc_pid_stat(5), counted after the command's name, and the bit of SIGTERM in masks of
# signals.
_GROUP = 2
_SIGTERM = 1 << signal.SIGTERM - 1


class ChildProcess(ABC):
    """A process in its own session, which this process may end. Any thread may call any method."""

    # The tree of all that the process starts, if it may start something.
    tree: ProcessTree | None = None
    # How it came about: it was started ("exec"), a template forked it ("fork"), or it had waited for a model ("spare").
    way = "exec"

    def __init__(self, pid: int, pidfd: int) -> None:
        """Own the pidfd from now on."""
        self.pid = pid
        self.pidfd = pidfd
        self._signalling, self._reaping = threading.Lock(), threading.Lock()
        self._exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        """True until it has been reaped."""
        return self._exit_code is None

    def is_there(self) -> bool:
        """Return True if `pid` is still its number, because it runs or has not been reaped."""
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except OSError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process is gone."""
        with self._signalling:
            if self._exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill it. `wait` ends what it started in its group."""
        with self._signalling:
            if self._exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end, reap it, and return its exit code, negative for a signal; None after `timeout_s`."""
        if self._exit_code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return None
            self._reap()
        return self._exit_code

    def _end_group(self) -> None:
        """Kill what it left in its group, but let processes that clean up after others do so."""
        # Where no descriptor is left to look who is there, all are killed.
        with contextlib.suppress(OSError):
            self._let_clean_up()
        self._kill_group()

    def _let_clean_up(self) -> None:
        """Kill its group but for those that clean up, and wait for these. Raises OSError."""
        end_s = time.monotonic() + CLEAN_UP_S
        while self._has_group() and (left := list(members_of(self.pid))):
            for pid in left:
                if not _cleans_up(pid):
                    self._kill_member(pid)
            if time.monotonic() >= end_s:
                break
            time.sleep(_LOOK_S)

    def _kill_member(self, pid: int) -> None:
        """Kill a process of the group, unless it has left the group, or its number is another's by now."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if self._has_group() and _group_of(pid) == self.pid:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    @abstractmethod
    def _has_group(self) -> bool:
        """Return True if the number of its group is still its own."""

    @abstractmethod
    def _kill_group(self) -> None:
        """Kill all that it started in its group."""

    @abstractmethod
    def _reap(self) -> None:
        """Find the exit code of the ended process, unless another thread has."""

    def close(self) -> None:
        """Close the pidfd. The process has been reaped."""
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
        """Own a process, which may be given as a pid only. If it raises OSError, the process has ended."""
        pid = process if isinstance(process, int) else process.pid
        if not isinstance(process, int):
            # Reaped by its pidfd below. Popen must neither reap it nor warn.
            process.returncode = 0
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # this process has no descriptor to spare
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        super().__init__(pid, pidfd)

    def _has_group(self) -> bool:
        return self.is_there()

    def _kill_group(self) -> None:
        # It has not been reaped, so its pid, which is its group's number, too, is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with self._reaping:
            if self._exit_code is None:
                self._end_group()
                self._take_exit_code()

    def _take_exit_code(self) -> None:
        with self._signalling:
            try:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            except ChildProcessError:  # other code in this process reaps all children
                warnings.warn(
                    f"process {self.pid} was reaped by other code of this program", RuntimeWarning, stacklevel=2
                )
                self._exit_code = 0
            else:
                code = result.si_status if result else 0
                by_signal = result is not None and result.si_code != os.CLD_EXITED
                self._exit_code = -code if by_signal else code


class StubProcess(SpawnedProcess):
    """The process of a stub."""

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
        is_in_tree: bool = False,
        user: int | None = None,
    ) -> None:
        """Start it. Raises OSError if the interpreter cannot be started.

        `is_foreign`: the interpreter and the libraries of its environment must not run before the process is confined.
        `is_in_tree`: it may start other processes, which must end with it. `tree` is None if nothing would end them.
        `user` is the private user that it will become.
        """
        if is_foreign:
            environment = _handed_on(environment)
        arguments = [
            *((sys.executable, "-I", "-S", _CONFINE) if is_foreign else ()),
            *boot_command(python, "triton_python_backend_stub", name, work_fd, control_fd, calls_fd),
        ]

        def start(before: Sequence[str], more_fds: Sequence[int]) -> subprocess.Popen[bytes]:
            fds = (work_fd, control_fd, calls_fd, *more_fds)
            return spawn([*before, *arguments], environment=environment, folder=folder, output_fd=output_fd, fds=fds)

        if not is_in_tree:
            super().__init__(start((), ()))
            return
        process, tree = start_in_tree(start, user)
        try:
            super().__init__(process)
        except OSError:
            if tree is not None:
                tree.end()
            raise
        self.tree = tree

    def _kill_group(self) -> None:
        super()._kill_group()
        if self.tree is not None:
            self.tree.begin_end()

    def _reap(self) -> None:
        super()._reap()
        # Not earlier: the keeper can be reaped only after all other processes of its namespace, this one included.
        if self.tree is not None:
            self.tree.end()


def members_of(group: int) -> Iterator[int]:
    """List the living processes of a group but the one that made it."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != group and _may_be_in(group, int(name)) and _group_of(int(name)) == group:
            yield int(name)


def _may_be_in(group: int, pid: int) -> bool:
    """Return False for most processes of other groups. A look at the file of each would take milliseconds."""
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False
    except PermissionError:  # a security module may forbid it
        return True


def _group_of(pid: int) -> int:
    """Return the group of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[_GROUP])


def _cleans_up(pid: int) -> bool:
    """Return True if a process ignores SIGTERM, or holds it back as it does in its first moments."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        masks = [line.split()[1] for line in file if line.startswith((b"SigIgn:", b"SigBlk:"))]
        return any(int(mask, 16) & _SIGTERM for mask in masks)
    return False


def boot_command(python: str, title: str, name: str, work_fd: int, control_fd: int, calls_fd: int) -> list[str]:
    """Return the command that starts `stub/boot.py`. Only a stub has all three descriptors."""
    fds = [str(fd) for fd in (work_fd, control_fd, calls_fd)]
    return [python, _BOOT, title, name, *fds, str(os.getpid()), _MSGPACK]


def _handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for `confine.py`, with those of the interpreter that it becomes packed into one.

    With the variables of the other environment, the dynamic loader would take libraries from there for the runtime's
    interpreter.
    """
    own = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**own, _HANDED_ON: json.dumps(dict(environment))}


def exit_in_words(code: int) -> str:
    """Return words such as `exited with 3` or `killed by SIGSEGV`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
