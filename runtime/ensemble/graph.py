"""The graph of an ensemble: its steps, the tensors between them, and what its members must be. Pure.

An *ensemble tensor* is written by the caller or by one step, and read by steps and by the caller. A `Flow` is the part
of the graph that one request needs: steps behind outputs that nobody asked for are not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.ipc.memo import Memo
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.config.ensembles import EnsembleScheduling, EnsembleStep, in_order
from moonpool.runtime.model.config.model import ModelConfig, TensorConfig

# Finds the configuration of a step's model.
MemberOf = Callable[[EnsembleStep], ModelConfig]


class Unfit(LoadFailed):
    """The members of an ensemble do not fit together."""

    code = "INVALID_ARG"


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The steps that a request for some outputs needs. Steps have their numbers in the configuration.

    `sink` is the number of the reader that stands for the caller, which reads the outputs.
    """

    name: str
    sink: int
    is_decoupled: bool
    # The tensors that the caller gives.
    given: Sequence[str]
    # The readers of each tensor, by its name.
    readers: Mapping[str, tuple[int, ...]]
    # For each reader: the number of tensors that it reads.
    needs: Sequence[int]
    # For each step: pairs of an input of the model and a tensor.
    inputs: Sequence[tuple[tuple[str, str], ...]]
    # For each step: pairs of an output of the model that is wanted and a tensor.
    outputs: Sequence[tuple[tuple[str, str], ...]]
    # The steps in their order if each has one tensor of the one before: number, inputs of the model and its output.
    # Else empty.
    chain: Sequence[tuple[int, tuple[str, ...], str]] = ()
    # The tensor that the last step of a chain writes.
    last: str = ""

    def feeds_caller(self, step: int) -> bool:
        """Return True if the caller gets an output of this step."""
        return any(self.sink in self.readers[tensor] for _, tensor in self.outputs[step])


class EnsembleGraph:
    """The graph of one configuration. Thread-safe."""

    def __init__(self, config: ModelConfig, scheduling: EnsembleScheduling) -> None:
        self.config = config
        self.steps = scheduling.steps
        self.most_in_flight = scheduling.max_inflight_requests
        # The step that writes a tensor. Those of the caller have none.
        self.writer = {tensor: number for number, step in enumerate(self.steps) for _, tensor in step.outputs}
        self._flows: Memo[tuple[str, ...], Flow] = Memo()

    def flow(self, outputs: Iterable[str] | None = None) -> Flow:
        """Return the flow of a request for these outputs, by default all. The names must be those of outputs."""
        wanted = tuple([tensor.name for tensor in self.config.outputs] if outputs is None else dict.fromkeys(outputs))
        return self._flows.get(wanted) or self._flows.keep(wanted, self._flow(wanted))

    def _flow(self, outputs: Sequence[str]) -> Flow:
        needed: set[int] = set()
        reached = list(outputs)
        while reached:
            number = self.writer.get(reached.pop())
            if number is not None and number not in needed:
                needed.add(number)
                reached += [tensor for _, tensor in self.steps[number].inputs]
        sink = len(self.steps)
        found: dict[str, list[int]] = {}
        needs = [0] * (sink + 1)
        for number in (*sorted(needed), sink):
            read = outputs if number == sink else (tensor for _, tensor in self.steps[number].inputs)
            for tensor in dict.fromkeys(read):
                found.setdefault(tensor, []).append(number)
                needs[number] += 1
        readers = {tensor: tuple(numbers) for tensor, numbers in found.items()}
        flow = Flow(
            self.config.name,
            sink,
            self.config.decoupled,
            [tensor.name for tensor in self.config.inputs if tensor.name in readers],
            readers,
            needs,
            [step.inputs for step in self.steps],
            [tuple(pair for pair in step.outputs if pair[1] in readers) for step in self.steps],
        )
        chain = _chain(flow)
        last = flow.outputs[chain[-1][0]][0][1] if chain else ""
        return dataclasses.replace(flow, chain=chain, last=last)

    def check(self, member_of: MemberOf) -> bool:
        """Check the graph against the members. Returns True if the ensemble is decoupled, as one of them is.

        Raises `Unfit` with Triton's texts.
        """
        _Inference(self.config, self.steps, member_of).check()
        is_decoupled = any(member_of(step).decoupled for step in self.steps)
        if is_decoupled:
            self._check_origins(member_of)
        return is_decoupled

    def _check_origins(self, member_of: MemberOf) -> None:
        """Check that no step, and not the caller, reads tensors of different decoupled models.

        A decoupled model gives any number of responses, so only tensors of the same one can be told to belong together.
        """
        origins: dict[str, int] = {tensor.name: -1 for tensor in self.config.inputs}
        for number in in_order(self.steps, origins):
            step = self.steps[number]
            origin = self._one_of({origins[tensor] for _, tensor in step.inputs})
            if member_of(step).decoupled:
                origin = number
            origins.update((tensor, origin) for _, tensor in step.outputs)
        self._one_of({origins[tensor.name] for tensor in self.config.outputs})

    def _one_of(self, origins: set[int]) -> int:
        if len(origins) > 1:
            name = self.config.name
            raise Unfit(
                f"in ensemble {name}, step of model '{name}' receives inputs originated from different decoupled models"
            )
        return origins.pop()


