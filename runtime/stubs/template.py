"""The template of a model version: a stub that has loaded the model and forks the instances of it.

Theory of operation.

Who is whose parent. The runtime starts the template, and the template forks instances. So an instance is a grandchild
of the runtime: the runtime cannot wait for it, and the kernel gives its exit code to the template. The runtime holds an
instance by its pidfd (`ForkedProcess`). When that is readable, the instance has ended, and the runtime sends REAP to
the template, which waits for its child and answers EXITED. A template may reap a child at any time, and the pid may
then be another process's. So an instance is signalled by its pidfd, and its process group is killed by that, too,
before REAP is sent. All forks end with their template.

Whom to believe. A template runs foreign code, so its word for a pid is worth nothing. FORK carries one end of a socket.
The new process writes one byte there, and the kernel adds the pid of the writer (SCM_CREDENTIALS, unix(7)). The runtime
opens a pidfd and then checks that the process is a child of the template (`_child`). A lying template can only offer
one of its own children. A child that is an instance already is refused. The exit code is the template's word, too, and
only used in texts.

Threads. `Template` has one condition, `_changed`, around its state. It is held for moments, and never while a process
is started or waited for. Instances start on threads of their own and wait in `_ready` while the template is STARTING.
The end of the template may be reported twice, by a thread that wanted a fork and by the reactor, which has it from the
kernel; `_lost` acts on the first report alone. It starts a thread that brings the template back, by the same policy as
restarts of an instance. While that waits for its turn, the state is AWAY, and instances are started without a template.

`TemplateStub._lock` guards the tables of forks and of questions. The reactor answers a question through its `Future`;
the thread that asked waits for it with a deadline. `ForkedProcess._reaping` lets one thread ask for the exit code. It
is not the lock of `signal` and `kill`, which must not wait for a template.

Order of closing. `close` sets CLOSED first, so that no new start begins and those who wait go on. Then it waits for the
thread that restarts, whose process it aborts. The instances have ended before; at last the template finalizes and ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum, auto
from pathlib import Path
from typing import Any

from moonpool.ipc.errors import PeerGone, ProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.errors import ModelUnavailable, OutOfThreads
from moonpool.runtime.isolation.plan import IsolationPlan
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.restart import GiveUp, RestartPolicy
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.process.usage import status_rows
from moonpool.runtime.schedule.failures import is_shortage
from moonpool.runtime.stubs.handle import StubHandle

_log = RuntimeLog("moonpool")


class _State(Enum):
    STARTING = auto()
    READY = auto()
    # It does not run, or cannot be forked from. It may come back.
    AWAY = auto()
    CLOSED = auto()


class Template:
    """Forks the instances of a model, or returns None if they have to be started in the ordinary way.

    Any thread but the reactor's may call any method.
    """

    def __init__(
        self, model: str, options: ModelOptions, start_stub: Callable[[], TemplateStub], start: Mapping[str, Any]
    ) -> None:
        """`start_stub` starts the process, and `start` is the object in START for it."""
        self._model = model
        self._timeout_s = options.load_timeout_s
        self._start_stub = start_stub
        self._start = start
        self._policy = RestartPolicy(
            max_restarts=options.max_restarts,
            window_s=options.restart_window_s,
            backoff_s=options.restart_backoff_s,
            backoff_max_s=options.restart_backoff_max_s,
        )
        self._deaths_s: deque[float] = deque(maxlen=options.max_restarts + 1)
        # Starts in a row that failed because descriptors, memory or processes were short.
        self._shortages = 0
        self._changed = threading.Condition()
        self._state = _State.STARTING
        self._stub: TemplateStub | None = None
        self._restart: threading.Thread | None = None
        # The instances that wait for the template, by name. An error ends the wait of its instance.
        self._waiting: dict[str, BaseException | None] = {}

    def start(self) -> None:
        """Start the process for the first time, and wait. Raises `LoadFailed` with the model's text."""
        try:
            self._start_once()
        except BaseException:
            self._set(_State.AWAY)
            raise

    def _start_once(self) -> None:
        stub = self._start_stub()
        with self._changed:
            self._stub = stub
            is_wanted = self._state is _State.STARTING
        if not is_wanted:
            stub.abort(ModelUnavailable(f"model '{self._model}' is being unloaded"))
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        try:
            stub.start(self._start, deadline)
            stub.check_threads()
        except ForkRefused as refused:
            self._set(_State.AWAY)
            self._warn(refused)
            stub.end()
            return
        except BaseException:
            stub.end()
            raise
        self._set(_State.READY)
        stub.notify_exit(lambda: self._lost(stub))

    def _set(self, state: _State) -> None:
        with self._changed:
            if self._state is not _State.CLOSED:
                self._state = state
                self._changed.notify_all()

    def _warn(self, why: object) -> None:
        _log.warning(
            "the template of model '%s' cannot be forked from: %s; instances are started without it", self._model, why
        )

    # Forks

    @property
    def pid(self) -> int | None:
        """The process of the template; None while there is none."""
        stub = self._stub
        return None if stub is None or not stub.process.is_running else stub.process.pid

    def fork(self, name: str, deadline: float | None, hold: Callable[[TemplateStub], StubHandle]) -> StubHandle | None:
        """Return what `hold` makes of the template, or None if the instance has to be started in the ordinary way.

        Waits until `deadline` while the template is being started; `abort` ends that. Raises what `abort` was given.
        """
        while (stub := self._ready(name, deadline)) is not None:
            try:
                return hold(stub)
            except TemplateGone:
                self._lost(stub)
            except ForkRefused as refused:
                self._warn(refused)
                self._set(_State.AWAY)
        return None

    def _ready(self, name: str, deadline: float | None) -> TemplateStub | None:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._waiting[name] = None
            self._changed.wait_for(lambda: self._state is not _State.STARTING or self._waiting[name], left_s)
            reason = self._waiting.pop(name)
            if reason is not None:
                raise reason
            return self._stub if self._state is _State.READY else None

    def abort(self, name: str, reason: BaseException) -> None:
        """Let an instance that waits for the template fail with this error."""
        with self._changed:
            if name in self._waiting:
                self._waiting[name] = reason
                self._changed.notify_all()

    def abort_start(self, reason: BaseException) -> None:
        """Abort the start that is in progress, because it takes too long or is not wanted any more."""
        with self._changed:
            stub = self._stub
        if stub is not None:
            stub.abort(reason)

    # Death and return

    def _lost(self, stub: TemplateStub) -> None:
        """Begin to bring back a template that has ended, and all its forks with it. Does not block."""
        with self._changed:
            if self._stub is not stub or self._state not in (_State.READY, _State.AWAY):
                return
            # Instances that start meanwhile wait: the first restart follows at once, and takes no longer than a stub's.
            self._state = _State.STARTING
            self._restart = threading.Thread(
                target=self._bring_back, args=(stub,), name=f"moonpool-template-{self._model}", daemon=True
            )
            try:
                start_thread(self._restart)
            except OutOfThreads:
                self._restart = None
                self._set(_State.AWAY)
            else:
                # Its end is reported twice. The second report finds another stub, or none.
                self._stub = None

    def _bring_back(self, dead: TemplateStub) -> None:
        dead.end()
        why = dead.reason or repr(dead.process)
        _log.error("the template of model '%s' has ended: %s", self._model, why)
        self._deaths_s.append(time.monotonic())
        while self._wait_for_turn():
            self._set(_State.STARTING)
            try:
                self._start_once()
            except Exception as error:
                _log.warning("the template of model '%s' did not start: %s", self._model, error)
                self._shortages = self._shortages + 1 if is_shortage(error) else 0
                if not self._shortages:
                    self._deaths_s.append(time.monotonic())
            else:
                return
        self._set(_State.AWAY)

    def _wait_for_turn(self) -> bool:
        """Wait as the restart policy says. Returns False if the template must not be started again."""
        now_s = time.monotonic()
        decision = self._policy.decide(list(self._deaths_s), now_s)
        if isinstance(decision, GiveUp):
            self._warn(f"it {decision.reason}")
            return False
        left_s = decision.at_s - now_s
        if self._shortages:
            left_s = self._policy.pause_after_s(self._shortages)
        with self._changed:
            if left_s > 0:
                self._set(_State.AWAY)
                self._changed.wait_for(lambda: self._state is _State.CLOSED, left_s)
            return self._state is not _State.CLOSED

    def close(self, timeout_s: float | None) -> None:
        """End the template. The caller has ended its forks before."""
        with self._changed:
            self._state = _State.CLOSED
            self._changed.notify_all()
            stub, restart = self._stub, self._restart
        if restart is not None:
            self.abort_start(ModelUnavailable(f"model '{self._model}' is being unloaded"))
            restart.join()
            stub = self._stub
        if stub is None:
            return
        try:
            if stub.process.wait(0) is None:
                stub.finalize(timeout_s)
        finally:
            stub.end()


