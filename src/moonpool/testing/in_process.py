"""A model in the process of the test, so that a debugger stops in it and the test can look at its object.

Theory of operation. The model's code runs on the thread that calls it. Coroutines run on one thread with an event loop,
as in a stub. `_executing` is held for a whole call of `execute`, because an instance executes one batch at a time.
It is reentrant, because a model that calls itself would reach another instance.

The model may send responses from threads of its own. `Collector` puts them into the `Exchange` of their request under a
condition, and a test that waits for a response wakes. Its lock is reentrant because finalizers send, too: when a model
drops a request without a last response, the garbage collector ends that request, and it may run while the same thread
holds the lock. An exchange refers to the request weakly, or nothing would ever be dropped.

`close` first stops requests to other models, then waits for the coroutines, then calls `finalize`, and puts the
process's own imports back in any case.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from bdb import BdbQuit
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CoroutineType
from typing import Any

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.errors import CODES, MoonpoolError
from moonpool.ipc.memory import Region
from moonpool.ipc.messages import AGAIN, FINAL, NO_DEVICE, Details
from moonpool.ipc.signals import at_once
from moonpool.ipc.tensors import BYTES
from moonpool.runtime.errors import InvalidRequest, LoadFailed, QueueTimeout, RequestTimedOut
from moonpool.runtime.model.backend import Model as Description
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.config.sequences import SequenceBatching
from moonpool.runtime.model.details import details_of
from moonpool.runtime.model.request import InferenceRequest as CheckedRequest
from moonpool.runtime.model.request import Response as Outputs
from moonpool.runtime.model.reshaping import of_outputs
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.model.source import Definition
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.schedule.request_queue import RequestQueue
from moonpool.runtime.schedule.sequence_controls import SequenceControls
from moonpool.runtime.schedule.sequence_states import SequenceStates
from moonpool.runtime.schedule.sequences import Sequencer
from moonpool.runtime.stubs.start_message import completed, start_of
from moonpool.stub.coroutines import Coroutines
from moonpool.stub.loader import LoadError
from moonpool.stub.model import Model, Readiness, import_class
from moonpool.stub.native.model import NativeAdapter
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.response import InferenceResponse, Reply, ReplyPort
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.placement import Placer
from moonpool.stub.peers.regions import Regions
from moonpool.stub.report import describe
from moonpool.testing.host import RecordingHost
from moonpool.testing.model import LoadedModel
from moonpool.testing.outputs import check_outputs, copied
from moonpool.testing.request import Request
from moonpool.testing.response import Response
from moonpool.testing.surroundings import Surroundings


class Exchange:
    """One request of a batch, and the responses that the model has sent to it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.responses: list[Response] = []
        self.is_final = False
        # The final flag came without a response.
        self.ended_alone = False
        # The model rescheduled the request.
        self.is_again = False
        # The exception that ended the request, if one did.
        self.cause: BaseException | None = None
        self.is_cancelled = request.cancel_after == 0
        # Weak references: if the model drops both without a last response, the request has to end with an error.
        self._request: weakref.ref[InferenceRequest] | None = None
        self._reply: weakref.ref[Reply] | None = None
        request.executions.add(self)

    @property
    def is_over(self) -> bool:
        return self.is_final or self.is_again

    def hand_over(self, request: InferenceRequest) -> None:
        """Note the object that the model gets for this request now."""
        self.is_again = False
        self._request, self._reply = weakref.ref(request), None
        request._cancelled = self.is_cancelled

    def made(self, reply: Reply) -> None:
        self._reply = weakref.ref(reply)

    def cancel(self) -> None:
        self.is_cancelled = True
        request = None if self._request is None else self._request()
        reply = None if self._reply is None else self._reply()
        if request is not None:
            request._cancelled = True
        if reply is not None:
            reply.cancel()


