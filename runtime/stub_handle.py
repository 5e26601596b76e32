"""One stub as the process holds it that started it: its process, its channels, its output, its memory."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import EXEC_FAILED, PROTOCOL_VERSION, Kind, Side
from moonpool.ipc.policy import is_contained
from moonpool.runtime.allotment import Allotment
from moonpool.runtime.call_desk import BROKE, CallDesk
from moonpool.runtime.control_channel import ControlChannel
from moonpool.runtime.diagnose import exec_failure, start_failure
from moonpool.runtime.environment_variables import missing_variable
from moonpool.runtime.errors import ClientCutMemory, LoadFailed, StubDied
from moonpool.runtime.limits.bounds import Bounds
from moonpool.runtime.model_control import ModelControl
from moonpool.runtime.output import Output
from moonpool.runtime.readiness import StubReadiness
from moonpool.runtime.sandbox.confinement import Confinement, confirmed
from moonpool.runtime.sandbox.hints import withheld
from moonpool.runtime.stub_connection import StubConnection
from moonpool.runtime.stub_metrics import StubMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from socket import socket

    from moonpool.runtime.backend import Model
    from moonpool.runtime.process import ChildProcess
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.sandbox.plan import Plan
    from moonpool.runtime.stubs import Stubs

    Fork = Callable[[str, int, int, int, int], ChildProcess]

_log = logging.getLogger("moonpool")
# From the wish that a stub ends, with the stacks of its threads in the log, to the order.
GRACE_S = 0.25
# How long a process that closed its channel may take to be gone.
_EXIT_S = 1.0
_PAUSE_S = 0.02
_CUT_SHORT = (
    "[%s] a client cut short the shared memory that its tensors lie in; until model '%s' is loaded again, tensors in "
    "memory of clients are copied for it"
)
_MUTE = "closed its control channel and was ended"
_UNHEARD = "could not be heard and was ended"


class StubHandle(StubConnection):
    """Starts a stub and holds it until `end`. Methods that wait are not for the reactor's thread."""

    def __init__(
        self, stubs: Stubs, model: Model, name: str, plan: Plan, fork: Fork | None = None
    ) -> None:
        """Start the process; own the plan. Raises `LoadFailed` where it cannot be started, `OutOfMemory`.

        `fork` starts it in another way, with descriptors for work, control, calls and output; what that raises is
        raised.
        """
        options = model.options
        self.name = name
        self._on_exit: Callable[[], None] = _nothing
        # Gets how many requests others have sent it that it has executed.
        self.count_served: Callable[[int], None] = _nothing
        self._model, self.plan = model, plan
        self.confinement: Confinement | None = None
        self._stubs = stubs
        self.metrics = StubMetrics(stubs.metrics, self.catch_up, options.sandbox)
        self.readiness = StubReadiness(name, stubs.reactor, self.tell)
        self._reason: BaseException | None = None
        # Has ended; tells nothing any more.
        self._has_exited = self._is_mute = False
        self._began_s = time.monotonic()
        # The memory that the process is given by all processes of the runtime, by the side that writes there.
        self.allotments = {
            side: Allotment(options.region_limit_bytes, is_contained=is_contained(options.sandbox))
            for side in Side
        }
        try:
            with ExitStack() as undo, ExitStack() as started:
                undo.callback(plan.release)
                (work, work_end), (calls, calls_end), (channel, control_end) = (
                    _pair(undo, started) for _ in range(3)
                )
                control = ControlChannel(channel)
                self._send = control.send
                self.bounds = Bounds(name, plan.policy, options, stubs.watcher, plan.processes)
                undo.callback(self.bounds.release)
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                started.callback(os.close, write_fd)
                self._output = Output(name, read_fd, options.log_lines_per_s)
                undo.callback(self._output.close)
                self._send(Kind.SANDBOX, self.bounds.policy.to_json())
                is_shared = stubs.audience.is_there
                super().__init__(
                    work,
                    control,
                    options,
                    stubs.reactor,
                    is_shared=is_shared,
                    gpus=plan.gpus,
                    memory=(self.allotments[Side.RUNTIME], self.allotments[Side.STUB]),
                )
                undo.callback(self.link.close)
                fds = (work_end.fileno(), control_end.fileno(), calls_end.fileno(), write_fd)
                self.process: ChildProcess = (fork or plan.spawn)(name, *fds)
                self.bounds.begin(self.process)
                undo.pop_all()
        except OSError as error:
            raise LoadFailed(start_failure(plan.python, error), stage="start") from error
        self._watch(calls, ModelControl(stubs.models, model))

    def _watch(self, calls: Channel, models: ModelControl) -> None:
        self._reactor.watch(self._output.fd, self._read_output)
        self._desk = CallDesk(calls, self.link, self._reactor, models, self.metrics)
        self._listen(calls)
        self._reactor.watch(self.process.pidfd, self._exited)
        self._stubs.add(self)

    def _listen(self, calls: Channel) -> None:  # noqa: ARG002 - for those who do so elsewhere
        """From now on, what the stub says is heard."""
        self._reactor.watch(self.control.channel.fileno(), self._read_control)
        self._desk.watch(self._kill, self.catch_up, self._output.log)

    # Life

    def start(self, start: Mapping[str, Any], deadline: float | None) -> list[Any]:
        """Say what the stub is to be; returns the fields of LOADED or COMPLETED.

        Raises `LoadFailed` with the model's own words, or with why there are none.
        """
        try:
            self.bounds.hold(self.process, self.abort)
            self._confirm(self._hear(Kind.CONFINED, deadline))
            self.link.conversation.send(Kind.START, json.dumps(start))
            expected = Kind.COMPLETED if start["mode"] == "complete" else Kind.LOADED
            return self._hear(expected, deadline)
        except TimeoutError:
            self._stop(grace_s=GRACE_S)
            raise LoadFailed(
                f"Stub process '{self.name}' was not ready in time and was ended; raise "
                "MOONPOOL_LOAD_TIMEOUT_S if it needs longer, or see its stacks in the log",
                stage="initialize",
            ) from None
        except (PeerGone, ProtocolError) as error:
            reason = self.explain(error, "during start")
            raise LoadFailed(str(reason), stage="start") from reason

    def _hear(self, expected: Kind, deadline: float | None) -> list[Any]:
        """The next message of the start."""
        message = self._receive(deadline)
        if message[0] == Kind.FAILED:
            hint = missing_variable(message[2], os.environ, self.plan.environment)
            text = message[2] + (hint or withheld(message[2], self.plan.policy))
            if message[1] == EXEC_FAILED:
                text = exec_failure(self.plan.python, message[2]) or text
            raise LoadFailed(text, stage=message[1], traceback=message[3])
        if message[0] != expected:
            raise LoadFailed(
                f"Stub process '{self.name}' broke the protocol and was ended: "
                f"{Kind(message[0]).name} came instead of {expected.name}",
                stage="start",
            )
        return message

    def _confirm(self, said: list[Any]) -> None:
        """Nothing foreign has run in the process yet: it does so only if it is confined."""
        _, version, layers, left_out = said
        if version != PROTOCOL_VERSION:
            raise LoadFailed(
                f"the runtime speaks protocol {PROTOCOL_VERSION} and this stub {version}; "
                "both must come from one moonpool",
                stage="handshake",
            )
        plan = self.plan
        if plan.template is not None:
            # Foreign code has run in it; but what was put on before that nobody takes off.
            left_out = plan.template.left_out
            layers = [each for each in plan.template.layers if each not in self.bounds.layers]
        elif self.process.nest is not None and self.process.nest.is_namespace:
            layers = [*layers, "pid_namespace"]
        elif plan.policy.may_start_processes:
            self._check_end(layers)
        self.confinement = confirmed(
            self.name,
            self.process.pid,
            self.bounds.policy,
            plan.granted,
            [*dict.fromkeys((*layers, *self.bounds.layers))],
            left_out,
        )
        _log.log(self.confinement.log_level, "[%s] sandbox: %s", self.name, self.confinement)

    def _check_end(self, layers: list[str]) -> None:
        """Raise `LoadFailed` if processes that this one starts could outlive it."""
        ends_by_user = self.process.nest is not None and "own_user" in layers
        if ends_by_user or self.bounds.ends_all:
            return
        raise LoadFailed(
            f"Stub process '{self.name}' may start processes (MOONPOOL_PREFORK, MOONPOOL_SANDBOX_SYSCALLS), and nothing "
            "here would end them with it: allow user namespaces, run the runtime as root, or leave it a cgroup "
            "(LIMITS.md)",
            stage="sandbox",
        )

    def _receive(self, deadline: float | None) -> list[Any]:
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        left_ms = None
        if deadline is not None:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError
        return self.link.conversation.receive()

    @property
    def is_worn(self) -> bool:
        """True if a new process could have memory that this one was refused. Always False while this one is young.

        Otherwise a process could have itself started anew all the time.
        """
        is_old = time.monotonic() - self._began_s > self._model.options.restart_window_s
        return is_old and any(each.is_worn for each in self.allotments.values())

    @property
    def given_bytes(self) -> int:
        """The bytes of all shared memory that was made for the process and sent to it."""
        return sum(each.given_bytes for each in self.allotments.values())

    def notify_exit(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the reactor's thread when the process has ended, also if it has already."""

        def set_callback() -> None:
            self._on_exit = callback
            if self._has_exited:
                callback()

        self._reactor.call_soon(set_callback)

    def cancel(self, request: InferenceRequest) -> bool:
        is_told = super().cancel(request)
        if is_told:
            self._desk.leave_deserted()
        return is_told

    def finalize(self, timeout_s: float | None) -> None:
        """Let the model finalize, and wait for the process to end; ends it when it takes too long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.link.conversation.send(Kind.FINALIZE)
            message = self._receive(deadline)
            if message[1]:
                text = f"finalize failed: {message[1]}\n{message[2]}"
                self._on_reactor(lambda: self._output.log(0, text, "", 0))
            left_s = _EXIT_S if deadline is None else max(_EXIT_S, deadline - time.monotonic())
            if self.process.wait(left_s) is not None:
                return
            _log.warning("[%s] finalized, but the process does not end; killing it", self.name)
        except TimeoutError:
            _log.warning("[%s] finalize took longer than %s s; killing it", self.name, timeout_s)
        except MoonpoolError as error:
            _log.warning(
                "[%s] died in finalize: %s", self.name, self.explain(error, "during finalize")
            )
        self._stop(grace_s=GRACE_S)

    def abort(self, reason: BaseException) -> None:
        """End the process soon, for this reason; does not wait."""
        if self._reason is None:
            self._reason = reason
            self.process.signal(signal.SIGTERM)
            self._reactor.call_later(GRACE_S, self.process.kill)

    @property
    def reason(self) -> BaseException | None:
        """The reason for which it was ended, if it was."""
        return self._reason

    def mistrust(self, details: str) -> None:
        """A front end says that it is broken, and how: end it, unless it ends by itself."""
        because = "broke off with a front end and was ended"
        self._reactor.call_later(_EXIT_S, lambda: self._kill(because, details))

    def explain(self, error: BaseException, doing: str) -> BaseException:
        """Why the stub is gone, or is about to be; waits for it to end, and ends it."""
        if self._reason is None and not isinstance(error, PeerGone):
            is_lie = isinstance(error, ProtocolError)
            why = BROKE if is_lie else "was ended, as whoever talked to it was interrupted"
            told = f"Stub process '{self.name}' {why}"
            self._reason = StubDied(f"{told}: {error if is_lie else repr(error)}", told)
            self.process.kill()
        code = self.process.wait(GRACE_S + _EXIT_S if self._reason else _EXIT_S)
        if code is None:
            self.process.kill()
            self.process.wait(_EXIT_S)
        # What it sent before its end is not lost.
        self._on_reactor(self.catch_up)
        if self._reason is not None:
            return self._reason
        words, last_words = ("closed its channel", "") if code is None else self._death(code)
        text = f"Stub process '{self.name}' is not healthy. It {words}"
        if code == -signal.SIGBUS and self.link.loans.has_clients_memory:
            # This may be a lie of the model. So it is believed once: the model is lent no more memory of clients.
            self._model.lends_clients_memory = False
            _log.warning(_CUT_SHORT, self.name, self._model.name)
            return ClientCutMemory(
                f"{text}: a client cut short the memory that its tensors lie in."
            )
        # What it said last was not meant for clients.
        return StubDied(f"{text}{last_words} {doing}.", f"{text} {doing}" if last_words else None)

    def _death(self, code: int) -> tuple[str, str]:
        """What became of it, and its last words."""
        self._on_reactor(self._output.drain)
        return self.bounds.death_in_words(code, self.plan.python, self._output.tail())

    def _stop(self, grace_s: float) -> None:
        self.process.signal(signal.SIGTERM)
        if self.process.wait(grace_s) is None:
            self.process.kill()
            self.process.wait(_EXIT_S)

    def end(self) -> None:
        """End the process if it is there still, and give up everything. May be called many times."""
        self.process.kill()
        if self.process.wait(10 * _EXIT_S) is None:
            _log.error("[%s] cannot be killed: %r", self.name, self.process)
        self._on_reactor(self.close)
        self.bounds.release()
        self.plan.release()

    def _on_reactor(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self._reactor.call_soon(act)
        done.wait()

    def close(self) -> None:
        """Give up what there is of it. On the reactor's thread."""
        if self._is_closed:
            return
        self._reactor.forget(self._output.fd)
        self._reactor.forget(self.process.pidfd)
        self._desk.close()
        self._output.drain()
        self._output.close()
        super().close()
        self.process.close()
        self._stubs.remove(self)
        self.metrics.close()
        self.readiness.close()

    # On the reactor's thread

    def _exited(self) -> None:
        self._reactor.forget(self.process.pidfd)
        # What it sent before its end is not lost.
        self.catch_up()
        # What the stub started may hold its channel open; whoever waits on it must wake up now.
        self.link.conversation.channel.wake()
        self._has_exited = True
        self.readiness.close()
        self._on_exit()

    def _read_output(self) -> None:
        if not self._output.ready():
            self._reactor.forget(self._output.fd)
        elif self._output.is_ahead:
            self._reactor.pause(self._output.fd, _PAUSE_S)

    def catch_up(self) -> None:
        """Take in what the stub has told until now."""
        # No socket holds more packets; a stub that goes on telling does not keep the reactor for ever.
        self._read_control(most=300)

    def _read_control(self, most: int = 64) -> None:
        if self._is_mute or self._is_closed:
            return
        try:
            self.read(most)  # then others have their turn
        except PeerGone:
            self._hear_no_more()
            # It is ending, which is for `_exited` to see; if it is not, it can be told nothing.
            self._reactor.call_later(_EXIT_S, lambda: self._kill(_MUTE))
        except ProtocolError as error:
            self._hear_no_more()
            self._kill(BROKE, str(error))
        except Exception:  # what it said is lost, and somebody waits for it
            _log.exception("[%s] what it says cannot be heard", self.name)
            self._hear_no_more()
            self._kill(_UNHEARD)

    def _hear_no_more(self) -> None:
        self._is_mute = True
        self._reactor.forget(self.control.channel.fileno())

    def _kill(self, because: str, details: str = "") -> None:
        """End a process that misbehaves and is still there. The details are not for clients."""
        if self._has_exited or self._is_closed:
            return
        whole = f"{because}: {details}" if details else because
        _log.error("[%s] %s", self.name, whole)
        if self._reason is None:
            subject = f"Stub process '{self.name}'"
            self._reason = StubDied(f"{subject} {whole}", f"{subject} {because}")
        self.process.kill()

    def handle_other(self, fields: list[Any]) -> None:
        kind = fields[0]
        if kind == Kind.LOG:
            self._output.log(*fields[1:])
            self._stubs.models.errors.logged(self._model.name, self._model.version, fields[2])
        elif kind == Kind.METRICS:
            self.metrics.change(fields[1], fields[2])
        elif kind == Kind.READINESS:
            self.readiness.answered(fields[1], fields[2])
        else:
            raise ProtocolError(f"{Kind(kind).name} is not handled by the runtime")

    def tell(self, *message: object) -> None:
        """Send what a stub that is about to end need not hear."""
        try:
            self._send(*message)
        except PeerGone:
            _log.debug("[%s] is gone before it could be told: %s", self.name, message[:1])
        except MoonpoolError as error:
            _log.warning("[%s] could not be told %s: %s", self.name, message[:1], error)

    def __repr__(self) -> str:
        return f"<Stub {self.name} {self.process!r}>"


def _pair(undo: ExitStack, started: ExitStack) -> tuple[Channel, socket]:
    """A channel, and its other end, which is not needed here once the stub has it."""
    mine, theirs = Channel.pair()
    undo.callback(mine.close)
    started.callback(theirs.close)
    return mine, theirs


def _nothing(*_: object) -> None:
    """Until somebody wants to know."""
