"""The runtime's end of a stub's calls channel: checks the calls of a model, does what they ask, and sends the answers.

Theory of operation. The reactor's thread reads calls. It submits a request to the scheduler of the other model, as that
of any client. The thread that has the outcome sends the answer. Nothing here blocks. A load gets a thread of its own,
and so does a request whose inputs have to be copied from a device.

Who ends a call. An answer, a withdrawal, the end of the batch's callers and the end of the stub may meet. `_answer`
decides: it takes the call out of `_calls`, which is atomic, and only the thread that got it sends the last response. A
response that is not the last is sent only while the call is there.

What the port takes. `CallPort` reads an INFER with inputs in the stub's own regions, and writes the REPLY of a response
whose outputs are copied; its head says more. If it declines one of these steps, the codec, `read_inputs` or
`write_outputs` do that step. So both ways refuse the same, with the same words. All else that a call needs is here
once.

Hostile calls. A number that is in use, a message without an answer that cannot be done, and a block that does not
belong to the stub are breaches of the protocol: the stub is killed. A call that an honest model can make too often is
answered with an error: more than MAX_CALLS open requests or questions, or MAX_TASKS loads. The rate limiter of the
stub's channels counts calls by what they cost: one that the port has read and a model takes costs less than any other
message. An error of the runtime itself is answered, too, since the model waits; its traceback is logged within the
model's own budget of lines, because a model could cause it again and again.

A message too large for a packet lies in the stub's memory, and INDIRECT names it. The stub can write there at any time.
So its beginning is copied and checked first: kind, number, size and, for a load, name. Only then is the whole copied
and decoded; a kind or number that has changed meanwhile is a breach. A `CopyBudget` bounds the copies of all open calls
until they are answered. A load, which may be as large as memory, is charged to it before it is copied, and again for
its configuration, as parsed JSON takes many times its size. A request, which has MAX_CALL_BYTES at most, is charged
once it is decoded.

Sending. `StubSendQueue` keeps the order of answers. Its lock is held while a packet is sent, which never blocks. If the
socket is full, packets wait in a queue, and the reactor flushes it when the socket takes more. A stub that does not
read gets errors in place of further responses (`is_full`), and is killed at twice that size. A block that an answer
lends is taken back if the answer cannot be sent.

Order of closing. `close` runs on the reactor's thread. It stops watching the channel, leaves all open calls, so that
the other models need not run them, and then closes the channel. Threads that still have a task find the channel closed
when they answer, which is no error.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import Closed, MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_CALLS, Kind, Side
from moonpool.ipc.port import PythonPort
from moonpool.ipc.port.calls import CallPort
from moonpool.runtime.errors import BackendError, ModelError, ModelUnavailable, OutOfThreads
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.model.budgets import (
    COPIED_BYTES,
    COPIED_LOADS_BYTES,
    COSTS,
    JSON_FACTOR,
    LONGEST_ERROR,
    MAX_TASKS,
    SHORT_MESSAGE,
    UNREAD_ANSWER_BYTES,
    UNREAD_BYTES,
    USUAL_CALL_COST,
)
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, WireTensor
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks
from moonpool.runtime.stubs.calls.requests import (
    Callee,
    Callees,
    Fetching,
    ModelCall,
    make_call_request,
    read_inputs,
    wire_error,
    write_outputs,
)
from moonpool.runtime.stubs.control import MessageRateLimiter
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.metrics import StubMetrics

BROKE = "broke the protocol and was ended"
_REPLY = int(Kind.REPLY)
# A level of LOG.
_ERROR = 2
# Messages that get no answer.
_UNANSWERED = (Kind.LET_GO, Kind.CANCEL_CALL, Kind.WITHDRAW, Kind.INDIRECT)
# Packets that are read before other descriptors have their turn.
_TURN = 16


class CallDispatcher:
    """Serves the calls of one stub. `close` is for the reactor's thread, the other methods for any."""

    def __init__(
        self,
        channel: Channel,
        link: Link,
        reactor: Reactor,
        models: Callees,
        metrics: StubMetrics,
        rate_limiter: MessageRateLimiter,
    ) -> None:
        """Own `channel`. `models` are those that the model may call. `metrics` and `rate_limiter` are those of the
        stub.
        """
        self._channel = channel
        self._link = link
        self._reactor = reactor
        self._models = models
        # Regions of contained models are private.
        self._is_contained = link.borrowed_blocks.is_private
        self._takes_devices = link.may_have_lanes
        self._metrics = metrics
        self._codec = calls_codec(Side.RUNTIME)
        # What contained models say goes the way that the operator has chosen for their batches.
        is_plain = type(link.port) is not PythonPort
        blocks, regions = link.borrowed_blocks, link.response_regions
        self._port = CallPort(channel, blocks, link.released, regions, WireTensor, is_plain=is_plain)
        self._replies = link.replies
        self._send_queue = StubSendQueue(channel, reactor, self._port)
        self._rate_limiter = rate_limiter
        rate_limiter.add(channel.fileno())
        self._calls: dict[int, ModelCall] = {}
        # The copies of messages that are not answered yet, and the size of the one that is handled now.
        self._requests_budget = CopyBudget()
        self._loads_budget = CopyBudget()
        self._stored_bytes = 0
        self._fetching = Fetching()
        # The numbers of loads, which run on threads, and of questions if a model is ready.
        self._tasks: set[int] = set()
        self._questions: set[int] = set()
        self._handlers: dict[int, Callable[[list[Any]], bool | None]] = {
            Kind.INFER: self._infer,
            Kind.CANCEL_CALL: self._cancel,
            Kind.WITHDRAW: self._withdraw,
            Kind.LET_GO: self._release,
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
        """Begin to serve the stub.

        `kill` ends the stub, and gets the reason and details. `catch_up` reads the stub's control messages. `log`
        writes to the log in the instance's name, within its budget, as `StubOutput.log` does.
        """
        self._kill, self._catch_up, self._log = kill, catch_up, log
        self._reactor.watch(self._channel.fileno(), self._ready)

    def _ready(self) -> None:
        try:
            self._send_queue.flush()
            for _ in range(_TURN):
                packet = self._port.receive()
                if packet is None:
                    return
                self._take(packet)
                if len(self._calls) < 2:
                    return  # a model with one thread waits for this answer, and has sent nothing more
        except PeerGone:
            self._reactor.forget(self._channel.fileno())
            self._leave_all()
        except RemoteProtocolError as error:
            self._reactor.forget(self._channel.fileno())
            self._kill(BROKE, str(error))
        finally:
            self._rate_limiter.settle()

    def _take(self, packet: bytes) -> None:
        """Do what a packet asks for. Raises `RemoteProtocolError`."""
        # On devices, the stub's work comes before what it says.
        fields = self._port.read(packet) if self._link.lanes is None else None
        if fields is None:
            fields = self._codec.decode(packet)
            self._rate_limiter.took(len(packet), COSTS.get(fields[0], 1))
            self._handle(fields)
        else:
            is_usual = self._handle(fields)
            self._rate_limiter.took(len(packet), USUAL_CALL_COST if is_usual else 1)

    def _handle(self, fields: list[Any]) -> bool | None:
        """Do what a message asks for. Returns True for a request to another model that was submitted."""
        try:
            return self._handlers[fields[0]](fields)
        except RemoteProtocolError:
            raise
        except MoonpoolError as error:  # the model asked for something that it cannot have
            self._fail(fields, error)
        except Exception as error:  # the stub waits for an answer in any case
            self._fail(fields, self._failed(fields[0], error))
        return False

    def _failed(self, kind: int, error: Exception) -> BackendError:
        """Log an error of the runtime's own that a message has caused, and return the error for the model."""
        name = Kind(kind).name
        lines = "".join(traceback.format_exception(error))
        self._log(_ERROR, f"{name} failed in the runtime:\n{lines}", "", 0)
        return BackendError(f"the request failed: {error!r}")

    def _fail(self, fields: list[Any], error: MoonpoolError) -> None:
        """Answer a message with an error. For a message that gets no answer, raise `RemoteProtocolError`."""
        kind, number = fields[:2]
        if kind in _UNANSWERED:
            raise RemoteProtocolError(f"{Kind(kind).name} that cannot be done: {error}")
        call = self._calls.get(number)
        if call is not None:
            self._end(call, error)
        else:
            self._done(number, error)

    def _indirect(self, fields: list[Any]) -> None:
        """Handle a message that lies in memory. Its first fields decide if the rest is copied."""
        lease = self._link.open(*fields[1:])
        beginning = lease[:MAX_PACKET_BYTES].tobytes()
        kind, number = self._codec.head_of(beginning, 2)
        if kind in _UNANSWERED:
            raise RemoteProtocolError(f"{Kind(kind).name} that lies in memory")
        if type(number) is not int:
            raise RemoteProtocolError(f"{Kind(kind).name} of call {number!r:.20}")
        self._rate_limiter.took(len(beginning), COSTS.get(kind, 1))
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
        self._rate_limiter.took(0 if kind == Kind.LOAD_MODEL else len(packet), 0)
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
            self._loads_budget.acquire(number, size_bytes, COPIED_LOADS_BYTES)
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
        """Stop serving, and leave all open calls."""
        self._reactor.forget(self._channel.fileno())
        self._leave_all()
        self._channel.close()

    @property
    def open_calls(self) -> int:
        """The number of calls that wait for a response."""
        return len(self._calls)

    # Requests to other models

    def _infer(self, fields: list[Any]) -> bool:
        """Submit a request to another model. Returns True if its scheduler has it."""
        _, number, model, version, decoupled, _, released, blocks, rows, _, _ = fields
        self._check_new(number)
        link = self._link
        if link.lanes is not None:
            link.lanes.receive()
        if released:
            link.borrowed_blocks.take_back(released)
        inputs: dict[str, Any] | None = None
        leases: list[Any] = []
        if blocks is None:  # the port has read it
            inputs = self._port.inputs()
        else:
            leases = [link.open(*block) for block in blocks]
        call = ModelCall(number, model, self._answer, decoupled, self._replies.executing[0])
        self._calls[number] = call
        try:
            if len(self._calls) > MAX_CALLS:
                raise self._too_many()
            if self._stored_bytes:
                self._requests_budget.acquire(number, self._stored_bytes, COPIED_BYTES)
            if inputs is None:
                inputs = read_inputs(rows, leases)
                leases = []
            hosted = self._models.find(model, None if version == -1 else version)
        except RemoteProtocolError:
            raise
        except MoonpoolError as error:
            # The reply to it gives the blocks back.
            inputs = None
            leases = []
            self._refuse(call, error)
            return False
        if link.lanes is not None and hosted.signature.has_to_copy(inputs.values()):
            self._fetch(call, fields, hosted, inputs)
            return False
        return self._submit(call, fields, hosted, inputs)

    @staticmethod
    def _too_many() -> ModelUnavailable:
        return ModelUnavailable(f"{MAX_CALLS} requests of this model are open already")

    def _fetch(self, call: ModelCall, fields: list[Any], hosted: Callee, inputs: dict[str, Any]) -> None:
        """Submit a call when its inputs were copied from their device."""

        def go_on(fetched: dict[str, Any] | MoonpoolError) -> None:
            self._reactor.call_soon(lambda: self._submit(call, fields, hosted, fetched))

        self._fetching.start(hosted.signature, inputs, go_on)

    def _submit(
        self, call: ModelCall, fields: list[Any], hosted: Callee, inputs: dict[str, Any] | MoonpoolError
    ) -> bool:
        """Submit a call. Returns True if the scheduler has it."""
        if not self._is_open(call):
            return False
        try:
            if isinstance(inputs, MoonpoolError):
                raise inputs
            request = make_call_request(hosted, fields, inputs, self._link)
            request.waiter = call
            request.takes_devices = self._takes_devices
            if request.details is not None and request.details.trace is not None:
                self._link.replies.watch(request, hosted.model, request.details)
            request.is_cancelled = call.is_cancelled
            scheduler = hosted.scheduler
            call.request, call.scheduler = request, scheduler
            self._check_circle(call, scheduler, request)
            execution = scheduler.submit(request)
        except MoonpoolError as error:
            self._refuse(call, error)
            return False
        if execution is not None:
            execution.drive_in_reactor()
        return True

    def _check_circle(self, call: ModelCall, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Raise `ModelUnavailable` if a request would wait for resources that the batch of its asker keeps until it is
        answered.
        """
        targets = scheduler.limited if call.batch else ()
        if targets:
            link = self._link
            targets[0].limiter.ask(
                request,
                targets,
                lambda instance: getattr(instance.state, "link", None) is link,
                lambda: self._is_open(call),
            )

    def _refuse(self, call: ModelCall, error: MoonpoolError) -> None:
        # The other error has the code, and what kind of text it is does not show any more in this one.
        text = public_text(error, is_for_contained=self._is_contained)
        words = f"Model {call.model} - Error when running inference: {text}"
        self._answer(call, ModelError(words, error.code), True)

    def _wire_error(self, error: BaseException, most: int = LONGEST_ERROR) -> list[object]:
        return wire_error(error, most, is_for_contained=self._is_contained)

    def _release(self, fields: list[Any]) -> None:
        if self._link.lanes is not None:
            self._link.lanes.receive()
        self._link.borrowed_blocks.take_back(fields[1])

    def _answer(self, call: ModelCall, outcome: Outcome | None, is_last: bool) -> None:
        """Send a response, unless the call is over. From any thread."""
        if is_last:
            if self._calls.pop(call.number, None) is not call:
                return
            self._requests_budget.release(call.number)
        elif self._calls.get(call.number) is not call:
            return
        self._reply(call, outcome, is_last)

    def _reply(self, call: ModelCall, outcome: Outcome | None, is_last: bool) -> None:
        """Send a response, whether or not the call is over."""
        packet = None
        if type(outcome) is Response and self._link.lanes is None:
            packet = self._port.reply(call.number, is_last, outcome)
        if packet is None:
            self._reply_in_python(call, outcome, is_last)
        else:
            del outcome
            self._send_queue.put(packet)
        if not is_last and self._send_queue.is_full:
            self._end(call, ModelUnavailable("the model that asked leaves responses unread"))

    def _reply_in_python(self, call: ModelCall, outcome: Outcome | None, is_last: bool) -> None:
        """Send a response that the port does not take."""
        blocks: list[list[int]] = []
        rows: list[list[Any]] = []
        parameters, error = None, None
        if isinstance(outcome, Response):
            try:
                parameters = dict(outcome.parameters) or None
                write_outputs(outcome.outputs, self._link.borrowed_blocks, blocks, rows)
            except Exception as failure:  # a backend may answer with any object
                self._unlend(blocks)
                blocks, rows = [], []
                error = self._wire_error(failure)
        elif outcome is not None:
            error = self._wire_error(outcome)
        del outcome
        released: list[object] = self._link.take_released() if self._link.released else []
        try:
            if self._link.lanes is not None:
                self._link.lanes.publish()
            message = (_REPLY, call.number, is_last, released, blocks, rows, parameters, error)
            self._send_queue.send(message, self._link.borrowed_blocks)
        except MoonpoolError as failure:  # the memory is too small, or a value cannot be encoded
            self._unlend(blocks)
            self._link.released.extend(released)
            short = self._wire_error(failure, SHORT_MESSAGE)
            self._send(Kind.REPLY, call.number, is_last, [], [], [], None, short)

    def _unlend(self, blocks: list[list[int]]) -> None:
        # If the stub is gone by now, it borrows nothing any more.
        with contextlib.suppress(RemoteProtocolError):
            self._link.borrowed_blocks.take_back(blocks)

    def _send(self, *message: Any) -> None:
        """Send now, or when the stub has read what waits before. From any thread."""
        self._send_queue.send(message, self._link.borrowed_blocks)

    def _cancel(self, fields: list[Any]) -> None:
        # The call may have been answered while this was on its way.
        call = self._calls.get(fields[1])
        if call is not None:
            call.cancel()

    def _withdraw(self, fields: list[Any]) -> None:
        # The call may have been answered while this was on its way.
        call = self._calls.get(fields[1])
        if call is not None:
            self._end(call, ModelError("Request cancelled", "CANCELLED"))

    def _end(self, call: ModelCall, error: MoonpoolError) -> None:
        """End a call early, with an error."""
        call.leave()
        self._answer(call, error, True)

    def leave_deserted(self) -> None:
        """End the calls of the batch if the callers of all requests in the stub have left. From any thread.

        A call does not say which request of the batch it was made for. So while one caller waits, all calls go on.
        """
        batch = self._link.replies.deserted if self._calls else 0
        if batch:
            self._reactor.call_soon(lambda: self._leave_batch(batch))

    def _leave_batch(self, batch: int) -> None:
        for call in list(self._calls.values()):
            if call.batch == batch:
                self._end(call, ModelError("Request cancelled", "CANCELLED"))

    def _is_open(self, call: ModelCall) -> bool:
        return self._calls.get(call.number) is call

    # Models that load, unload and look at other models

    def _check_load(self, name: object) -> None:
        """Raise `MoonpoolError` if the model may not load that model, or has too many loads in progress."""
        if type(name) is not str:
            raise RemoteProtocolError("LOAD_MODEL without a name")
        if len(self._tasks) >= MAX_TASKS:
            raise ModelUnavailable(f"{MAX_TASKS} of these are on their way already")
        self._models.check_may_load(name)

    def _load_model(self, fields: list[Any]) -> None:
        _, number, model, config, rows = fields
        self._check_new(number)
        self._check_load(model)
        self._loads_budget.acquire(number, JSON_FACTOR * len(config), COPIED_LOADS_BYTES)
        files = None if rows is None else dict(rows)
        self._perform(number, lambda: self._models.load(model, config, files))

    def _unload_model(self, fields: list[Any]) -> None:
        _, number, model, with_members = fields
        self._check_new(number)
        self._models.begin_unload(model, with_members=with_members)
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
        self._catch_up()  # earlier changes came in METRICS, on the control channel
        self._done(number, None, {"value": self._metrics.value(metric)})

    def _perform(self, number: int, task: Callable[[], None]) -> None:
        """Do a task on a thread of its own, and send DONE when it ends."""
        tasks = [task]
        del task

        def run() -> None:
            error = None
            try:
                # Popped, so that the files of a load are freed before the budget is released.
                tasks.pop()()
            except Exception as failure:
                error = self._wire_error(failure, SHORT_MESSAGE)
                _clear_frames(failure)
            self._tasks.discard(number)
            self._send_done(number, error, {})

        self._tasks.add(number)
        try:
            start_thread(threading.Thread(target=run, name="moonpool-call"))
        except OutOfThreads as error:
            self._tasks.discard(number)
            self._done(number, error)

    def _done(self, number: int, error: BaseException | None, values: dict[str, Any] | None = None) -> None:
        short = None if error is None else self._wire_error(error, SHORT_MESSAGE)
        self._send_done(number, short, values or {})

    def _send_done(self, number: int, error: list[object] | None, values: dict[str, Any]) -> None:
        self._loads_budget.release(number)
        self._send(Kind.DONE, number, error, values)


def _clear_frames(error: BaseException | None) -> None:
    """Free the variables of the functions that an error came through. The error may be in a cycle, which is collected
    late.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class CopyBudget:
    """The bytes of messages that were copied for one stub, by the numbers of its calls. Any thread may call any
    method.
    """

    __slots__ = ("_lock", "_taken")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """The bytes of all copies together."""
        return sum(self._taken.copy().values())

    def acquire(self, number: int, size_bytes: int, most_bytes: int) -> None:
        """Count a copy before it is made, beside others with that number.

        Raises `ModelUnavailable` if all copies together would have more than `most_bytes`. The copies of one call may
        have more, but only if no other call has any.
        """
        with self._lock:
            own_bytes = self._taken.get(number, 0)
            others_bytes = sum(self._taken.values()) - own_bytes
            if others_bytes and others_bytes + own_bytes + size_bytes > most_bytes:
                raise ModelUnavailable(
                    f"messages of this model that are not answered yet take {others_bytes} bytes already; "
                    f"with this one they would be more than {most_bytes}"
                )
            self._taken[number] = own_bytes + size_bytes

    def release(self, number: int) -> None:
        """Forget the copies of a call that was answered."""
        if not self._taken:
            return  # a copy is counted before the call can be answered
        with self._lock:
            self._taken.pop(number, None)


class StubSendQueue:
    """Sends messages in order to a stub that may not read. Any thread may call `send` and `put`; `flush` is for the
    reactor's.
    """

    __slots__ = ("_channel", "_lock", "_port", "_reactor", "_waiting", "_waiting_bytes")

    def __init__(self, channel: Channel, reactor: Reactor, port: CallPort) -> None:
        """`port` is that of the channel."""
        self._channel = channel
        self._port = port
        self._reactor = reactor
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def send(self, message: tuple[Any, ...], borrowed_blocks: BorrowedBlocks) -> None:
        """Send a message, or queue it. Never blocks. A message too large for a packet is lent. Raises `OutOfMemory`."""
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            block = borrowed_blocks.allocate(len(packet), keep=True)
            start = block.offset
            block.region.memory()[start : start + len(packet)] = packet
            packet = encode(Kind.INDIRECT, block.region.id, start, len(packet))
        self.put(packet)

    def put(self, packet: bytes) -> None:
        """Send a packet, or queue it. Never blocks."""
        with self._lock:
            if self._waiting:
                self._append(packet)
                return
            try:
                if not self._port.send(packet):
                    self._channel.send(packet)
            except BlockingIOError:
                self._append(packet)
                self._reactor.call_soon(self._watch)
            except (PeerGone, Closed):
                return  # the reactor sees the end of the stub

    @property
    def is_full(self) -> bool:
        """True if nothing should be sent that is not needed."""
        return self._waiting_bytes >= UNREAD_BYTES

    def _append(self, packet: bytes) -> None:
        self._waiting.append(packet)
        self._waiting_bytes += UNREAD_ANSWER_BYTES + len(packet)

    def _watch(self) -> None:
        self._reactor.watch_room(self._channel.fileno(), wanted=True)

    def flush(self) -> None:
        """Send what waits until the socket is full. Raises `PeerGone`, and `RemoteProtocolError` if far too much
        waits.
        """
        if not self._waiting:
            return
        if self._waiting_bytes > 2 * UNREAD_BYTES:
            raise RemoteProtocolError(f"the stub leaves {self._waiting_bytes} bytes unread")
        with self._lock:
            while self._waiting:
                try:
                    self._channel.send(self._waiting[0])
                except BlockingIOError:
                    return
                self._waiting_bytes -= UNREAD_ANSWER_BYTES + len(self._waiting.popleft())
        self._reactor.watch_room(self._channel.fileno(), wanted=False)