class Collector(ReplyPort):
    """Keeps the responses of a model. Any thread may call any method."""

    def __init__(self, start: dict[str, Any], config: ModelConfig) -> None:
        self._reshaped = of_outputs(config)
        self.is_decoupled = bool(start["decoupled"])
        self._names: list[str] = start["outputs"]
        self._placer = Placer(_NoRegions(), start)
        self._changed = threading.Condition(threading.RLock())
        self._open: dict[tuple[int, int], Exchange] = {}

    def expect(self, batch: int, exchanges: Sequence[Exchange]) -> None:
        """Expect responses to the requests of a batch, which are known by their places in it."""
        with self._changed:
            for index, exchange in enumerate(exchanges):
                self._open[batch, index] = exchange

    @property
    def has_open(self) -> bool:
        """True while a request has not had its last response."""
        return bool(self._open)

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        reply = Reply(self, batch, index, wanted)
        self._open[batch, index].made(reply)
        return reply

    def respond(
        self, reply: Reply, response: InferenceResponse | None, flags: int, *steps: Callable[[], object]
    ) -> None:
        """Keep a response. As in a stub, a response that cannot be sent becomes an error."""
        with self._changed:
            place = reply.batch, reply.index
            exchange = self._open[place]
            if response is not None:
                if exchange.responses and not self.is_decoupled:
                    # It is the error of a sender that was dropped.
                    steps += (exchange.responses.clear,)
                received = self._received(response, reply, exchange.cause)
                steps += (partial(exchange.responses.append, received),)
            if flags:
                ended_alone = flags == FINAL and response is None and self.is_decoupled
                steps += (
                    partial(setattr, exchange, "ended_alone", ended_alone),
                    partial(setattr, exchange, "is_final", flags == FINAL),
                    partial(setattr, exchange, "is_again", flags == AGAIN),
                    partial(self._open.__delitem__, place),
                )
            # A signal handler of the model's may raise.
            at_once(*steps)
            if flags == FINAL:
                exchange.request.executions.discard(exchange)
            if len(exchange.responses) == exchange.request.cancel_after:
                exchange.cancel()
            self._changed.notify_all()

    def _received(self, response: InferenceResponse, reply: Reply, cause: BaseException | None) -> Response:
        _, remark = self._placer.answer(response, reply.wanted, [])
        parameters, error = remark or (None, None)
        if error is not None:
            code, message = error
            return Response({}, error=TritonError(message, ErrorCode(code)), cause=cause)
        outputs = {tensor._name: copied(tensor) for tensor in self._placer.wanted(response._outputs, reply.wanted)}
        for name, reshaping in self._reshaped.items():
            if name in outputs:
                outputs[name] = outputs[name].reshape(reshaping.of(outputs[name].shape))
        unknown = [t._name for t in response._outputs if t._name not in self._names]
        return Response(outputs, parameters, unknown=unknown)

    def wait(self, exchange: Exchange, seen: int, deadline: float | None) -> bool:
        """Wait for more responses than those `seen`, or for the end. Return False if the deadline came first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: exchange.is_over or len(exchange.responses) > seen,
                None if deadline is None else max(0.0, deadline - time.monotonic()),
            )


class _Nowhere(Region):
    """Stands for the region of outputs whose place is checked, and which are not written."""

    id = size_bytes = 0
    buffer = None

    def write(self, offset: int, array: np.ndarray) -> None:
        """Do nothing, since the test's copy is made elsewhere."""

    def close(self) -> None:
        """Do nothing, since there is no memory."""


class _NoRegions(Regions):
    """Places every output in `_Nowhere`."""

    def __init__(self) -> None:
        super().__init__(_nobody)
        self._nowhere = _Nowhere()

    def allocate(
        self,
        size_bytes: int,
        device: int = NO_DEVICE,  # noqa: ARG002 - as Regions has it
        taken: list[Block] | None = None,
    ) -> Block:
        block = Block(self._nowhere, 0, size_bytes)
        if taken is not None:
            taken.append(block)
        return block

    def take_back(self, blocks: Iterable[Block]) -> None:
        """Do nothing, since no block holds memory."""


_INSTANCE = "here"
_DAY_US = 24 * 3600 * 1_000_000


