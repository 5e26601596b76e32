"""The handle of a stub, and the book of all stubs of a runtime.

Theory of operation. A handle is created, started, used, explained if it breaks, and ended.

- The constructor makes the channels, the memory and the process. An `ExitStack` gives up what exists if a later step
  fails. A second one closes the stub's ends of the channels, which only the stub has from then on: otherwise this
  process would never see the end of a channel.
- `start` runs on the thread that starts the instance. It speaks on the work channel in lockstep. No foreign code has
  run in a new process before CONFINED, so the process is inspected from outside at that moment, and START follows only
  then.
- From then on, three parties touch the stub. The driver of a batch uses the link (see `link.py`). The reactor's thread
  reads the control channel, the calls and the output, and sees the end of the process. Any thread may send on the
  control channel, which has a lock.
- A breach of the protocol is found by the driver or by the reactor. The first one to find it writes `_reason` and kills
  the process; nobody replaces a reason. The driver then sees the end of the work channel, and `explain` turns it into
  the error for the callers. Two threads may set `_reason` at the same time: then either text is true.
- `explain` waits until the process has ended, because only its exit code tells why. Then it has the reactor take in
  what the stub sent and printed before its end, and close everything, in one step. The caller of `explain` has the
  instance, so nobody else uses the link.

Order of closing. `end` kills the process and waits for it, so that nothing writes any more. Then `close` runs on the
reactor's thread, unless `explain` had it run, because a descriptor must not be closed while that thread watches it:
another file could get its number. `close` reads what is left on the channels first, and closes the process's pidfd
last. At the end the limits (`bounds`) and the folders and the user (`plan`) are given up. They must outlive the
process, and another stub may get them at once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from socket import socket
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import EXEC_FAILED, NO_DEVICE, PROTOCOL_VERSION, Kind, Side
from moonpool.ipc.policy import is_contained
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.slots import SlotChannel, offer
from moonpool.runtime.errors import ClientCutMemory, HookFailed, LoadFailed, StubDied
from moonpool.runtime.isolation.bounds import Bounds
from moonpool.runtime.isolation.hints import withheld
from moonpool.runtime.isolation.inspection import confirmed
from moonpool.runtime.isolation.plan import IsolationPlan
from moonpool.runtime.isolation.spares import Spares
from moonpool.runtime.isolation.watcher import Watcher
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model, ModelAccounts
from moonpool.runtime.model.budgets import OBSERVATIONS_PER_MESSAGE
from moonpool.runtime.model.config.options import is_compiled, spares_contained
from moonpool.runtime.model.confinement import Confinement
from moonpool.runtime.model.request import InferenceRequest, Outcome
from moonpool.runtime.observe.distributions import BucketCounts
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.observe.metric_families import KINDS
from moonpool.runtime.observe.metrics import MetricRegistry
from moonpool.runtime.observe.recent_errors import RecentErrors
from moonpool.runtime.process.blank_templates import BlankTemplates
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.diagnose import exec_failure, start_failure
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import forbid_looking_inside
from moonpool.runtime.stubs.allotment import Allotment, ModelMemory
from moonpool.runtime.stubs.calls.dispatcher import BROKE, CallDispatcher
from moonpool.runtime.stubs.calls.requests import Callees
from moonpool.runtime.stubs.control import ControlChannel, MessageRateLimiter
from moonpool.runtime.stubs.growth import Growth
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.metrics import StubMetrics
from moonpool.runtime.stubs.output import Printer, StubOutput
from moonpool.runtime.stubs.readiness import StubReadiness

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.runtime.stubs.devices import Lanes

Fork = Callable[[str, int, int, int, int], ChildProcess]
Respond = Callable[[InferenceRequest, Outcome | None, int], None]


_log = RuntimeLog("moonpool")
# The ways in which the process of a stub comes about: a spare becomes it, a template forks it, or it is started.
WAYS = ("spare", "fork", "exec")
# The phases of a start: until there is a process, until its sandbox is on and was inspected, and until the model is
# loaded, or has completed its configuration.
PHASES = ("process", "sandbox", "model")
_START_BOUNDS_NS = tuple(
    ms * 1_000_000 for ms in (1, 2, 5, 10, 20, 30, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000)
)
# Seconds from SIGTERM, at which a stub writes the stacks of its threads to the log, to SIGKILL.
GRACE_S = 0.25
# Seconds that a process may take to end after it has closed its channel.
_EXIT_S = 1.0
# Seconds that the reactor may take for what a thread waits for. Its callbacks do not block, but the machine may be
# busy.
_REACTOR_S = 60.0
# Seconds until CANCEL is sent again if the stub's channel is half full.
_LATER_S = 0.05
_RESPONSES = int(Kind.RESPONSES)
# Seconds for which the output of a stub that prints too much is not read.
_PAUSE_S = 0.02
_CUT_SHORT = (
    "[%s] a client cut short the shared memory that its tensors lie in; until model '%s' is loaded again, tensors in "
    "memory of clients are copied for it"
)
_MUTE = "closed its control channel and was ended"
_UNREAD = "could not be read from and was ended"


class StubHandle:
    """Starts a stub and owns it until `end`. The reactor's thread must not call methods that wait."""

    # True if the model has `sleep` and `wake`.
    can_sleep = False
    # Writes its output where none is logged; None for the standard output.
    printer: Printer | None = None
    # False for a process whose work channel stays a socket.
    may_use_slots = True
    # True once it has loaded a model, or completed a configuration.
    _is_started = False
    # True if it worked in memory of a client when it ended.
    _had_clients_memory = False

    def __init__(self, stubs: Stubs, model: Model, name: str, plan: IsolationPlan, fork: Fork | None = None) -> None:
        """Start the process and own the plan. Raises `LoadFailed` if it cannot be started, and `OutOfMemory`.

        `fork` starts it in another way. It gets the name and descriptors for work, control, calls and output. What it
        raises is passed on.
        """
        options = model.options
        self.name = name
        self._on_exit: Callable[[], None] = _nothing
        self._on_response: Respond = _nothing
        self._model, self.plan = model, plan
        self.confinement: Confinement | None = None
        self._stubs, self._reactor = stubs, stubs.reactor
        self.metrics = StubMetrics(stubs.metrics, self.catch_up, options.sandbox, model.accounts.metrics)
        self.readiness = StubReadiness(name, stubs.reactor, self.send)
        self._reason: BaseException | None = None
        # The process has ended; its control channel is not read any more.
        self._has_exited = self._is_mute = self._is_closed = False
        self._began_s = time.monotonic()
        self._phase_ns = time.monotonic_ns()
        # The memory that all processes of the runtime together give to this process, by the side that writes there.
        self.allotments = stubs.allotments_of(model)
        try:
            with ExitStack() as undo, ExitStack() as started:
                undo.callback(plan.release)
                (work, work_end), (calls, calls_end), (channel, control_end) = (_pair(undo, started) for _ in range(3))
                self.control = ControlChannel(channel)
                self._send = self.control.send
                self.bounds = Bounds(name, plan.policy, options, stubs.watcher, plan.processes)
                undo.callback(self.bounds.release)
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                started.callback(os.close, write_fd)
                self._output = StubOutput(name, read_fd, options.log_lines_per_s, self.printer)
                undo.callback(self._output.close)
                self._send(Kind.SANDBOX, self.bounds.policy.to_json())
                fds = (work_end.fileno(), control_end.fileno(), calls_end.fileno(), write_fd)
                self.process: ChildProcess = (fork or plan.spawn)(name, *fds)
                undo.callback(_end, self.process)
                self.bounds.begin(self.process)
                # While the process begins and puts its sandbox on.
                self._slots = self._offer_slots(undo)
                self.link = self._new_link(work)
                undo.pop_all()
            self._phase("process")
        except OSError as error:
            raise LoadFailed(start_failure(plan.python, error), stage="start") from error
        self.rate_limiter = MessageRateLimiter(stubs.reactor, channel.fileno())
        self._growth = Growth(self.link, self.control, options.region_limit_bytes)
        self._watch(calls, stubs.callees_of(model))

    def _new_link(self, work: Channel) -> Link:
        """Make the first regions, and announce them. Raises `OutOfMemory`."""
        is_private = is_contained(self._model.options.sandbox)
        if is_private:
            forbid_looking_inside()
        return Link(
            work,
            self._send_region,
            lambda region_id: self._send(Kind.RETIRE, region_id),
            region_bytes=self._model.options.region_bytes,
            requests=self.allotments[Side.RUNTIME],
            answers=self.allotments[Side.STUB],
            is_private=is_private,
            make_lanes=None if self.plan.gpus == () else self._make_lanes,
        )

    def _offer_slots(self, undo: ExitStack) -> SlotChannel | None:
        """Offer the stub a work channel in memory. Returns this end of it, None if the channel stays a socket."""
        options = self._model.options
        is_pure = is_contained(options.sandbox) and spares_contained()
        if is_pure or not self.may_use_slots or not is_compiled(options):
            return None
        offered = offer()
        if offered is None:
            return None
        slots, fds = offered
        undo.callback(slots.close)
        try:
            self.control.send_slots(*fds)
        finally:
            for fd in fds:
                os.close(fd)
        return slots

    def _watch(self, calls: Channel, callees: Callees) -> None:
        self._reactor.watch(self._output.fd, self._read_output)
        self._call_dispatcher = CallDispatcher(
            calls, self.link, self._reactor, callees, self.metrics, self.rate_limiter
        )
        self._listen(calls)
        self._reactor.watch(self.process.pidfd, self._exited)
        self._stubs.add(self)

    def _listen(self, calls: Channel) -> None:  # noqa: ARG002 - a subclass listens elsewhere
        """Begin to read the control channel and the calls."""
        self._reactor.watch(self.control.channel.fileno(), self._read_control)
        self._call_dispatcher.watch(self._kill, self.catch_up, self._output.log)

    # Memory of devices

    def _make_lanes(self) -> Lanes:
        from moonpool.runtime.stubs.devices import Lanes

        def send_event(number: int, handle: bytes) -> None:
            self._send(Kind.EVENT, number, handle)

        return Lanes(send_event, self._read_event, self.plan.gpus)

    def _read_event(self) -> bool:
        """Read the next control message. Returns False, and reads nothing, on any thread but the reactor's."""
        if not self._reactor.is_here:
            return False
        self.read(1)
        return True

    def _send_region(self, region: SharedRegion | DeviceRegion, writer: Side) -> None:
        number: int | None = NO_DEVICE
        if not isinstance(region, SharedRegion):
            number = self.link.open_lanes().number_of(region.device.ordinal)
        if number is None:
            raise ValueError(f"the stub does not see the device of {region!r}")
        self.control.send_region(region, writer, number)

    # Life

    def start(self, start: Mapping[str, Any], deadline: float | None) -> list[Any]:
        """Send START and wait for the model. Returns the fields of LOADED or COMPLETED. After COMPLETED, it may be
        called again.

        `deadline` is of `time.monotonic`. Raises `LoadFailed` with the model's own text, or with the reason for which
        the stub has none.
        """
        try:
            if self.confinement is None:
                self.bounds.hold(self.process, self.abort)
                self._confirm(self._expect(Kind.CONFINED, deadline))
                self._phase("sandbox")
            layers = self.confinement.layers if self.confinement is not None else ()
            start = {**start, "layers": layers}
            self.link.conversation.send(Kind.START, json.dumps(start))
            expected = Kind.COMPLETED if start["mode"] == "complete" else Kind.LOADED
            message = self._expect(expected, deadline)
            if not self._is_started:
                self._is_started = True
                self._phase("model")
            if expected == Kind.LOADED:
                self._settle_slots(message[1])
            return message
        except TimeoutError:
            self._stop()
            raise LoadFailed(
                f"Stub process '{self.name}' was not ready in time{self.bounds.suspected_memory()} and was ended; "
                "raise MOONPOOL_LOAD_TIMEOUT_S if it needs longer, or see its stacks in the log",
                stage="initialize",
            ) from None
        except (PeerGone, ProtocolError) as error:
            reason = self.explain(error, "during start")
            failure = LoadFailed(str(reason), stage="start")
            failure.public_message = getattr(reason, "public_message", None)
            raise failure from reason

    def _phase(self, phase: str) -> None:
        """Count the time since the last phase of the start."""
        now_ns = time.monotonic_ns()
        self._stubs.starts.add(self.process.way, phase, now_ns - self._phase_ns)
        self._phase_ns = now_ns

    def _settle_slots(self, facts: Mapping[str, Any]) -> None:
        """Go on in memory if the stub says in LOADED that it does."""
        slots, self._slots = self._slots, None
        if slots is None:
            return
        if facts.get("slots") is not True:
            slots.close()
            return
        self.link.use(slots)
        # In this order: `_exited` wakes the channel that it finds, after it has noted the end.
        if self._has_exited:
            slots.wake()

    def _expect(self, expected: Kind, deadline: float | None) -> list[Any]:
        """Receive the next message of the start. Raises `LoadFailed`, `TimeoutError`, `PeerGone`, `ProtocolError`."""
        message = self._receive(deadline)
        if message[0] == Kind.FAILED:
            text = message[2] + withheld(message[2], self.plan.policy)
            if message[1] == EXEC_FAILED:
                text = exec_failure(self.plan.python, message[2]) or text
            failure = LoadFailed(text, stage=message[1], traceback=message[3])
            failure.is_confined = is_contained(self._model.options.sandbox)
            raise failure
        if message[0] != expected:
            raise LoadFailed(
                f"Stub process '{self.name}' broke the protocol and was ended: "
                f"{Kind(message[0]).name} came instead of {expected.name}",
                stage="start",
            )
        return message

    def _confirm(self, confined: list[Any]) -> None:
        """Check CONFINED against what the kernel says of the process. Raises `LoadFailed`.

        No foreign code has run in a process that was started, so its layers are inspected before any does.
        """
        _, version, layers, left_out = confined
        if version != PROTOCOL_VERSION:
            raise LoadFailed(
                f"the runtime speaks protocol {PROTOCOL_VERSION} and this stub {version}; "
                "install the same moonpool for both",
                stage="handshake",
            )
        plan = self.plan
        if plan.template is not None:
            # Foreign code has run in a fork, so its word counts for nothing. But no process can take off a layer, so it
            # has those of its template, which were confirmed before foreign code ran there.
            left_out = plan.template.left_out
            layers = [each for each in plan.template.layers if each not in self.bounds.layers]
        elif self.process.tree is not None and self.process.tree.is_namespace:
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
        ends_by_user = self.process.tree is not None and "own_user" in layers
        if ends_by_user or self.bounds.ends_all:
            return
        raise LoadFailed(
            f"Stub process '{self.name}' may start processes (MOONPOOL_PREFORK, MOONPOOL_SANDBOX_SYSCALLS), and "
            "nothing here would end them with it: allow user namespaces, run the runtime as root, or leave it a cgroup "
            "(LIMITS.md)",
            stage="sandbox",
        )

    def _receive(self, deadline: float | None) -> list[Any]:
        if not self.link.conversation.channel.wait_until(deadline):
            raise TimeoutError
        return self.link.conversation.receive()

    @property
    def is_worn(self) -> bool:
        """True if this process was refused memory that a new process could have (see `allotment.py`).

        Always False within the restart window after the start. Otherwise a model could have its process restarted all
        the time.
        """
        is_old = time.monotonic() - self._began_s > self._model.options.restart_window_s
        return is_old and any(each.is_worn for each in self.allotments.values())

    @property
    def given_bytes(self) -> int:
        """The bytes of all shared memory that was made for the process and sent to it."""
        return sum(each.given_bytes for each in self.allotments.values())

    @property
    def counted_bytes(self) -> int:
        """The bytes of shared memory that count for the process, whether or not it has mapped or touched them."""
        return sum(each.counted_bytes for each in self.allotments.values())

    def notify_exit(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the reactor's thread when the process has ended, also if it has already."""

        def set_callback() -> None:
            self._on_exit = callback
            if self._has_exited:
                callback()

        self._reactor.call_soon(set_callback)

    def serve(self, respond: Respond) -> None:
        """Give responses that come apart from the answers to batches to `respond` from now on."""
        self._on_response = respond

    def cancel(self, request: InferenceRequest) -> None:
        """Tell the model, if it has a request, that nobody waits for it any more."""
        key = self.link.replies.key_of(request)
        if key is None:
            return
        try:
            if self.control.channel.is_half_full:
                # Many callers may leave at the same time. Messages that a stub must get need room, too.
                self._reactor.call_later(_LATER_S, lambda: self.cancel(request))
            else:
                self._send(Kind.CANCEL, *key)
        except (MoonpoolError, OSError):  # the stub is gone
            return
        self._call_dispatcher.leave_deserted()

    def tidy(self, now_s: float) -> None:
        """Give back memory that was not needed lately. For the thread that holds the idle instance."""
        self.link.tidy(now_s)
        self._growth.tidy()

    def call_hook(self, kind: Kind, timeout_s: float | None, option: str) -> None:
        """Call the model's `sleep` or `wake`, by the kind of message, and wait for it. Nothing may be inside.

        Raises `HookFailed` if it raised, and then the process goes on. If it takes longer than `timeout_s`, which
        `option` names, or the process dies or breaks the protocol, the process is ended, and this raises its `reason`.
        """
        name = kind.name.lower()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.link.conversation.send(kind)
            message = self._receive(deadline)
        except (TimeoutError, MoonpoolError) as error:
            if isinstance(error, TimeoutError):
                reason: BaseException = HookFailed(
                    f"`{name}` of '{self.name}' took longer than {timeout_s:g} s ({option}), and its process was "
                    "ended; see its stacks in the log"
                )
            else:
                reason = self.explain(error, f"during {name}")
            self.abort(reason)
            raise reason from None
        if message[1]:
            text = f"`{name}` of '{self.name}' failed: {message[1]}"
            self._on_reactor(lambda: self._output.log(0, message[2], "", 0))
            raise HookFailed(text)

    def finalize(self, timeout_s: float | None) -> None:
        """Let the model finalize, and wait until the process has ended. If that takes too long, end it."""
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
            _log.warning("[%s] died in finalize: %s", self.name, self.explain(error, "during finalize"))
        self._stop()

    def abort(self, reason: BaseException) -> None:
        """Begin to end the process, and keep the reason for `explain`. Does not wait. Any thread may call it."""
        if self._reason is None:
            self._give_up(reason)
            self.process.signal(signal.SIGTERM)
            self._reactor.call_later(GRACE_S, self.process.kill)

    def _give_up(self, reason: BaseException) -> None:
        self._reason = reason
        self.link.is_given_up = True

    @property
    def reason(self) -> BaseException | None:
        """The reason for which the runtime ended the stub, None if it did not."""
        return self._reason

    def explain(self, error: BaseException, doing: str) -> BaseException:
        """Return the error for callers of a stub that is gone or broken. Ends the process and waits for it.

        `error` is what the driver met. `doing` continues the sentence, as in "during start".
        """
        if self._reason is None and not isinstance(error, PeerGone):
            is_lie = isinstance(error, ProtocolError)
            why = BROKE if is_lie else "was ended, because a thread that used its channel was interrupted"
            public = f"Stub process '{self.name}' {why}"
            self._give_up(StubDied(f"{public}: {error if is_lie else repr(error)}", public))
            self.process.kill()
        code = self.process.wait(GRACE_S + _EXIT_S if self._reason else _EXIT_S)
        if code is None:
            self.process.kill()
            self.process.wait(_EXIT_S)
        if not self._is_closed:
            self._on_reactor(self.catch_up if code is None else self.close)
        if self._reason is not None:
            return self._reason
        words, last_words = "closed its channel", ""
        if code is not None:
            words, last_words = self.bounds.death_in_words(code, self.plan.python, self._output.tail())
        text = f"Stub process '{self.name}' is not healthy. It {words}"
        if code == -signal.SIGBUS and self._had_clients_memory:
            # The model can send itself this signal. So it is believed once: from now on, this model gets copies.
            self._model.lends_clients_memory = False
            _log.warning(_CUT_SHORT, self.name, self._model.name)
            return ClientCutMemory(f"{text}: a client cut short the memory that its tensors lie in.")
        # The second text is the public one. The last words of the process are not meant for clients.
        return StubDied(f"{text}{last_words} {doing}.", f"{text} {doing}" if last_words else None)

    def _stop(self) -> None:
        """Ask the process to end, and give it a moment for that. `end`, which follows, kills it otherwise."""
        self.process.signal(signal.SIGTERM)
        self.process.wait(GRACE_S)

    def end(self) -> None:
        """End the process if it still runs, and give up everything. May be called many times."""
        self.process.kill()
        if self.process.wait(10 * _EXIT_S) is None:
            _log.error("[%s] cannot be killed: %s", self.name, repr(self.process))
        try:
            if not self._is_closed:
                self._on_reactor(self.close)
        finally:
            self.bounds.release()
            self.plan.release()

    def _on_reactor(self, action: Callable[[], None]) -> None:
        """Run `action` on the reactor's thread, and wait. Raises `MoonpoolError` if it has not run within
        `_REACTOR_S`.
        """
        if not self._reactor.run(action, _REACTOR_S):
            raise MoonpoolError(
                f"[{self.name}] the thread moonpool-reactor has done nothing for {_REACTOR_S:g} s: the runtime was "
                "closed, "
                "or one of the reactor's callbacks blocks"
            )

    def close(self) -> None:
        """Close the channels and the memory. Responses that callers hold stay valid. On the reactor's thread."""
        if self._is_closed:
            return
        # The process has ended by now, but messages that it sent before may still be unread.
        self.catch_up()
        self._had_clients_memory = self.link.borrowed_blocks.has_clients_memory
        self._reactor.forget(self._output.fd)
        self._reactor.forget(self.process.pidfd)
        self._call_dispatcher.close()
        if self._slots is not None:
            self._slots.close()
        self._output.drain()
        self._output.close()
        self._is_closed = True
        self._growth.close()
        channel = self.link.conversation.channel
        for fd in (self.control.channel.fileno(), channel.fileno()):
            self._reactor.forget(fd)
        self.control.channel.close()
        channel.wake()
        channel.close()
        self.link.close()
        self.process.close()
        self._stubs.remove(self)
        self.metrics.close()
        self.readiness.close()

    # On the reactor's thread

    def _exited(self) -> None:
        self._reactor.forget(self.process.pidfd)
        self.catch_up()
        # In this order: a channel that the link uses only from now on is woken by `_settle_slots`.
        self._has_exited = True
        # A process that the stub started may hold the work channel open, so its end may never be read. The driver must
        # wake up now.
        self.link.conversation.channel.wake()
        self.readiness.close()
        self._on_exit()

    def _read_output(self) -> None:
        if not self._output.ready():
            self._reactor.forget(self._output.fd)
        elif self._output.is_ahead:
            self._reactor.pause(self._output.fd, _PAUSE_S)

    def read_output(self) -> None:
        """Log the lines that the stub has printed until now."""
        if not self._is_closed:
            self._output.catch_up()

    def catch_up(self) -> None:
        """Read the control messages that the stub has sent so far."""
        # No socket holds more packets. Without a bound, a stub that goes on sending could keep the reactor for ever.
        self._read_control(most=300)

    def _read_control(self, most: int = 64) -> None:
        if self._is_mute or self._is_closed:
            return
        try:
            self.read(most)  # then other descriptors have their turn
        except PeerGone:
            self._stop_reading()
            # As a rule the process is ending, and `_exited` follows. A process that closed the channel and lives on
            # could not be reached any more, so it is ended after a while.
            self._reactor.call_later(_EXIT_S, lambda: self._kill(_MUTE))
        except ProtocolError as error:
            self._stop_reading()
            self._kill(BROKE, str(error))
        except Exception:  # the message is lost, and somebody may wait for what it said
            _log.exception("[%s] its messages cannot be read", self.name)
            self._stop_reading()
            self._kill(_UNREAD)

    def _stop_reading(self) -> None:
        self._is_mute = True
        self._reactor.forget(self.control.channel.fileno())

    def _kill(self, because: str, details: str = "") -> None:
        """End a process that misbehaves, if it still runs. The details go to the log and not to clients."""
        if self._has_exited or self._is_closed:
            return
        whole = f"{because}: {details}" if details else because
        _log.error("[%s] %s", self.name, whole)
        if self._reason is None:
            subject = f"Stub process '{self.name}'"
            self._give_up(StubDied(f"{subject} {whole}", f"{subject} {because}"))
        self.process.kill()

    def read(self, most: int) -> None:
        """Read and handle at most so many control messages. Raises `PeerGone`, `ProtocolError`."""
        if self._is_closed:
            return
        try:
            response = self.link.response
            for fields in self.control.receive(most, self.link, self.rate_limiter):
                if fields[0] == _RESPONSES:
                    for row in fields[1]:
                        self._on_response(*response(row))
                elif not self._handle_memory(fields):
                    self._handle(fields)
        except PeerGone:
            # The growth's thread wakes the channel, which reads like its end, if the stub broke the protocol.
            self._growth.check()
            raise
        self._growth.release_many()
        self.rate_limiter.settle()

    def _handle_memory(self, fields: list[Any]) -> bool:
        """Handle a message about memory. Returns False, and has done nothing, for any other one."""
        kind = fields[0]
        if kind == Kind.GROW:
            self._growth.grow(*fields[1:])
        elif kind == Kind.EVENT:
            if self.link.lanes is None:
                raise ProtocolError("EVENT came unasked")
            self.link.lanes.meet(fields[1], fields[2])
        elif kind == Kind.RETIRE:
            self._growth.retire(fields[1])
        elif kind == Kind.RELEASE:
            self.link.release(fields[1])
        else:
            return False
        return True

    def _handle(self, fields: list[Any]) -> None:
        kind = fields[0]
        if kind == Kind.LOG:
            self._output.log(*fields[1:])
            self._stubs.errors.logged(self._model.name, self._model.version, fields[2])
        elif kind == Kind.METRICS:
            observations = self.metrics.change(fields[1], fields[2])
            self.rate_limiter.took(0, observations / OBSERVATIONS_PER_MESSAGE)
        elif kind == Kind.DENIALS:
            if not is_contained(self._model.options.sandbox):
                raise ProtocolError("DENIALS came of a model that is not contained")
            self._model.denials.add(self.name, fields[1])
        elif kind == Kind.READINESS:
            self.readiness.answered(fields[1], fields[2])
        else:
            raise ProtocolError(f"{Kind(kind).name} is not handled by the runtime")

    def send(self, *message: object) -> None:
        """Send a control message, or log that it could not be sent. Nothing depends on its arrival."""
        try:
            self._send(*message)
        except PeerGone:
            _log.debug("[%s] ended before this message could be sent: %s", self.name, message[:1])
        except MoonpoolError as error:
            _log.warning("[%s] could not be sent %s: %s", self.name, message[:1], error)

    def __repr__(self) -> str:
        return f"<Stub {self.name} {self.process!r}>"


def _pair(undo: ExitStack, started: ExitStack) -> tuple[Channel, socket]:
    """Make a channel. This process closes the other end once the stub has it."""
    mine, theirs = Channel.pair()
    undo.callback(mine.close)
    started.callback(theirs.close)
    return mine, theirs


def _end(process: ChildProcess) -> None:
    """End a process that is not used."""
    process.kill()
    process.wait(10 * _EXIT_S)
    process.close()


def _nothing(*_: object) -> None:
    """Do nothing, until a callback is set."""


class Starts:
    """The starts of processes, by the way and the phase. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.times = {(way, phase): BucketCounts(_START_BOUNDS_NS) for way in WAYS for phase in PHASES}

    def add(self, way: str, phase: str, duration_ns: int) -> None:
        """Count a phase that took so long."""
        with self._lock:
            self.times[way, phase].add(duration_ns)

    def counts(self) -> dict[str, int]:
        """Return the number of processes that came about in each way."""
        with self._lock:
            return {way: sum(self.times[way, PHASES[0]].counts) for way in WAYS}


# The reactor's callbacks do not block.
_SOON_S = 5.0


class Stubs:
    """The stubs of one runtime that run, and what all of them share. Any thread may call any method."""

    def __init__(self, reactor: Reactor, log: LogSettings, callees_of: Callable[[Model], Callees]) -> None:
        """Share `reactor` and `log`. `callees_of` returns the models that a model in a stub may call."""
        self.callees_of = callees_of
        # Errors that models logged, and others that a person may look for.
        self.errors = RecentErrors()
        self.reactor = reactor
        self.metrics = MetricRegistry(KINDS)
        # START carries the settings of its moment; LOGGING carries changes.
        self.log = log
        self.watcher = Watcher()
        self.blank_templates = BlankTemplates(reactor)
        self.spares = Spares(reactor)
        self.starts = Starts()
        self._log_changing = threading.Lock()
        self._alive: set[StubHandle] = set()
        # The memory of contained models, as long as a process of theirs has some.
        self._memory: WeakValueDictionary[tuple[str, Side], ModelMemory] = WeakValueDictionary()
        # By the names of models, as long as a version is alive.
        self._accounts: WeakValueDictionary[str, ModelAccounts] = WeakValueDictionary()
        self._memory_lock = threading.Lock()

    def join_accounts(self, model: Model) -> None:
        """Count what a version takes of the runtime's memory together with all other versions of its model, before it
        loads.
        """
        with self._memory_lock:
            model.accounts = self._accounts.setdefault(model.name, model.accounts)

    def allotments_of(self, model: Model) -> dict[Side, Allotment]:
        """Make the allotments of another process of a model. Those of a contained one have one limit together, in all
        its versions.
        """
        limit_bytes = model.options.region_limit_bytes
        if not is_contained(model.options.sandbox):
            return {side: Allotment(limit_bytes, is_contained=False) for side in Side}
        with self._memory_lock:
            shared = {side: self._memory.setdefault((model.name, side), ModelMemory()) for side in Side}
        return {side: Allotment(limit_bytes, is_contained=True, of_model=memory) for side, memory in shared.items()}

    def add(self, stub: StubHandle) -> None:
        """Add a stub that was started."""
        self._alive.add(stub)

    def remove(self, stub: StubHandle) -> None:
        """Remove a stub that has been given up."""
        self._alive.discard(stub)

    def change_log(self, changes: Mapping[str, object]) -> LogSettings:
        """Change settings of the log, in the stubs as well, and return all of them. Raises `InvalidRequest`."""
        with self._log_changing:
            changed = self.log.changed(changes)
            before, self.log = self.log, changed
            if changed.levels != before.levels:
                for stub in self._alive.copy():
                    stub.send(Kind.LOGGING, *changed.levels)
            return changed

    def catch_up(self) -> None:
        """Read the control messages that the stubs have sent so far."""
        self.reactor.run(self._catch_up, _SOON_S)

    def read_output(self) -> None:
        """Log the lines that the stubs have printed until now. Not for the reactor's thread."""

        def read() -> None:
            for stub in self._alive.copy():
                stub.read_output()

        self.reactor.run(read, _SOON_S)

    def _catch_up(self) -> None:
        for stub in self._alive.copy():
            stub.catch_up()
