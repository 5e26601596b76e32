"""The steps of an ensemble, as its configuration describes them: read, and checked by themselves.

What a step's model must be for the ensemble to work is checked when the models are there, in `runtime.ensemble.graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moonpool.runtime.model.config.schema import Raw
from moonpool.runtime.model.config.source import Source, part

ENSEMBLE = "ensemble"
_PATH = "ensemble_scheduling"


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step. `inputs` has pairs of an input of the model and an ensemble tensor, `outputs` of an output and a
    tensor.

    Both are sorted, as protobuf keeps no order of a map.
    """

    model: str
    version: int | None
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class EnsembleScheduling:
    """The steps in the order of the configuration. Of each, at most `max_inflight_requests` run at a time; 0 is no
    limit.
    """

    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0

    @property
    def models(self) -> list[str]:
        """The names of the models of all steps, each once."""
        return list(dict.fromkeys(step.model for step in self.steps))


def ensemble_scheduling(raw: Raw, source: Source) -> EnsembleScheduling | None:
    """Read and check the steps, None if the model is no ensemble. Raises ConfigError with Triton's texts."""
    name, scheduling = raw["name"], raw.get(_PATH)
    if raw["platform"] != ENSEMBLE:
        if scheduling is None:
            return None
        what = f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
        source.mistake(_PATH, what)
        return None
    if scheduling is None:
        what = f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
        source.mistake("platform", what)
        return EnsembleScheduling(())
    if raw["instance_group"]:
        what = f"instance group should not be specified for ensemble '{name}'"
        source.mistake("instance_group", what)
    if "optimization" in raw:
        what = f"optimization should not be specified for ensemble '{name}'"
        source.mistake("optimization", what)
    if raw["model_warmup"]:
        source.mistake("model_warmup", f"model_warmup can not be specified for ensemble '{name}'")
    if not scheduling["step"]:
        source.mistake(_PATH, f"must specify 'step' for ensemble '{name}'")
    steps = []
    for index, step in enumerate(scheduling["step"]):
        with part():
            where, path = f"in step {index} of ensemble '{name}'", f"{_PATH}.step[{index}]"
            steps.append(_step(step, where, path, source))
    if steps and len(steps) == len(scheduling["step"]):
        _Flow(raw, tuple(steps), source).check()
    return EnsembleScheduling(tuple(steps), scheduling["max_inflight_requests"])


def _step(step: Raw, where: str, path: str, source: Source) -> EnsembleStep:
    for field in ("model_name", "input_map", "output_map"):
        if not step[field]:
            raise source.error(path, f"must specify '{field}' {where}")
    if step["model_namespace"]:
        what = f"'model_namespace' {where}: moonpool has one namespace for all models"
        source.mistake(f"{path}.model_namespace", what)
    version = step["model_version"]
    return EnsembleStep(
        step["model_name"],
        None if version == -1 else version,
        tuple(sorted(step["input_map"].items())),
        tuple(sorted(step["output_map"].items())),
    )


class _Flow:
    """The flow of tensors through the steps of one configuration, from the inputs on."""

    def __init__(self, raw: Raw, steps: tuple[EnsembleStep, ...], source: Source) -> None:
        self._name, self._steps, self._source = raw["name"], steps, source
        self._inputs = [io["name"] for io in raw["input"]]
        self._outputs = [io["name"] for io in raw["output"]]
        self._read = {tensor for step in steps for _, tensor in step.inputs}
        # The step that writes a tensor.
        self._writer: dict[str, int] = {}

    def check(self) -> None:
        """Report tensors that two steps write, that nobody reads, or that never come.

        One mistake makes others of the later checks, so these are made only if the ones before have found nothing.
        """
        for problems in (self._written_twice, self._unused_ends, self._unwritten, self._unused):
            found = list(problems())
            for path, what in found:
                self._source.mistake(path, what)
            if found:
                return

    def _written_twice(self) -> Iterator[tuple[str, str]]:
        for index, step in enumerate(self._steps):
            for _, tensor in step.outputs:
                if tensor in self._writer or tensor in self._inputs:
                    what = (
                        f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{self._name}' "
                        f"step {index}"
                    )
                    yield f"{_PATH}.step[{index}].output_map", what
                self._writer[tensor] = index

    def _unused_ends(self) -> Iterator[tuple[str, str]]:
        for side, names in (("input", self._inputs), ("output", self._outputs)):
            for index, tensor in enumerate(names):
                if tensor not in self._read and tensor not in self._writer:
                    what = f"ensemble {side} '{tensor}' for ensemble {self._name}' is not used"
                    yield f"{side}[{index}]", what

    def _unwritten(self) -> Iterator[tuple[str, str]]:
        ready = self._ready()
        for index, tensor in enumerate(self._outputs):
            if tensor not in ready:
                yield f"output[{index}]", self._why_unwritten(tensor, ready)

    def _unused(self) -> Iterator[tuple[str, str]]:
        ready, used = self._ready(), self._read.union(self._outputs)
        for tensor in sorted(self._read | self._writer.keys()):
            if tensor not in ready or tensor not in used:
                yield _PATH, f"ensemble tensor '{tensor}' is unused in ensemble '{self._name}'"

    def _ready(self) -> set[str]:
        """Return the tensors that come if all inputs do."""
        ready = set(self._inputs)
        for number in in_order(self._steps, self._inputs):
            ready.update(_tensors(self._steps[number].outputs))
        return ready

    def _why_unwritten(self, output: str, ready: set[str]) -> str:
        what = f"output '{output}' for ensemble '{self._name}' is not written"
        needed = _tensors(self._steps[self._writer[output]].inputs) if output in self._writer else ()
        missing = [tensor for tensor in needed if tensor not in ready and tensor != output]
        if missing:
            what += f": at least one of its depending tensors, '{missing[0]}', is not connected"
        return what


def in_order(steps: Sequence[EnsembleStep], given: Iterable[str]) -> list[int]:
    """Return the numbers of the steps that run if these tensors are given, each behind those that write what it
    reads.
    """
    readers: dict[str, list[int]] = {}
    missing = []
    for number, step in enumerate(steps):
        read = set(_tensors(step.inputs))
        missing.append(len(read))
        for tensor in read:
            readers.setdefault(tensor, []).append(number)
    ready = set(given)
    fresh, order = list(ready), []
    while fresh:
        for number in readers.get(fresh.pop(), ()):
            missing[number] -= 1
            if not missing[number]:
                order.append(number)
                written = set(_tensors(steps[number].outputs)) - ready
                fresh += written
                ready |= written
    return order


def _tensors(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [tensor for _, tensor in pairs]