class Sequences:
    """A sequence batcher for the one instance of a test: its rules and its inputs, without its delays.

    One thread at a time may use it.
    """

    def __init__(self, config: ModelConfig, batching: SequenceBatching, states: SequenceStates | None) -> None:
        at_once = replace(
            batching, max_idle_us=_DAY_US, max_queue_delay_us=0, minimum_slot_utilization=0.0, preferred_batch_sizes=()
        )
        self._slots = batching.slots
        self._model = config.name
        self._controls = SequenceControls(config, batching.controls, states)
        initial = None if states is None else states.initial
        self._sequencer: Sequencer[CheckedRequest, str] = Sequencer(
            at_once, config.max_batch_size, config.name, initial
        )
        self._sequencer.join(_INSTANCE, time.monotonic_ns())

    @property
    def has_open(self) -> bool:
        """True while a sequence has not ended."""
        return self._sequencer.has_sequences

    def run(self, requests: Sequence[CheckedRequest], execute: Callable[[list[CheckedRequest]], list[bool]]) -> None:
        """Pass the requests to `execute` in batches, until each has had its last response.

        `execute` returns True for each request of the batch that comes again; requests that fill empty places are part
        of the batch. Raises `InvalidRequest` if the rules of sequences are broken, or if a sequence would have to wait
        for another one.
        """
        try:
            for request in requests:
                self._controls.check(request.correlation_id)
                self._sequencer.add(request, time.monotonic_ns())
            while len(self._sequencer):
                self._execute(execute)
        except BaseException:
            for request in requests:
                self._sequencer.remove(request, time.monotonic_ns())
            raise

    def _execute(self, execute: Callable[[list[CheckedRequest]], list[bool]]) -> None:
        formation = self._sequencer.form(time.monotonic_ns(), [_INSTANCE])
        if not formation.batches:
            raise InvalidRequest(
                f"an instance of model '{self._model}' has {self._slots} sequences at a time, and so many "
                "are open: a runtime would wait until one of them has ended"
            )
        ((_, places),) = formation.batches
        batch = self._controls.complete(places, self._sequencer.state_of)
        again = [False] * len(batch)
        try:
            again = execute(batch)
        finally:
            for request, comes_again in zip(batch, again, strict=True):
                if request.states is not None:
                    last = request.states.new or request.states.before
                    self._sequencer.keep(request, last)
                if comes_again and not request.fills_place:
                    self._sequencer.again(request, time.monotonic_ns())
                else:
                    self._sequencer.done(request, time.monotonic_ns())