def _chain(flow: Flow) -> list[tuple[int, tuple[str, ...], str]]:
    """Return the steps of a flow in which one follows after the other, else an empty list."""
    chain: list[tuple[int, tuple[str, ...], str]] = []
    if flow.is_decoupled or len(flow.given) != 1:
        return []
    readers = flow.readers[flow.given[0]]
    while readers != (flow.sink,):
        if len(readers) != 1 or flow.needs[readers[0]] != 1 or len(flow.outputs[readers[0]]) != 1:
            return []
        (number,) = readers
        ((output, written),) = flow.outputs[number]
        chain.append((number, tuple(name for name, _ in flow.inputs[number]), output))
        readers = flow.readers[written]
    return chain if flow.needs[flow.sink] == 1 else []


class _Inferred(NamedTuple):
    """The datatype and the shape of an ensemble tensor, and the model that they are inferred from."""

    model: str
    datatype: str
    dims: tuple[int, ...]
    # With the batch dimension, if the model batches.
    full_dims: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig, tensor: TensorConfig) -> _Inferred:
        full = (-1, *tensor.dims) if config.max_batch_size else tensor.dims
        return cls(config.name, tensor.datatype, tensor.dims, full)


class _Inference:
    """Infers what each ensemble tensor is from all models that read or write it."""

    def __init__(self, config: ModelConfig, steps: Sequence[EnsembleStep], member_of: MemberOf) -> None:
        self._config, self._steps, self._member_of = config, steps, member_of
        self._known = {tensor.name: _Inferred.of(config, tensor) for tensor in (*config.inputs, *config.outputs)}

    def check(self) -> None:
        """Raise `Unfit` if two models disagree, or if a step names a tensor that its model does not have."""
        for step in self._steps:
            member = self._member_of(step)
            most, own = self._config.max_batch_size, member.max_batch_size
            if own and own < most:
                raise Unfit(
                    f"ensemble {self._config.name} allows maximum batch size {most}, but it contains model "
                    f"{member.name} which only allows maximum batch size to be {own}"
                )
            self._check_inputs(step, member)
            self._check_outputs(step, member)

    def _check_inputs(self, step: EnsembleStep, member: ModelConfig) -> None:
        where = f"in ensemble {self._config.name}, "
        inputs = {tensor.name: tensor for tensor in member.inputs}
        for name, tensor in step.inputs:
            if name not in inputs:
                raise Unfit(
                    f"{where}ensemble tensor {tensor} is mapping to non-existing input {name} in model {step.model}"
                )
        mapped = dict(step.inputs)
        for name, described in inputs.items():
            if name in mapped:
                self._meet(mapped[name], _Inferred.of(member, described))
            elif not described.optional:
                raise Unfit(f"{where}input {name} in model {member.name} is not mapped to any ensemble tensors")

    def _check_outputs(self, step: EnsembleStep, member: ModelConfig) -> None:
        outputs = {tensor.name: tensor for tensor in member.outputs}
        for name, tensor in step.outputs:
            if name not in outputs:
                raise Unfit(
                    f"in ensemble {self._config.name}, ensemble tensor {tensor} is mapped from non-existing output "
                    f"{name} in model {step.model}"
                )
            self._meet(tensor, _Inferred.of(member, outputs[name]))

    def _meet(self, tensor: str, other: _Inferred) -> None:
        known = self._known.setdefault(tensor, other)
        what = ""
        if known.datatype != other.datatype:
            what, shown = "data type", [_type(known.datatype), _type(other.datatype)]
        elif not fits(known.dims, other.dims) and not fits(known.full_dims, other.full_dims):
            what, shown = "shape", [_shown(known.dims), _shown(other.dims)]
        if what:
            raise Unfit(
                f"in ensemble {self._config.name}, ensemble tensor {tensor}: inconsistent {what}: {shown[0]} is "
                f"inferred from model {known.model} while {shown[1]} is inferred from model {other.model}"
            )


def fits(dims: Sequence[int], others: Sequence[int]) -> bool:
    """Return True if two shapes agree. -1 agrees with any size."""
    return len(dims) == len(others) and all(-1 in pair or pair[0] == pair[1] for pair in zip(dims, others, strict=True))


def _type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _shown(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
