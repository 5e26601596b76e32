"""A model in a stub, as it is served: a test can see what one process cannot show."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError
from moonpool.testing.model import LoadedModel
from moonpool.testing.outputs import check_outputs
from moonpool.testing.request import Request
from moonpool.testing.response import Response


class StubModel(LoadedModel):
    """A model in a stub. It sends the requests of a batch at the same time; the runtime decides which of them it joins.

    Raises `StubDied` if the stub ends, and `ExecuteTimedOut` or `RequestTimedOut` if it takes too long.
    """

    def __init__(self, runtime: Runtime, name: str, timeout_s: float | None, *, checks_outputs: bool) -> None:
        """Own `runtime`, which has loaded the model."""
        super().__init__(runtime.config(name), runtime.models()[name][-1])
        self.runtime = runtime
        self._timeout_s = timeout_s
        self._checks_outputs = checks_outputs
        self._signature = Signature(self.config)

    def _batch(self, requests: Sequence[Request]) -> list[list[Response]]:
        for request in requests:
            self._rows(request)
        self.wake()
        if len(requests) == 1:
            return [list(self._stream(requests[0]))]
        with ThreadPoolExecutor(max(1, len(requests))) as threads:
            return list(threads.map(lambda request: list(self._stream(request)), requests))

    def _send(self, request: Request) -> Generator[Response, None, bool]:
        rows = self._rows(request)
        self.wake()
        stream = self.runtime.stream(
            self.name,
            request.inputs,
            timeout_s=self._timeout_s,
            outputs=request.outputs,
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            flags=request.flags,
            priority=request.priority,
            queue_timeout_us=request.timeout_us,
            parameters=request.parameters,
            trace_context=request.trace_context,
            outputs_in="cpu",
        )
        execution = _Execution(stream)
        request.executions.add(execution)
        return self._responses(request, execution, rows)

    def _responses(self, request: Request, execution: _Execution, rows: int | None) -> Generator[Response, None, bool]:
        with execution.stream as stream:
            try:
                for count, response in enumerate(_each(stream)):
                    if count == request.cancel_after:
                        break
                    if self._checks_outputs:
                        check_outputs(response, self.config, rows)
                    yield response
            finally:
                request.executions.discard(execution)
        return self.config.decoupled  # most decoupled models send the end alone

    def _tell_cancelled(self, request: Request) -> None:
        for execution in list(request.executions):
            if isinstance(execution, _Execution):
                execution.stream._tell_cancelled()

    def _rows(self, request: Request) -> int | None:
        """Return the batch dimension that outputs must have, if any. Raises `InvalidRequest`."""
        checked = self._signature.request(request.inputs, request.outputs)
        return None if self.config.decoupled else checked.batch_size

    def why_not_ready(self) -> str | None:
        return self.runtime.why_not_ready(self.name)

    def sleep(self) -> None:
        hosted = self.runtime._models.find(self.name)
        if hosted.is_dormant:
            return
        if not hosted.supervisor.can_sleep:
            super().sleep()
        if not hosted.fall_asleep(may_stay=True):
            raise InvalidRequest(f"model '{self.name}' does not sleep while it has requests or sequences")
        self._raise_failure_of_hook()

    def wake(self) -> None:
        hosted = self.runtime._models.find(self.name)
        if hosted.model.is_asleep:
            hosted.wake()
            self._raise_failure_of_hook()

    def _raise_failure_of_hook(self) -> None:
        failure = self.runtime._models.find(self.name).hook_failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        self.runtime.close()


class _Execution:
    def __init__(self, stream: ResponseStream) -> None:
        self.stream = stream

    def cancel(self) -> None:
        self.stream.close()


def _each(stream: ResponseStream) -> Iterator[Response]:
    """Yield the responses, the model's errors among them, in memory of the test's own."""
    while True:
        try:
            response = next(stream)
        except StopIteration:
            return
        except ModelError as error:
            yield Response({}, error=TritonError(str(error), ErrorCode[error.code]))
        else:
            outputs = {name: np.array(array) for name, array in response.outputs.items()}
            yield Response(outputs, response.parameters)