_log = logging.getLogger("moonpool.stub")
# Seconds for coroutines to end when the model is closed.
_PATIENCE_S = 5.0
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class InProcessModel(LoadedModel):
    """A model that runs on the caller's thread. Its coroutines run on a thread of their own, as in a stub."""

    def __init__(
        self,
        description: Description,
        definition: Definition | None,
        host: RecordingHost,
        timeout_s: float | None,
        *,
        backend_dir: str,
        checks_outputs: bool,
    ) -> None:
        """Use `definition` as it is; without it, import the class from the file of the description."""
        super().__init__(description.config, description.version)
        self.host = host
        self._timeout_s = timeout_s
        self._checks_outputs = checks_outputs
        self._is_closed = self._is_asleep = False
        self._environment = description.options.execution_env_path
        # An instance executes one batch at a time. A model that calls itself would reach another instance.
        self._executing = threading.RLock()
        self._batches = 0
        source = description.source
        folder = str(source.version_directory)
        folders = [str(source.model_directory), folder, str(source.file.parent)]
        self._surroundings = Surroundings(folder, folders, host, self._to_log)
        group = description.config.instance_groups[0]
        name, kind = f"{group.name}_0", group.kind
        host.asker, host.instance = description, name
        log = LogSettings()
        try:
            with self._calling():
                start = start_of(description, name, kind, 0, "complete", backend_dir=backend_dir, log=log)
                found = definition or import_class(start)
                answer = json.loads(Model(start, found).complete())
                self.config = description.config = completed(description, answer)
                start = start_of(description, name, kind, 0, "serve", backend_dir=backend_dir, log=log)
                self._model = Model(start, found)
                self._model.initialize()
        except BaseException:
            self._surroundings.close()
            raise
        self._args: dict[str, str] = start["args"]
        self._input_names: list[str] = start["inputs"]
        self._signature = Signature(self.config, is_native=source.is_native)
        self._queue = RequestQueue(self.config)
        batching = self.config.sequence_batching
        self._output_names: list[str] = start["outputs"]
        self._states = SequenceStates.of(description)
        self._sequences = None if batching is None else Sequences(self.config, batching, self._states)
        self._collector = Collector(start, self.config)
        self._coroutines = Coroutines(start["concurrent_batches"])
        host.is_serving = True
        self._also_close: Callable[[], None] = lambda: None

    @property
    def instance(self) -> Any:
        """The object of the model's class."""
        found = self._model._object
        return found._object if isinstance(found, NativeAdapter) else found

    @property
    def args(self) -> dict[str, str]:
        """The arguments that `initialize` got."""
        return dict(self._args)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Run the model's code inside, in its surroundings. Raises `LoadFailed` for `LoadError`."""
        try:
            with self._surroundings.active():
                yield
        except LoadError as error:
            cause = error.__cause__
            if isinstance(cause, (KeyboardInterrupt, BdbQuit)):
                raise cause from None
            text = str(error)
            if isinstance(cause, ModuleNotFoundError) and self._environment:
                text += (
                    f"\n\nThe environment {self._environment} is the model's in a stub only: use "
                    "testing.load_in_stub, or install here what the model imports.\n"
                )
            raise LoadFailed(text, stage=error.stage, traceback=error.traceback) from cause

    def _to_log(self, level: int, message: str, file: str, line: int) -> None:
        where = f" ({os.path.basename(file)}:{line})"
        _log.log(_LEVELS[level], "[%s] %s%s", self.config.name, message, where)

    # Requests

    def _batch(self, requests: Sequence[Request]) -> list[list[Response]]:
        exchanges, checked = self._begin(requests)
        deadline = self._deadline()
        for exchange, request in zip(exchanges, checked, strict=True):
            for _ in self._each(exchange, request, deadline):
                pass
        return [exchange.responses for exchange in exchanges]

    def _send(self, request: Request) -> Generator[Response, None, bool]:
        (exchange,), (checked,) = self._begin([request])
        return self._responses(exchange, checked)

    def _responses(self, exchange: Exchange, checked: CheckedRequest) -> Generator[Response, None, bool]:
        try:
            yield from self._each(exchange, checked, self._deadline())
            return exchange.ended_alone
        finally:
            if not exchange.is_over:
                exchange.cancel()

    def _tell_cancelled(self, request: Request) -> None:
        request.cancel()

    def _deadline(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _begin(self, requests: Sequence[Request]) -> tuple[list[Exchange], list[CheckedRequest]]:
        """Check a batch, and let the model execute it."""
        if self._is_closed:
            raise InvalidRequest(f"model '{self.name}' is closed")
        checked = [self._checked(request) for request in requests]
        rows = sum(request.batch_size for request in checked)
        if rows > self.config.max_batch_size > 0:
            raise InvalidRequest(
                f"no runtime would make this batch: it has {rows} rows, and the max_batch_size of "
                f"model '{self.name}' is {self.config.max_batch_size}"
            )
        # Nothing waits here. But a request that would reach another process too late is rejected everywhere.
        if any(self._queue.is_late(request) for request in checked):
            raise QueueTimeout
        self.wake()
        exchanges = [Exchange(request) for request in requests]
        if self._sequences is None:
            self._execute(exchanges, checked)
        else:
            with self._executing:
                of_request = {id(r): e for r, e in zip(checked, exchanges, strict=True)}
                self._sequences.run(checked, partial(self._execute_to_end, of_request))
        return exchanges, checked

    def _execute_to_end(self, of_request: Mapping[int, Exchange], batch: Sequence[CheckedRequest]) -> list[bool]:
        """Call `execute` for a batch of sequences and wait for its end; return True for each request that comes
        again.
        """
        deadline = self._deadline()
        # Nobody waits for a request that fills an empty place.
        exchanges = [of_request.get(id(request)) or Exchange(Request({})) for request in batch]
        self._execute(exchanges, batch)
        for exchange in exchanges:
            while not exchange.is_over:
                self._wait(exchange, len(exchange.responses), deadline)
        for exchange, request in zip(exchanges, batch, strict=True):
            self._take_states(exchange, request)
        return [exchange.is_again for exchange in exchanges]

    def _take_states(self, exchange: Exchange, request: CheckedRequest) -> None:
        """Take the next states of a sequence out of the responses to a request, as the runtime would."""
        if self._states is None:
            return
        for response in exchange.responses:
            accepted = self._states.accept(request, Outputs(response.outputs))
            if isinstance(accepted, MoonpoolError):
                response.error = TritonError(str(accepted), ErrorCode(CODES.index(accepted.code)))
                response.outputs = {}

    def _wait(self, exchange: Exchange, seen: int, deadline: float | None) -> None:
        if not self._collector.wait(exchange, seen, deadline):
            exchange.cancel()
            raise RequestTimedOut(
                f"model '{self.name}' sent {len(exchange.responses)} responses to a request, and no "
                f"last one, in {self._timeout_s:g} s"
            )

    def _each(self, exchange: Exchange, request: CheckedRequest, deadline: float | None) -> Iterator[Response]:
        """Yield the responses to a request that was executed, as they come."""
        seen = 0
        rows = None if self.config.decoupled else request.batch_size
        while not (exchange.is_final and seen == len(exchange.responses)):
            self._wait(exchange, seen, deadline)
            for response in exchange.responses[seen:]:
                seen += 1
                if self._checks_outputs:
                    check_outputs(response, self.config, rows)
                yield response

    def _checked(self, request: Request) -> CheckedRequest:
        """Check a request as the runtime would. Raises `InvalidRequest`."""
        details = details_of(
            request.request_id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.priority,
            request.parameters,
            request.trace_context,
        )
        return self._signature.request(request.inputs, request.outputs, details)

    def _execute(self, exchanges: Sequence[Exchange], checked: Sequence[CheckedRequest]) -> None:
        """Call the model's `execute` once."""
        with self._executing:
            self._batches += 1
            self._collector.expect(self._batches, exchanges)
            requests = []
            for index, (exchange, request) in enumerate(zip(exchanges, checked, strict=True)):
                requests.append(self._for_model(request, index))
                exchange.hand_over(requests[-1])
            try:
                with self._calling():
                    returned = self._model.execute(requests)
                    if type(returned) is CoroutineType:
                        for each in requests:
                            each.reply().leave_open()
                        ended = partial(self._ended, requests[:], exchanges)
                        self._coroutines.start(returned, ended)
                    else:
                        self._answer(requests, self._model.responses(returned, requests))
            except (KeyboardInterrupt, BdbQuit):
                raise  # the user ends the test, not the model
            except BaseException as error:  # a model may raise anything, SystemExit included
                self._fail(requests, exchanges, error)

    def _for_model(self, request: CheckedRequest, index: int) -> InferenceRequest:
        """Make the request as a stub gives it to the model, with inputs in memory of its own."""
        names = self._input_names
        tensors = []
        for placement, tensor in zip(request.inputs, request.shapes.tensors, strict=True):
            array = np.array(placement.data, order="C")
            shape = tuple(tensor.shape)
            array = array.reshape(-1).view(np.uint8) if tensor.datatype >= BYTES else array.reshape(shape)
            tensors.append(Tensor.from_wire(names[tensor.number], tensor.datatype, shape, array))
        outputs = self._output_names
        details = request.details or Details()
        if details.outputs is not None:
            outputs = [outputs[number] for number in details.outputs]
        origin = (self._collector, self._batches, index)
        made = InferenceRequest.from_wire(details, outputs, tensors, origin)
        if details.trace is not None:
            made._trace = InferenceTrace(details.trace)
        return made

    def _answer(self, requests: Sequence[InferenceRequest], responses: Sequence[InferenceResponse | None]) -> None:
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                request.reply().finish(response)
            elif request._release_flags == RELEASE_RESCHEDULE:
                request.reply().reschedule()
            else:
                request.reply().leave_open()

    def _ended(
        self,
        requests: list[InferenceRequest],
        exchanges: Sequence[Exchange],
        returned: object,
        error: BaseException | None,
    ) -> None:
        """Answer a batch whose coroutine has ended. Runs on the thread of the coroutines."""
        try:
            if error is not None:
                raise error
            self._answer(requests, self._model.responses(returned, requests))
        except BaseException as raised:
            self._fail(requests, exchanges, raised)

    def _fail(self, requests: Sequence[InferenceRequest], exchanges: Sequence[Exchange], error: BaseException) -> None:
        """End every open request of the batch with the error."""
        message = self._model.failure(describe(error))
        if any(request.reply().is_answered for request in requests):  # those answers stand
            _log.error("[%s] %s", self.config.name, message, exc_info=error)
        for request, exchange in zip(requests, exchanges, strict=True):
            exchange.cause = error
            request.reply().fail(message)

    def why_not_ready(self) -> str | None:
        readiness = Readiness(self.host.instance, _nobody, self._coroutines.wait_for)
        readiness.check = self._model.is_ready
        with self._calling():
            return readiness.why_not()

    def sleep(self) -> None:
        if not self._model.can_sleep:
            super().sleep()
        with self._executing:
            if self._collector.has_open or (self._sequences is not None and self._sequences.has_open):
                raise InvalidRequest(f"model '{self.name}' does not sleep while it has requests or sequences")
            if not self._is_asleep:
                self._call_hook(self._model.sleep)
                self._is_asleep = True

    def wake(self) -> None:
        with self._executing:
            if self._is_asleep:
                self._is_asleep = False
                self._call_hook(self._model.wake)

    def _call_hook(self, hook: Callable[[], object]) -> None:
        with self._calling():
            returned = hook()
            if isinstance(returned, CoroutineType):
                self._coroutines.wait_for(returned)

    def on_close(self, also: Callable[[], None]) -> None:
        """Call `also` after this model was finalized."""
        self._also_close = also

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.host.is_serving = False
        self._coroutines.close(_PATIENCE_S)
        try:
            with self._calling():
                failure = self._model.finalize()
                if failure is not None:
                    raise failure
        finally:
            self._surroundings.close()
            self._also_close()


def _nobody(*_: object) -> None:
    """Do nothing, since no runtime is there."""
