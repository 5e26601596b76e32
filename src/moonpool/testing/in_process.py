"""A model in the process of the test: for debuggers, and for looking at its object."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from bdb import BdbQuit
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import BYTES
from moonpool.runtime.batcher import QueueTimeout
from moonpool.runtime.details import details_of
from moonpool.runtime.errors import InvalidRequest, LoadFailed, RequestTimedOut
from moonpool.runtime.log_settings import LogSettings
from moonpool.runtime.request import Details
from moonpool.runtime.signature import Signature
from moonpool.runtime.start import completed, start_of
from moonpool.runtime.waiting_room import WaitingRoom
from moonpool.stub.coroutines import Coroutines
from moonpool.stub.execute import RELEASE_RESCHEDULE
from moonpool.stub.loader import LoadError
from moonpool.stub.model import Model, import_class
from moonpool.stub.native import NativeAdapter
from moonpool.stub.readiness import Readiness
from moonpool.stub.report import describe
from moonpool.stub.request import InferenceRequest, InferenceTrace
from moonpool.stub.tensor import Tensor
from moonpool.testing.collector import Collector, Exchange
from moonpool.testing.host import RecordingHost
from moonpool.testing.model import LoadedModel
from moonpool.testing.outputs import check_outputs
from moonpool.testing.request import Request
from moonpool.testing.sequences import Sequences
from moonpool.testing.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from moonpool.runtime.backend import Model as Description
    from moonpool.runtime.request import InferenceRequest as CheckedRequest
    from moonpool.stub.response import InferenceResponse
    from moonpool.testing.response import Response

_log = logging.getLogger("moonpool.stub")
# For coroutines to end when the model is closed.
_PATIENCE_S = 5.0
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class InProcessModel(LoadedModel):
    """Calls the model on the thread of the caller, but for coroutines, which run on a thread as in a stub."""

    def __init__(
        self,
        description: Description,
        model_class: type | None,
        host: RecordingHost,
        timeout_s: float | None,
        *,
        backend_dir: str,
        checks_outputs: bool,
    ) -> None:
        """`model_class` is used as it is; without it, that of the description's file is imported."""
        super().__init__(description.config, description.version)
        self.host = host
        self._timeout_s = timeout_s
        self._checks_outputs = checks_outputs
        self._is_closed = False
        self._environment = description.options.execution_env_path
        # An instance executes one batch at a time. A model may call itself, which is another instance then.
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
                start = start_of(
                    description, name, kind, 0, "complete", backend_dir=backend_dir, log=log
                )
                found = model_class or import_class(start)
                answer = json.loads(Model(start, found).complete())
                self.config = description.config = completed(description.config, answer)
                start = start_of(
                    description, name, kind, 0, "serve", backend_dir=backend_dir, log=log
                )
                self._model = Model(start, found)
                self._model.initialize()
        except BaseException:
            self._surroundings.close()
            raise
        self._args: dict[str, str] = start["args"]
        self._input_names: list[str] = start["inputs"]
        self._signature, self._room = Signature(self.config), WaitingRoom(self.config)
        batching = self.config.sequence_batching
        self._sequences = None if batching is None else Sequences(self.config, batching)
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
        """What `initialize` got."""
        return dict(self._args)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Inside, the model's code runs, in its surroundings. Raises `LoadFailed` for `LoadError`."""
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

    def _responses(
        self, exchange: Exchange, checked: CheckedRequest
    ) -> Generator[Response, None, bool]:
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
        if any(self._room.is_late(request) for request in checked):
            raise QueueTimeout
        exchanges = [Exchange(request) for request in requests]
        if self._sequences is None:
            self._execute(exchanges, checked)
        else:
            with self._executing:
                of_request = {id(r): e for r, e in zip(checked, exchanges, strict=True)}
                self._sequences.run(checked, partial(self._execute_to_end, of_request))
        return exchanges, checked

    def _execute_to_end(
        self, of_request: Mapping[int, Exchange], batch: Sequence[CheckedRequest]
    ) -> list[bool]:
        """Call `execute` for a batch of sequences and wait; says which requests are to come again."""
        deadline = self._deadline()
        # What fills an empty place, nobody waits for.
        exchanges = [of_request.get(id(request)) or Exchange(Request({})) for request in batch]
        self._execute(exchanges, batch)
        for exchange in exchanges:
            while not exchange.is_over:
                self._wait(exchange, len(exchange.responses), deadline)
        return [exchange.is_again for exchange in exchanges]

    def _wait(self, exchange: Exchange, seen: int, deadline: float | None) -> None:
        if not self._collector.wait(exchange, seen, deadline):
            exchange.cancel()
            raise RequestTimedOut(
                f"model '{self.name}' sent {len(exchange.responses)} responses to a request, and no "
                f"last one, in {self._timeout_s:g} s"
            )

    def _each(
        self, exchange: Exchange, request: CheckedRequest, deadline: float | None
    ) -> Iterator[Response]:
        """The responses to a request that was executed, as they come."""
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
        """As the runtime would take it. Raises `InvalidRequest`."""
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
                raise  # it is not the model that wants to end
            except BaseException as error:  # a model may raise anything, SystemExit included
                self._fail(requests, exchanges, error)

    def _for_model(self, request: CheckedRequest, index: int) -> InferenceRequest:
        """The request as a stub gives it to the model, with inputs in memory of its own."""
        names = self._input_names
        tensors = []
        for placement, tensor in zip(request.inputs, request.shapes.tensors, strict=True):
            array = np.array(placement.data, order="C")
            shape = tuple(tensor.shape)
            if tensor.datatype >= BYTES:
                array = array.reshape(-1).view(np.uint8)
            else:
                array = array.reshape(shape)
            tensors.append(Tensor.from_wire(names[tensor.number], tensor.datatype, shape, array))
        outputs = [tensor.name for tensor in self.config.outputs]
        details = request.details or Details()
        if details.outputs is not None:
            outputs = [outputs[number] for number in details.outputs]
        origin = (self._collector, self._batches, index)
        made = InferenceRequest.from_wire(details, outputs, tensors, origin)
        if details.trace is not None:
            made._trace = InferenceTrace(details.trace)
        return made

    def _answer(
        self, requests: Sequence[InferenceRequest], responses: Sequence[InferenceResponse | None]
    ) -> None:
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
        """On the thread of the coroutines: one of them has ended."""
        try:
            if error is not None:
                raise error
            self._answer(requests, self._model.responses(returned, requests))
        except BaseException as raised:
            self._fail(requests, exchanges, raised)

    def _fail(
        self,
        requests: Sequence[InferenceRequest],
        exchanges: Sequence[Exchange],
        error: BaseException,
    ) -> None:
        """Every request of the batch that has not ended gets the error."""
        message = self._model.failure(describe(error))
        if any(request.reply().is_answered for request in requests):  # whose answers stand
            _log.error("[%s] %s", self.config.name, message, exc_info=error)
        for request, exchange in zip(requests, exchanges, strict=True):
            exchange.cause = error
            request.reply().fail(message)

    def why_not_ready(self) -> str | None:
        readiness = Readiness(self.host.instance, _nobody, self._coroutines.wait_for)
        readiness.check = self._model.is_ready
        with self._calling():
            return readiness.why_not()

    def on_close(self, also: Callable[[], None]) -> None:
        """To be called when this model has been finalized."""
        self._also_close = also

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.host.is_serving = False
        self._coroutines.close(_PATIENCE_S)
        try:
            with self._calling():
                self._model.finalize()
        finally:
            self._surroundings.close()
            self._also_close()


def _nobody(*_: object) -> None:
    """There is no runtime to tell."""
