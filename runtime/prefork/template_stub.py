"""A template as the process that started it holds it: a stub that serves nothing and forks others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import PeerGone, ProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.prefork.birth import Birth, NotBorn
from moonpool.runtime.prefork.forked_process import ForkedProcess
from moonpool.runtime.stub_handle import StubHandle

if TYPE_CHECKING:
    from moonpool.runtime.sandbox.plan import Plan

# A template has nothing else to do; but the machine may.
_FORK_S = 10.0
_REAP_S = 5.0
_EXIT_S = 0.5


class TemplateGone(Exception):
    """The template has ended."""


class ForkRefused(Exception):
    """This template forks nothing, or nothing that one could have; the text is a clause that says why."""


class TemplateStub(StubHandle):
    """Any thread may call `fork` and `exit_code_of`, but for the reactor's."""

    def __init__(self, *arguments: Any) -> None:
        # The forks whose end nobody has asked for, by pid, with the template's own number for each; and the futures of
        # questions, by that number.
        self._forks: dict[int, int] = {}
        self._asked: dict[int, Future[int]] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def plan_of_a_fork(self) -> Plan:
        """For `fork`. Once it was started."""
        if self.confinement is None:
            raise TemplateGone("it was not started")
        return self.plan.for_a_fork(self._model, self.confinement)

    def check_threads(self) -> None:
        """Raises `ForkRefused` where it has more than one: others would be missing in a fork, with their locks held."""
        try:
            names = _threads_of(self.process.pid)
        except OSError as error:
            raise ForkRefused(f"its threads cannot be counted ({error.strerror})") from error
        if len(names) > 1:
            raise ForkRefused(
                f"it has {len(names)} threads ({', '.join(sorted(set(names)))}), and only one would be in a fork"
            )

    def fork(
        self, name: str, work_fd: int, control_fd: int, calls_fd: int, output_fd: int
    ) -> ForkedProcess:
        """A new stub with these descriptors. Raises `TemplateGone`, `ForkRefused`."""
        birth = Birth()
        try:
            fds = (work_fd, control_fd, calls_fd, output_fd, birth.end.fileno())
            self.control.send_fork(name, *fds)
            pid, pidfd = birth.wait(self.process.pid, _FORK_S)
        except PeerGone as error:
            raise TemplateGone(str(error)) from error
        except ProtocolError as error:
            raise ForkRefused(str(error)) from error
        except NotBorn as error:
            # The end of its descriptors comes before its own.
            if self.process.wait(_EXIT_S) is not None:
                raise TemplateGone(str(error)) from error
            raise ForkRefused(f"it {error}") from error
        finally:
            birth.close()
        with self._lock:
            is_another = pid in self._forks
            if not is_another:
                self._forks[pid] = _number_inside(pid)
        if is_another:
            os.close(pidfd)
            raise ForkRefused(f"it answered with process {pid}, which is another instance")
        return ForkedProcess(pid, pidfd, self.exit_code_of)

    def exit_code_of(self, pid: int) -> int:
        """How a fork that has ended did so, in the words of the template: fit for words alone.

        Where there is no template any more, that was the end of it.
        """
        if self.process.nest is not None:
            # The processes that the fork has left behind are nobody's now.
            self.process.nest.end_orphans()
        future: Future[int] = Future()
        with self._lock:
            inside = self._forks[pid]
            self._asked[inside] = future
        try:
            if self._has_exited:
                return -signal.SIGKILL
            self.tell(Kind.REAP, inside)
            return future.result(_REAP_S)
        except TimeoutError:
            return -signal.SIGKILL
        finally:
            with self._lock:
                del self._asked[inside]
                del self._forks[pid]

    def handle_other(self, fields: list[Any]) -> None:
        if fields[0] != Kind.EXITED:
            super().handle_other(fields)
            return
        with self._lock:
            future = self._asked.get(fields[1])
        if future is None or future.done():
            raise ProtocolError(f"EXITED of process {fields[1]}, which nobody asked for")
        future.set_result(fields[2])

    def _exited(self) -> None:
        super()._exited()
        # They ended with it.
        with self._lock:
            asked = list(self._asked.values())
        for future in asked:
            if not future.done():
                future.set_result(-signal.SIGKILL)


def _number_inside(pid: int) -> int:
    """Return the number of a process in its own PID namespace; if it is gone, its pid, which nobody asks for."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def _threads_of(pid: int) -> list[str]:
    """Their names."""
    folder = f"/proc/{pid}/task"
    names = []
    for task in os.listdir(folder):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(folder, task, "comm").read_text("ascii", "replace").strip())
    return names
