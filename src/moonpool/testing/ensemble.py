"""An ensemble in the process of the test, over models that are there, too, so that a debugger stops in each of them.

The rules are those of a runtime: the same graph checks the steps and says which of them run, and the same machine says
when. But the steps run on the caller's thread, one after the other. Each response of a step goes through the steps
behind it before the next one is read, so a stream that has no end can be read from, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import decode_bytes
from moonpool.runtime.ensemble.execution import DEADLOCK, EnsembleExecution, StepCall, StepProgress
from moonpool.runtime.ensemble.graph import EnsembleGraph
from moonpool.runtime.ensemble.members import EnsembleCaller, SequencedTensor, Shaping, TensorSequence, without_sequence
from moonpool.runtime.errors import ModelError
from moonpool.runtime.hosting.ensembles import scheduling_of
from moonpool.runtime.model.config.ensembles import EnsembleStep
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest, WireTensor
from moonpool.runtime.model.signature import Signature, make_request
from moonpool.stub.pb_utils.errors import ErrorCode, TritonError
from moonpool.testing.model import LoadedModel
from moonpool.testing.outputs import check_outputs
from moonpool.testing.request import Request
from moonpool.testing.response import Response

Found = Mapping[tuple[str, int | None], LoadedModel]


class EnsembleModel(LoadedModel):
    """An ensemble whose steps run on the caller's thread. `members` are the models of its steps, by name."""

    def __init__(self, config: ModelConfig, version: int, found: Found, *, checks_outputs: bool) -> None:
        """Take the models of the steps by name and wanted version. The caller closes them.

        Raises `LoadFailed` with Triton's texts if they do not fit together.
        """
        scheduling = scheduling_of(config)

        def config_of(step: EnsembleStep) -> ModelConfig:
            return found[step.model, step.version].config

        is_decoupled = EnsembleGraph(config, scheduling).check(config_of)
        super().__init__(config.with_decoupled(is_decoupled), version)
        self.members = {step.model: found[step.model, step.version] for step in scheduling.steps}
        self._steps = [found[step.model, step.version] for step in scheduling.steps]
        self._graph = EnsembleGraph(self.config, scheduling)
        self._signature = Signature(self.config)
        self._caller = EnsembleCaller(
            self.config, self._mixed([tensor.name for tensor in config.outputs], self.config), self._graph.writer
        )
        self._shapings = [self._shaping(number) for number in range(len(self._steps))]
        self._closing: list[Callable[[], None]] = []
        self._checks_outputs = checks_outputs

    def _shaping(self, number: int) -> Shaping:
        config, pairs = self._steps[number].config, self._graph.steps[number].inputs
        mixed = self._mixed([tensor for _, tensor in pairs], config)
        ports = {port for port, tensor in pairs if tensor in mixed}
        dims = {tensor.name: tensor.dims for tensor in config.inputs}
        return Shaping(config.max_batch_size > 0, dims, ports)

    def _mixed(self, tensors: Iterable[str], reader: ModelConfig) -> set[str]:
        """Return those tensors whose writer batches while the reader does not, or the other way round."""
        return {name for name in tensors if self._batches(name) is not (reader.max_batch_size > 0)}

    def _batches(self, tensor: str) -> bool:
        writer = self._graph.writer.get(tensor)
        config = self.config if writer is None else self._steps[writer].config
        return config.max_batch_size > 0

    # Requests

    def _batch(self, requests: Sequence[Request]) -> list[list[Response]]:
        return [list(self._stream(request)) for request in requests]

    def _send(self, request: Request) -> Generator[Response, None, bool]:
        # Refused now, and not when the first response is read.
        checked = make_request(
            self._signature,
            request.inputs,
            outputs=request.outputs,
            request_id=request.request_id,
            correlation_id=request.correlation_id,
            flags=request.flags,
            parameters=request.parameters,
        )
        return self._responses(_Run(self, request, checked))

    def _responses(self, run: _Run) -> Generator[Response, None, bool]:
        request = run.request
        rows = None if self.config.decoupled else run.checked.batch_size
        request.executions.add(run)
        if request.cancel_after == 0:
            run.cancel()
        try:
            for count, response in enumerate(run.responses(), 1):
                if self._checks_outputs:
                    check_outputs(response, self.config, rows)
                yield response
                if count == request.cancel_after:
                    run.cancel()
        except MoonpoolError as error:
            yield self._failure(error.code, str(error), error.__cause__)
        finally:
            request.executions.discard(run)
        return self.config.decoupled

    def _failure(self, code: str, text: str, cause: BaseException | None) -> Response:
        error = TritonError(f"in ensemble '{self.name}', {text}", ErrorCode[code])
        return Response({}, error=error, cause=cause)

    def _tell_cancelled(self, request: Request) -> None:
        request.cancel()

    def why_not_ready(self) -> str | None:
        for name, member in self.members.items():
            reason = member.why_not_ready()
            if reason is not None:
                return f"model '{name}' of a step is not ready: {reason}"
        return None

    def on_close(self, also: Callable[[], None]) -> None:
        """Call `also` when this ensemble is closed, after what was given before."""
        self._closing.append(also)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            while self._closing:
                stack.callback(self._closing.pop())


