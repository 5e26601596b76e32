"""Hosts a model in a stub: asks the runtime for whatever the model asks for."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from moonpool.ipc.arena import Block
from moonpool.ipc.errors import CODES, BadTensor, MoonpoolError
from moonpool.ipc.extension import load_if_there
from moonpool.ipc.messages import (
    ANY_MEMORY,
    LONG,
    MAX_DEVICES,
    MAX_METRIC_PARTS,
    MAX_PARAMETERS,
    MAX_TENSORS,
    NO_DETAILS,
    SHORT,
    Kind,
    size_of,
)
from moonpool.ipc.signals import at_once
from moonpool.stub import attributes, threads
from moonpool.stub.hosts.call_tensors import Placed, read_outputs
from moonpool.stub.hosts.calls import Call, Calls
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError, TritonModelException
from moonpool.stub.pb_utils.host import ONLY_IN_EXECUTE, Host
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import Answer, InferenceResponse, ResponseIterator
from moonpool.stub.peers.control import Control
from moonpool.stub.peers.regions import Regions

if TYPE_CHECKING:
    import asyncio

_INFER = int(Kind.INFER)
_EMPTY = ("", 0, 0, None, None, ANY_MEMORY, 0)


class StubHost(Host):
    """Asks the runtime on the calls channel. Any thread may call any method."""

    def __init__(
        self, calls: Calls, regions: Regions, control: Control, instance: str, *, is_compiled: bool = False
    ) -> None:
        """`is_compiled`: usual requests go the way of `_stub_calls.pyx`, if this process has it."""
        self._calls = calls
        self._regions = regions
        self._control = control
        self._metric_changes = control.metric_changes
        self._instance = instance
        # True from the end of `initialize` to `finalize`: the model may ask other models.
        self.serves = False
        self._ask: Callable[[InferenceRequest, list[Call]], Any] | None = None
        if is_compiled and attributes.compiled is not None:
            self._ask = self._compiled()

    def _compiled(self) -> Callable[[InferenceRequest, list[Call]], Any] | None:
        """Return the compiled form of `infer`, None if there is none."""
        extension = load_if_there("moonpool.stub.peers._stub_calls")
        if extension is None:
            return None
        sent = Call(0, None)
        sent.is_sent = True
        # With nothing but inputs.
        usual = InferenceRequest.from_wire(NO_DETAILS, [], [])
        calls, end = self._calls, threads.end_process
        asker = extension.Asker(self, calls, self._regions, sent, usual, end)
        return asker.infer  # type: ignore[no-any-return]

    def ask(self, kind: Kind, *fields: Any) -> dict[str, Any]:
        """Ask the runtime for anything but inference, and wait. Raises TritonModelException with the reason of a
        refusal.
        """
        call = self._calls.open()
        try:
            self._calls.begin(call, int(kind), *fields)
        except MoonpoolError as error:
            raise TritonModelException(str(error)) from error
        self._calls.wait(call)
        _, _, failure, values, _ = call.inbox.popleft()
        if failure is not None:
            raise TritonModelException(self.failure(failure[1]))
        answer: dict[str, Any] = values
        return answer

    def tell(self, kind: Kind, *fields: Any) -> None:
        """Tell the runtime something, on the control channel; does not wait for it."""
        self._control.send(int(kind), *fields)

    # Requests to other models

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer:
        if self._ask is not None and not decoupled:
            answer = self._asked(self._ask, request)
            if answer is not NotImplemented:
                return answer  # type: ignore[no-any-return]
        self._check(request)
        call = self._calls.open(request)
        try:
            failed = self._send(call, request, decoupled)
            if decoupled:
                return self._iterator(call, failed)
            if failed is not None:
                return failed
            self._calls.wait(call)
            return self._response(call)
        except BaseException:  # a signal handler of the model's may raise
            self._calls.abandon(call)
            raise

    def _asked(self, ask: Callable[[InferenceRequest, list[Call]], Any], request: InferenceRequest) -> Any:
        """Return the response to a usual request, or NotImplemented for any other, which the compiled form leaves
        alone.
        """
        # The form adds the call if it has queued INFER, or has sent it, and cannot wait for the reply itself.
        left: list[Call] = []
        try:
            answer = ask(request, left)
            if not left:
                return answer
            self._calls.flush()
            self._calls.wait(left[0])
            return self._response(left[0])
        except BaseException:  # a signal handler of the model's may raise
            for call in left:
                self._calls.abandon(call)
            raise

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Answer]:
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._check(request)
        waiting: list[Call] = []
        call = self._calls.open(request, partial(self._notify, loop, future, waiting, decoupled))
        waiting.append(call)
        try:
            failed = self._send(call, request, decoupled)
        except BaseException:  # a signal handler of the model's may raise
            self._calls.abandon(call)
            raise
        if failed is not None:
            future.set_result(self._iterator(call, failed) if decoupled else failed)
        else:
            future.add_done_callback(partial(self._ended, call))
        return future

    def _ended(self, call: Call, future: asyncio.Future[Answer]) -> None:
        if future.cancelled():
            self._calls.abandon(call)

    def _notify(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Answer], waiting: list[Call], decoupled: bool
    ) -> None:
        try:
            loop.call_soon_threadsafe(self._resolve, future, waiting[0], decoupled)
        except RuntimeError:  # the loop is closed, and nobody waits there
            self._calls.abandon(waiting[0])

    def _resolve(self, future: asyncio.Future[Answer], call: Call, decoupled: bool) -> None:
        if future.done():
            self._calls.abandon(call)
        elif decoupled:  # the first response is in the inbox
            future.set_result(self._iterator(call, None))
        else:
            future.set_result(self._response(call))

    def _check(self, request: InferenceRequest) -> None:
        if not self.serves:
            raise TritonModelException(ONLY_IN_EXECUTE)
        if request._origin is not None:
            raise TritonModelException(
                "a request that the model was given names no model: make one with "
                "pb_utils.InferenceRequest(model_name=...) and its inputs"
            )

    def _send(self, call: Call, request: InferenceRequest, decoupled: bool) -> InferenceResponse | None:
        """Send a request. If it cannot be sent, returns a response with the error."""
        released: list[Any] = []
        ours: list[Block] = []
        try:
            self._calls.take_released(released)
            _check_fields(request)
            placed = Placed(self._regions, request._inputs, ours)
            details = _details(request)
            self._regions.publish()
            self._calls.begin(
                call,
                _INFER,
                request._model_name,
                request._model_version,
                decoupled,
                request._details.timeout_us,
                released,
                placed.blocks,
                placed.rows,
                request._requested_output_names,
                details,
            )
        except MoonpoolError as error:
            self._not_sent(released, ours)
            text = f"Model {request._model_name} - Error when running inference: {error}"
            return InferenceResponse(error=TritonError(text, ErrorCode(CODES.index(error.code))))
        except BaseException:  # a signal handler of the model's may raise
            if not call.is_sent:
                self._not_sent(released, ours)
            raise
        return None

    def _not_sent(self, released: list[Any], ours: list[Block]) -> None:
        """Give back what was taken for INFER."""
        self._calls.released.extend(released)
        if ours:
            self._regions.take_back(ours)

    def _response(
        self, call: Call, *steps: Callable[[], object], seen: list[InferenceResponse] | None = None
    ) -> InferenceResponse:
        """Take the next answer to a call.

        `seen` gets the response, and further steps, functions of C, are taken, at once with that.
        """
        inbox = call.inbox
        _, _, _, _, blocks, rows, parameters, failure, _ = inbox[0]
        error = None
        if failure is not None:
            error = TritonError(failure[1], ErrorCode(failure[0]))
        outputs, owning = read_outputs(blocks, rows, self._regions, self._calls.give_back)
        response = InferenceResponse.from_wire(outputs, error, parameters)
        if seen is not None:
            steps += (partial(seen.append, response),)
        at_once(inbox.popleft, *owning, *steps)
        return response

    def _iterator(self, call: Call, failed: InferenceResponse | None) -> ResponseIterator:
        if failed is not None:
            only = iter([failed])
            return ResponseIterator.over(lambda seen: seen.extend(itertools.islice(only, 1)), _nothing)
        calls = self._calls
        # A destructor may abandon the iterator.
        call.prepare()
        is_over: deque[bool] = deque([False], maxlen=1)

        def receive(seen: list[InferenceResponse]) -> None:
            if not is_over[0]:
                is_last = calls.wait(call)[2]
                self._response(call, partial(is_over.append, is_last), seen=seen)

        return ResponseIterator.over(receive, partial(calls.cancel, call), partial(calls.abandon, call))

    # Other models themselves

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        rows = None if files is None else [[path, bytes(files[path])] for path in files]
        with _prefixed("Failed to load model: "):
            self.ask(Kind.LOAD_MODEL, name, config, rows)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        with _prefixed("Failed to unload model: "):
            self.ask(Kind.UNLOAD_MODEL, name, unload_dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        with _prefixed("Failed to check model readiness: "):
            return bool(self.ask(Kind.IS_MODEL_READY, name, version)["ready"])

    # Metrics

    def new_metric(
        self, name: str, description: str, kind: int, labels: Mapping[str, str] | None, buckets: Sequence[float] | None
    ) -> int:
        rows = None if labels is None else list(labels.items())
        texts = [name, description, *itertools.chain.from_iterable(rows or ())]
        if max(len(texts), len(buckets or ()), sum(map(len, texts))) > MAX_METRIC_PARTS:
            raise TritonModelException(self.failure("the texts, labels or buckets of a metric are too many"))
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            why = f"the texts of a metric must have a UTF-8 form: {error}"
            raise TritonModelException(self.failure(why)) from error
        self._metric_changes.start()
        number: int = self.ask(Kind.NEW_METRIC, name, description, kind, rows, buckets)["metric"]
        return number

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self._metric_changes.add(metric, operation, value)

    def metric_value(self, metric: int) -> float:
        self._metric_changes.flush()
        value: float = self.ask(Kind.METRIC_VALUE, metric)["value"]
        return value

    def drop_metric(self, metric: int) -> None:
        self._metric_changes.drop(metric)

    def failure(self, why: str) -> str:
        return f"Failed to process the request for model '{self._instance}', message: {why}"


@contextlib.contextmanager
def _prefixed(words: str) -> Iterator[None]:
    try:
        yield
    except TritonModelException as error:
        raise TritonModelException(f"{words}{error}") from error


def _check_fields(request: InferenceRequest) -> None:
    """Raise `BadTensor` for fields that the constructor accepts and no message can hold."""
    details = request._details
    correlation_id, parameters = details.correlation_id, details.parameters
    names = request._requested_output_names
    # The only field that the constructor does not check.
    trace: object = request._trace._context
    wish = request._preferred_memory
    if size_of(request._model_name) > LONG:
        raise _cannot_be("model_name", request._model_name)
    if request._model_version < -1:
        raise _cannot_be("model_version", request._model_version)
    if size_of(details.request_id) > LONG:
        raise _cannot_be("request_id", details.request_id)
    if isinstance(correlation_id, str) and size_of(correlation_id) > SHORT:
        raise _cannot_be("correlation_id", correlation_id)
    if trace is not None and not (isinstance(trace, str) and size_of(trace) <= SHORT):
        raise _cannot_be("trace", trace)
    if wish is not None and not 0 <= wish.as_sent()[1] < MAX_DEVICES:
        raise _cannot_be("device of the preferred_memory", wish.as_sent()[1])
    if parameters and len(parameters) > MAX_PARAMETERS:
        raise _too_many("parameters", len(parameters), MAX_PARAMETERS)
    if len(request._inputs) > MAX_TENSORS:
        raise _too_many("inputs", len(request._inputs), MAX_TENSORS)
    if len(names) > MAX_TENSORS:
        raise _too_many("requested outputs", len(names), MAX_TENSORS)
    for name in names:
        if size_of(name) > LONG:
            raise _cannot_be("name of a requested output", name)


def _cannot_be(name: str, value: object) -> BadTensor:
    return BadTensor(f"the {name} of the request cannot be {value!r:.60}")


def _too_many(what: str, count: int, most: int) -> BadTensor:
    return BadTensor(f"the request has {count} {what}, and {most} is the most")


def _wish(request: InferenceRequest) -> tuple[int, int]:
    """Return the fields of INFER that say where the request wants its outputs."""
    wish = request._preferred_memory
    return (ANY_MEMORY, 0) if wish is None else wish.as_sent()


def _details(request: InferenceRequest) -> tuple[object, ...] | None:
    details = (
        request._details.request_id,
        request._details.correlation_id,
        request._details.flags,
        request._details.parameters or None,
        request._trace._context,
        *_wish(request),
    )
    return None if details == _EMPTY else details


def _nothing() -> None:
    """Cancel or undo nothing: nothing was sent."""
