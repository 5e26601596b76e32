"""The runtime's end of a stub's calls channel: what its model asks for is checked, done and answered.

Requests are read on the reactor's thread and put into the scheduler of the model that they are for, as any client's
are; the answer is sent by whichever thread has the outcome. Nothing here blocks. What takes long, as
loading a model does, gets a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import calls_codec
from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_CALLS, Kind, Side
from moonpool.runtime.budgets import (
    COPIED_BYTES,
    COPIED_LOADS_BYTES,
    JSON_FACTOR,
    MAX_TASKS,
    SHORT_MESSAGE,
    TASK_COST,
)
from moonpool.runtime.call_requests import Fetching, make_call_request, wire_error
from moonpool.runtime.call_tensors import read_inputs, write_outputs
from moonpool.runtime.calls import Call
from moonpool.runtime.errors import BackendError, ModelError, ModelUnavailable
from moonpool.runtime.flow import Flow
from moonpool.runtime.outbox import Outbox
from moonpool.runtime.request import Response
from moonpool.runtime.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.channel import Channel
    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.link import Link
    from moonpool.runtime.model_control import ModelControl
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.request import Outcome
    from moonpool.runtime.stub_metrics import StubMetrics

BROKE = "broke the protocol and was ended"
# A level of LOG.
_ERROR = 2
# Nobody waits for an answer to these.
_UNANSWERED = (Kind.LET_GO, Kind.CANCEL_CALL, Kind.WITHDRAW, Kind.INDIRECT)
# Packets that are read before others have their turn.
_TURN = 16
# Messages that cost more than their size.
_COSTS = dict.fromkeys((Kind.LOAD_MODEL, Kind.UNLOAD_MODEL, Kind.IS_MODEL_READY), TASK_COST)


class CallDesk:
    """One for each stub. `close` is for the reactor's thread, the rest for any."""

    def __init__(
        self,
        channel: Channel,
        link: Link,
        reactor: Reactor,
        models: ModelControl,
        metrics: StubMetrics,
    ) -> None:
        """`models` is the runtime as the model in the stub sees it, `metrics` are those of the stub."""
        self._channel = channel
        self._link = link
        self._reactor = reactor
        self._models = models
        self._metrics = metrics
        self._codec = calls_codec(Side.RUNTIME)
        self._outbox = Outbox(channel, reactor)
        self._flow = Flow(reactor, channel.fileno())
        self._calls: dict[int, Call] = {}
        # The messages that were copied out of the stub's memory and are not answered yet, and the size of the current one.
        self._room = Room()
        self._stored_bytes = 0
        self._fetching = Fetching()
        # Other things that are asked for, by their numbers: what runs on a thread, and what others are asked.
        self._tasks: set[int] = set()
        self._questions: set[int] = set()
        self._handlers: dict[int, Callable[[list[Any]], None]] = {
            Kind.INFER: self._infer,
            Kind.CANCEL_CALL: self._cancel,
            Kind.WITHDRAW: self._withdraw,
            Kind.LET_GO: self._let_go,
            Kind.INDIRECT: self._indirect,
            Kind.LOAD_MODEL: self._load_model,
            Kind.UNLOAD_MODEL: self._unload_model,
            Kind.IS_MODEL_READY: self._is_model_ready,
            Kind.NEW_METRIC: self._new_metric,
            Kind.METRIC_VALUE: self._metric_value,
        }

    def watch(
        self,
        kill: Callable[[str, str], None],
        catch_up: Callable[[], object],
        log: Callable[[int, str, str, int], None],
    ) -> None:
        """Serve the stub; `kill` hears why it is not to be believed, `catch_up` takes in what else it said.

        `log` writes to the log in the instance's name, within its budget: see `Output.log`.
        """
        self._kill, self._catch_up, self._log = kill, catch_up, log
        self._reactor.watch(self._channel.fileno(), self._ready)

    def _ready(self) -> None:
        try:
            self._outbox.flush()
            for _ in range(_TURN):
                packet = self._channel.receive_ready()
                if packet is None:
                    return
                fields = self._codec.decode(packet)
                self._flow.took(len(packet), _COSTS.get(fields[0], 1))
                self._handle(fields)
                if len(self._calls) < 2:
                    return  # a model with one thread waits now, and has sent nothing more
        except PeerGone:
            self._reactor.forget(self._channel.fileno())
            self._leave_all()
        except RemoteProtocolError as error:
            self._reactor.forget(self._channel.fileno())
            self._kill(BROKE, str(error))
        finally:
            self._flow.settle()

    def _handle(self, fields: list[Any]) -> None:
        try:
            self._handlers[fields[0]](fields)
        except RemoteProtocolError:
            raise
        except MoonpoolError as error:  # the model asked for something that it cannot have
            self._fail(fields, error)
        except Exception as error:  # the stub waits for an answer, whatever went wrong
            # The model can cause this again and again, so it is logged within the budget of the model's own lines.
            name = Kind(fields[0]).name
            self._log(_ERROR, f"{name} failed in the runtime:\n{traceback.format_exc()}", "", 0)
            self._fail(fields, BackendError(f"the request failed: {error!r}"))

    def _fail(self, fields: list[Any], error: MoonpoolError) -> None:
        """Answer a message with an error. An error in a message that has no answer is a breach of the protocol."""
        kind, number = fields[:2]
        if kind in _UNANSWERED:
            raise RemoteProtocolError(f"{Kind(kind).name} that cannot be done: {error}")
        call = self._calls.get(number)
        if call is not None:
            self._end(call, error)
        else:
            self._done(number, error)

    def _indirect(self, fields: list[Any]) -> None:
        """Handle a message that lies in memory. Its first fields decide if the rest is copied at all."""
        lease = self._link.open(*fields[1:])
        beginning = lease[:MAX_PACKET_BYTES].tobytes()
        kind, number = self._codec.head_of(beginning, 2)
        if kind in _UNANSWERED:
            raise RemoteProtocolError(f"{Kind(kind).name} that lies in memory")
        if type(number) is not int:
            raise RemoteProtocolError(f"{Kind(kind).name} of call {number!r:.20}")
        self._flow.took(len(beginning), _COSTS.get(kind, 1))
        if kind == Kind.LOAD_MODEL:
            if not self._takes_in_load(number, self._codec.head_of(beginning, 3)[2], lease.size):
                return
        elif lease.size > MAX_CALL_BYTES:
            what = f"{Kind(kind).name} of {lease.size} bytes"
            raise RemoteProtocolError(f"{what}; {MAX_CALL_BYTES} is the most")
        packet = lease.tobytes()
        # This gives the block back to the stub.
        del lease
        # A load costs no more for its size: COPIED_LOADS_BYTES bounds the loads in progress.
        self._flow.took(0 if kind == Kind.LOAD_MODEL else len(packet), 0)
        inner = self._codec.decode_stored(packet)
        if inner[:2] != [kind, number]:
            raise RemoteProtocolError("a message in memory that changed while it was read")
        self._stored_bytes = len(packet)
        del packet
        try:
            self._handle(inner)
        finally:
            self._stored_bytes = 0

    def _takes_in_load(self, number: int, name: object, size_bytes: int) -> bool:
        """Decide if a load is copied. If not, it has been answered."""
        self._check_new(number)
        try:
            self._check_load(name)
            self._room.take(number, size_bytes, COPIED_LOADS_BYTES)
        except RemoteProtocolError:
            raise
        except MoonpoolError as error:
            self._done(number, error)
            return False
        return True

    def _leave_all(self) -> None:
        while self._calls:
            _, call = self._calls.popitem()
            call.leave()

    def close(self) -> None:
        """Nobody waits for anything any more: what was asked for is taken back as far as it can be."""
        self._reactor.forget(self._channel.fileno())
        self._leave_all()
        self._channel.close()

    @property
    def open_calls(self) -> int:
        """How many calls wait for a response."""
        return len(self._calls)

    # Requests to other models

    def _infer(self, fields: list[Any]) -> None:
        _, number, model, version, decoupled, _, released, blocks, rows, _, _ = fields
        self._check_new(number)
        link = self._link
        if link.lanes is not None:
            link.lanes.receive()
        if released:
            link.loans.take_back(released)
        leases = [link.open(*block) for block in blocks]
        call = Call(number, model, self._answer, takes_many=decoupled, batch=link.replies.executing)
        self._calls[number] = call
        try:
            if len(self._calls) > MAX_CALLS:
                raise ModelUnavailable(f"{MAX_CALLS} requests of this model are open already")
            if self._stored_bytes:
                self._room.take(number, self._stored_bytes, COPIED_BYTES)
            inputs = read_inputs(rows, leases)
            del leases
            hosted = self._models.find(model, None if version == -1 else version)
        except RemoteProtocolError:
            raise
        except MoonpoolError as error:
            self._refuse(call, error)
            return
        if link.lanes is not None and hosted.signature.has_to_copy(inputs.values()):

            def go_on(fetched: dict[str, Any] | MoonpoolError) -> None:
                self._reactor.call_soon(lambda: self._submit(call, fields, hosted, fetched))

            self._fetching.start(hosted.signature, inputs, go_on)
        else:
            self._submit(call, fields, hosted, inputs)

    def _submit(
        self,
        call: Call,
        fields: list[Any],
        hosted: HostedModel,
        inputs: dict[str, Any] | MoonpoolError,
    ) -> None:
        if not self._is_open(call):
            return
        try:
            if isinstance(inputs, MoonpoolError):
                raise inputs
            request = make_call_request(hosted, fields, inputs, self._link)
            request.waiter = call
            if request.details is not None and request.details.trace is not None:
                self._link.replies.watch(request, hosted.model, request.details)
            request.is_cancelled = call.is_cancelled
            call.request, call.scheduler = request, hosted.scheduler
            execution = hosted.scheduler.submit(request)
        except MoonpoolError as error:
            self._refuse(call, error)
            return
        if execution is not None:
            execution.drive_in_reactor()

    def _refuse(self, call: Call, error: MoonpoolError) -> None:
        words = f"Model {call.model} - Error when running inference: {error}"
        self._answer(call, ModelError(words, error.code), True)

    def _let_go(self, fields: list[Any]) -> None:
        if self._link.lanes is not None:
            self._link.lanes.receive()
        self._link.loans.take_back(fields[1])

    def _answer(self, call: Call, outcome: Outcome | None, is_last: bool) -> None:
        """Send a response, unless the call is over. From any thread."""
        if is_last:
            if self._calls.pop(call.number, None) is not call:
                return
            self._room.give_back(call.number)
        elif self._calls.get(call.number) is not call:
            return
        blocks: list[list[int]] = []
        rows: list[list[Any]] = []
        parameters, error = None, None
        if isinstance(outcome, Response):
            try:
                write_outputs(outcome.outputs, self._link.loans, blocks, rows)
                parameters = dict(outcome.parameters) or None
            except Exception as failure:  # a backend may have answered with anything
                self._unlend(blocks)
                blocks, rows = [], []
                error = wire_error(failure)
        elif outcome is not None:
            error = wire_error(outcome)
        del outcome
        released = self._link.take_released()
        try:
            if self._link.lanes is not None:
                self._link.lanes.publish()
            self._send(Kind.REPLY, call.number, is_last, released, blocks, rows, parameters, error)
        except MoonpoolError as failure:  # too large for what memory there is, or nothing to travel
            self._unlend(blocks)
            self._link.released.extend(released)
            told = wire_error(failure, SHORT_MESSAGE)
            self._send(Kind.REPLY, call.number, is_last, [], [], [], None, told)
        if not is_last and self._outbox.is_full:
            self._end(call, ModelUnavailable("the model that asked leaves responses unread"))

    def _unlend(self, blocks: list[list[int]]) -> None:
        with contextlib.suppress(RemoteProtocolError):  # the stub is gone, and its loans with it
            self._link.loans.take_back(blocks)

    def _send(self, *message: Any) -> None:
        """Send now or, where the stub is behind with reading, when it has caught up. From any thread."""
        self._outbox.send(message, self._link.loans)

    def _cancel(self, fields: list[Any]) -> None:
        # It may have been answered while this was on its way.
        call = self._calls.get(fields[1])
        if call is not None:
            call.cancel()

    def _withdraw(self, fields: list[Any]) -> None:
        # It may have been answered while this was on its way.
        call = self._calls.get(fields[1])
        if call is not None:
            self._end(call, ModelError("Request cancelled", "CANCELLED"))

    def _end(self, call: Call, error: MoonpoolError) -> None:
        """End a call before its time."""
        call.leave()
        self._answer(call, error, True)

    def leave_deserted(self) -> None:
        """End the calls of a batch that nobody waits for any more. From any thread.

        Who made them is not known: where others wait, it may have been for those.
        """
        batch = self._link.replies.deserted if self._calls else 0
        if batch:
            self._reactor.call_soon(lambda: self._leave_batch(batch))

    def _leave_batch(self, batch: int) -> None:
        for call in list(self._calls.values()):
            if call.batch == batch:
                self._end(call, ModelError("Request cancelled", "CANCELLED"))

    def _is_open(self, call: Call) -> bool:
        return self._calls.get(call.number) is call

    # Other things that models ask for

    def _check_load(self, name: object) -> None:
        """Raise `MoonpoolError` if the model may not load that, or loads too much."""
        if type(name) is not str:
            raise RemoteProtocolError("LOAD_MODEL of what has no name")
        if len(self._tasks) >= MAX_TASKS:
            raise ModelUnavailable(f"{MAX_TASKS} of these are on their way already")
        self._models.check_may_load(name)

    def _load_model(self, fields: list[Any]) -> None:
        _, number, model, config, rows = fields
        self._check_new(number)
        self._check_load(model)
        self._room.take(number, JSON_FACTOR * len(config), COPIED_LOADS_BYTES)
        files = None if rows is None else dict(rows)
        self._perform(number, lambda: self._models.load(model, config, files))

    def _unload_model(self, fields: list[Any]) -> None:
        _, number, model, _ = fields
        self._check_new(number)
        self._models.begin_unload(model)
        self._done(number, None)

    def _is_model_ready(self, fields: list[Any]) -> None:
        _, number, model, version = fields
        self._check_new(number)
        if len(self._questions) >= MAX_CALLS:
            self._done(number, ModelUnavailable(f"{MAX_CALLS} of these are open already"))
            return

        def answer(is_ready: bool) -> None:
            self._questions.discard(number)
            self._done(number, None, {"ready": is_ready})

        self._questions.add(number)
        try:
            self._models.ask_ready(model, version, answer)
        except BaseException:
            self._questions.discard(number)
            raise

    def _check_new(self, number: int) -> None:
        if number in self._calls or number in self._tasks or number in self._questions:
            raise RemoteProtocolError(f"call {number} is open already")

    # Metrics

    def _new_metric(self, fields: list[Any]) -> None:
        number, *asked = fields[1:]
        self._check_new(number)
        self._done(number, None, {"metric": self._metrics.hold(*asked)})

    def _metric_value(self, fields: list[Any]) -> None:
        _, number, metric = fields
        self._check_new(number)
        self._catch_up()  # METRICS came before
        self._done(number, None, {"value": self._metrics.value(metric)})

    def _perform(self, number: int, task: Callable[[], None]) -> None:
        """Do what takes long on a thread of its own, and tell the stub when it is done."""
        tasks = [task]
        del task

        def run() -> None:
            told = None
            try:
                # Popped, so that the files of a load are freed before the stub hears of the end.
                tasks.pop()()
            except Exception as failure:
                told = wire_error(failure, SHORT_MESSAGE)
                _clear_frames(failure)
            self._tasks.discard(number)
            self._tell_done(number, told, {})

        self._tasks.add(number)
        try:
            threading.Thread(target=run, name="moonpool-call").start()
        except RuntimeError as error:
            self._tasks.discard(number)
            self._done(number, ModelUnavailable(f"the runtime has no thread for this: {error}"))

    def _done(
        self, number: int, error: BaseException | None, values: dict[str, Any] | None = None
    ) -> None:
        told = None if error is None else wire_error(error, SHORT_MESSAGE)
        self._tell_done(number, told, values or {})

    def _tell_done(self, number: int, told: list[object] | None, values: dict[str, Any]) -> None:
        self._room.give_back(number)
        self._send(Kind.DONE, number, told, values)


def _clear_frames(error: BaseException | None) -> None:
    """Free the variables of the functions that an error came through. The error may be in a cycle, which is collected late."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