class _Run:
    """One request to an ensemble."""

    def __init__(self, ensemble: EnsembleModel, request: Request, checked: InferenceRequest) -> None:
        self.request, self.checked = request, checked
        self._ensemble = ensemble
        wanted = request.outputs
        self._machine: EnsembleExecution[Any] = EnsembleExecution(ensemble._graph.flow(wanted))
        self._is_cancelled = False
        # The requests to models that have not ended.
        self._inside: list[Request] = []

    def cancel(self) -> None:
        """Let the models that work on it know. No further step begins."""
        self._is_cancelled = True
        for request in list(self._inside):
            request.cancel()

    def responses(self) -> Generator[Response, None, None]:
        """Run the steps. Raises the error of a model as `ModelError`, and what a model's checks raise."""
        given = self._ensemble._caller.given(self.checked)
        arrays = {name: _as_array(array) for name, array in given.items()}
        yield from self._follow(self._machine.begin(arrays))

    def _follow(self, progress: StepProgress[Any]) -> Generator[Response, None, None]:
        """Yield the responses that are there, and those of the steps that run next."""
        if progress.is_deadlock:
            raise ModelError(DEADLOCK, "INVALID_ARG")
        for tensors in progress.responses:
            made = self._ensemble._caller.response(self.checked, tensors)
            yield Response(made.outputs, made.parameters)
        for call in progress.calls:
            if not self._is_cancelled:
                yield from self._run(call)

    def _run(self, call: StepCall[Any]) -> Generator[Response, None, None]:
        number, machine = call.step, self._machine
        tensors, sequence = without_sequence(call.inputs)
        asked = self._asked(number, tensors, sequence)
        before = TensorSequence(asked.correlation_id, asked.flags)
        self._inside.append(asked)
        try:
            for response in self._ensemble._steps[number]._stream(asked):
                outputs: Mapping[str, Any] = response.check().outputs
                after = before.changed(response.parameters)
                if after != before:
                    outputs = {n: SequencedTensor(array, after) for n, array in outputs.items()}
                yield from self._follow(machine.respond(number, outputs, is_final=False))
            yield from self._follow(machine.respond(number, None, is_final=True))
        finally:
            self._inside.remove(asked)

    def _asked(self, number: int, tensors: Mapping[str, Any], sequence: TensorSequence | None) -> Request:
        """Make the request to the model of a step."""
        fitted, request = self._ensemble._shapings[number].fitted, self.request
        wanted = [output for output, _ in self._ensemble._graph.flow(request.outputs).outputs[number]]
        correlation_id, flags = sequence or (request.correlation_id, request.flags)
        return Request(
            {name: fitted(name, array) for name, array in tensors.items()},
            outputs=wanted,
            request_id=request.request_id,
            correlation_id=correlation_id,
            flags=flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
            parameters=request.parameters,
            trace_context=request.trace_context,
        )


def _as_array(array: Any) -> Any:
    if isinstance(array, WireTensor):
        return decode_bytes(array.raw.data, array.shape)
    return np.asarray(array)