# A template has nothing else to do, but the machine may be busy.
_FORK_S = 10.0
_REAP_S = 5.0
_EXIT_S = 0.5


class TemplateGone(Exception):
    """The template has ended."""


class ForkRefused(Exception):
    """The template does not fork, or not a process that can be used. The text is a clause with the reason."""


class TemplateStub(StubHandle):
    """The handle of a template: a stub that takes no batches and forks other stubs.

    Any thread but the reactor's may call `fork` and `exit_code_of`.
    """

    # It gets no batches, and waits for two channels at once.
    may_use_slots = False
    # False if its forks can start no processes.
    may_leave_orphans = True
    process_class: type[ForkedProcess]

    def __init__(self, *arguments: Any) -> None:
        # The forks that were not reaped, by pid, with the pid of each in the template's own namespace. And the futures
        # of REAP messages, by that number.
        self._forks: dict[int, int] = {}
        self._asked: dict[int, Future[int]] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def plan_of_a_fork(self) -> IsolationPlan:
        """Return the plan for an instance that is forked. Raises `TemplateGone` if the template was not started."""
        if self.confinement is None:
            raise TemplateGone("it was not started")
        return self.plan.for_a_fork(self._model, self.confinement)

    def check_threads(self) -> None:
        """Raise `ForkRefused` if the process has several threads. A fork has only one of them, but locks of all."""
        try:
            names = _threads_of(self.process.pid)
        except OSError as error:
            raise ForkRefused(f"its threads cannot be counted ({error.strerror})") from error
        if len(names) > 1:
            raise ForkRefused(
                f"it has {len(names)} threads ({', '.join(sorted(set(names)))}), and only one would be in a fork"
            )

    def fork(self, name: str, *fds: int) -> ForkedProcess:
        """Fork a process with these descriptors: those of a stub, or of a run. Raises `TemplateGone`, `ForkRefused`."""
        handshake = ForkHandshake()
        try:
            self.control.send_fork(name, *fds, handshake.end.fileno())
            pid, pidfd = handshake.wait(self.process.pid, _FORK_S)
        except PeerGone as error:
            raise TemplateGone(str(error)) from error
        except ProtocolError as error:
            raise ForkRefused(str(error)) from error
        except ForkFailed as error:
            # The kernel closes the descriptors of a process before it reports its end, so wait for that a little.
            if self.process.wait(_EXIT_S) is not None:
                raise TemplateGone(str(error)) from error
            raise ForkRefused(f"it {error}") from error
        finally:
            handshake.close()
        with self._lock:
            is_another = pid in self._forks
            if not is_another:
                self._forks[pid] = handshake.number_inside
        if is_another:
            os.close(pidfd)
            raise ForkRefused(f"it answered with process {pid}, which is another instance")
        return self.process_class(pid, pidfd, self.exit_code_of)

    def exit_code_of(self, pid: int) -> int:
        """Have the template reap a fork that has ended, and return its exit code as the template reports it.

        The code is good for texts only. If the template has ended or does not answer, the code is that of SIGKILL.
        """
        if self.process.tree is not None and self.may_leave_orphans:
            # Processes that the fork had started are orphans now.
            self.process.tree.end_orphans()
        future: Future[int] = Future()
        with self._lock:
            inside = self._forks[pid]
            self._asked[inside] = future
        try:
            if self._has_exited:
                return -signal.SIGKILL
            self.send(Kind.REAP, inside)
            return future.result(_REAP_S)
        except TimeoutError:
            return -signal.SIGKILL
        finally:
            with self._lock:
                del self._asked[inside]
                del self._forks[pid]

    def _handle(self, fields: list[Any]) -> None:
        if fields[0] != Kind.EXITED:
            super()._handle(fields)
            return
        with self._lock:
            future = self._asked.get(fields[1])
        if future is None or future.done():
            raise ProtocolError(f"EXITED of process {fields[1]}, which was not requested")
        future.set_result(fields[2])

    def _exited(self) -> None:
        super()._exited()
        # Its forks ended with it, and nobody answers the questions.
        with self._lock:
            asked = list(self._asked.values())
        for future in asked:
            if not future.done():
                future.set_result(-signal.SIGKILL)


