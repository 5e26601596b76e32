"""One request on its way through the steps of an ensemble: which step runs when, with which tensors. Pure.

A step runs when all tensors that it reads are there, and a model that answers once gives one of each. A decoupled model
gives any number of responses. Its nth response is *iteration* n of the tensors that it writes, and a step that reads
them runs once for each iteration. No step reads tensors of different decoupled models (`EnsembleGraph.check`), so equal
numbers belong together.

The machine does not know what a tensor is. A tensor that a response lacks, or that the caller left out, is absent,
which is None: the steps that read it run without it, and their models decide if they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from moonpool.runtime.ensemble.graph import Flow

T = TypeVar("T")

DEADLOCK = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"


class StepCall(NamedTuple, Generic[T]):
    """A request that is to be made: the number of the step, and the inputs of its model by name."""

    step: int
    inputs: dict[str, T]


class StepProgress(NamedTuple, Generic[T]):
    """The calls and responses that follow from what has happened.

    `responses` are for the caller, in order, each with the outputs that are there, by name. After `is_over` nothing
    more happens.
    """

    calls: list[StepCall[T]]
    responses: list[dict[str, T]]
    is_over: bool
    is_deadlock: bool = False


class EnsembleExecution(Generic[T]):
    """The state of one request. Not thread-safe."""

    __slots__ = ("_answer", "_collected", "_flow", "_iterations", "_running", "_weight", "_weights")

    def __init__(self, flow: Flow, weights: Sequence[int] = ()) -> None:
        """`weights` are how much a call of each step counts in `waiting_count`; 1 if there are none."""
        self._flow = flow
        self._weights = weights
        # Tensors that wait for others that the same reader needs, by reader and iteration.
        self._collected: dict[tuple[int, int], dict[str, T | None]] = {}
        # The number of responses so far, by step.
        self._iterations: dict[int, int] = {}
        # The number of calls that have not had their last response.
        self._running = 0
        self._weight = 0
        # The response of an ensemble that is not decoupled. It is given when nothing runs any more.
        self._answer: dict[str, T] | None = None

    @property
    def waiting_count(self) -> int:
        """The calls that have not ended, by their weights, and the number of those that wait for more tensors."""
        return self._weight + len(self._collected)

    def _weight_of(self, step: int) -> int:
        return self._weights[step] if self._weights else 1

    def begin(self, given: Mapping[str, T]) -> StepProgress[T]:
        """Begin with the inputs that the caller gave, by the names of their tensors. To be called first, and once."""
        calls: list[StepCall[T]] = []
        responses: list[dict[str, T]] = []
        flow = self._flow
        for tensor in flow.given:
            self._arrive(flow.readers[tensor], tensor, 0, given.get(tensor), calls, responses)
        return self._progress(calls, responses)

    def respond(self, step: int, outputs: Mapping[str, T] | None, *, is_final: bool) -> StepProgress[T]:
        """Take a response to a call of this step: outputs of its model by name, None if there is only the end.

        `is_final`: the call gives no more.
        """
        calls: list[StepCall[T]] = []
        responses: list[dict[str, T]] = []
        if outputs is not None:
            flow = self._flow
            iteration = self._iterations.get(step, 0)
            self._iterations[step] = iteration + 1
            for output, tensor in flow.outputs[step]:
                value = outputs.get(output)
                self._arrive(flow.readers[tensor], tensor, iteration, value, calls, responses)
        if is_final:
            self._running -= 1
            self._weight -= self._weight_of(step)
        return self._progress(calls, responses)

    def _arrive(
        self,
        readers: tuple[int, ...],
        tensor: str,
        iteration: int,
        value: T | None,
        calls: list[StepCall[T]],
        responses: list[dict[str, T]],
    ) -> None:
        flow = self._flow
        for reader in readers:
            needs = flow.needs[reader]
            collected: dict[str, T | None]
            if needs == 1:
                collected = {tensor: value}
            else:
                key = (reader, iteration)
                collected = self._collected.setdefault(key, {})
                collected[tensor] = value
                if len(collected) < needs:
                    continue
                # From here on only the call refers to the tensors, so their memory goes with it.
                del self._collected[key]
            if reader == flow.sink:
                responses.append({name: each for name, each in collected.items() if each is not None})
            else:
                inputs = {name: each for name, source in flow.inputs[reader] if (each := collected[source]) is not None}
                calls.append(StepCall(reader, inputs))

    def _progress(self, calls: list[StepCall[T]], responses: list[dict[str, T]]) -> StepProgress[T]:
        self._running += len(calls)
        self._weight += sum(self._weight_of(call.step) for call in calls)
        is_over = not self._running
        if self._flow.is_decoupled:
            return StepProgress(calls, responses, is_over)
        if responses:
            self._answer = responses[0]
        if not is_over:
            return StepProgress(calls, [], False)
        answer, self._answer = self._answer, None
        if answer is None:
            return StepProgress([], [], True, is_deadlock=True)
        return StepProgress([], [answer], True)