def _threads_of(pid: int) -> list[str]:
    """Return the names of the threads of a process."""
    folder = f"/proc/{pid}/task"
    names = []
    for task in os.listdir(folder):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(folder, task, "comm").read_text("ascii", "replace").strip())
    return names


_CREDENTIALS = struct.Struct("=iII")


class ForkFailed(Exception):
    """No process was forked, or it is not a child of the template. The text is a clause with the reason."""


class ForkHandshake:
    """A socket that tells the runtime the pid of a new process, by the kernel's word. `end` goes to that process."""

    def __init__(self) -> None:
        self._ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The pid of the new process in its own namespace, once it has spoken.
        self.number_inside = -1

    def wait(self, parent_pid: int, timeout_s: float) -> tuple[int, int]:
        """Wait for the new process. Returns its pid, and a pidfd, which the caller owns. Raises `ForkFailed`.

        The process is a child of `parent_pid`, which must not be reaped meanwhile. `end` is closed here first: the
        socket then ends if all other processes that have `end` die.
        """
        self.end.close()
        poll = select.poll()
        poll.register(self._ours, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise ForkFailed(f"said nothing for {timeout_s:g} s")
        # The buffer has no room for descriptors, so the kernel drops any that are sent.
        data, ancillary, _, _ = self._ours.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        pids = [
            _CREDENTIALS.unpack(credentials)[0]
            for level, kind, credentials in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if not data or not pids:
            raise ForkFailed("forked nothing that lived")
        pidfd, self.number_inside = _child(pids[0], parent_pid)
        return pids[0], pidfd

    def close(self) -> None:
        """Close both ends. May be called many times."""
        self._ours.close()
        self.end.close()


def _child(pid: int, parent_pid: int) -> tuple[int, int]:
    """Return a pidfd of a process that is a child of `parent_pid`, and its pid in its own namespace. Raises
    `ForkFailed`.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise ForkFailed("forked a process that ended at once") from error
    # In this order: if the process ended and its number was given to another one before the pidfd was opened, then the
    # parent of that one is read here.
    parent, inside = _parent_and_number(pid)
    if parent != parent_pid:
        os.close(pidfd)
        raise ForkFailed(f"answered with process {pid}, which is not a child of it")
    return pidfd, inside


def _parent_and_number(pid: int) -> tuple[int, int]:
    """Return the parent of a process, and its pid in its own namespace; -1 for both if it is gone."""
    try:
        parent, numbers = status_rows(pid, b"PPid", b"NSpid")
    except OSError:
        return -1, -1
    return int(parent[0]), int(numbers[-1]) if numbers else pid


# pidfd_send_signal(2), since Linux 6.9.
_PIDFD_SIGNAL_PROCESS_GROUP = 4


class ForkedProcess(ChildProcess):
    """The process of a forked stub: a grandchild, which this process cannot wait for.

    It is known by its pidfd alone, as its pid may be another's once its template has reaped it.
    """

    way = "fork"

    def __init__(self, pid: int, pidfd: int, exit_code_of: Callable[[int], int]) -> None:
        """Own the pidfd. `exit_code_of` asks the template once the process has ended, and may block."""
        super().__init__(pid, pidfd)
        self._exit_code_of = exit_code_of

    def _has_group(self) -> bool:
        try:
            signal.pidfd_send_signal(self.pidfd, 0, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except OSError as error:
            return error.errno == errno.EINVAL and not self._has_ended()
        return True

    def _kill_group(self) -> None:
        try:
            # Its group may outlive it, and keeps its number for as long.
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
                self._end_group()
                self._exit_code = self._exit_code_of(self.pid)


TemplateStub.process_class = ForkedProcess
