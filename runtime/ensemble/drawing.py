"""Shows the steps of an ensemble to people: as facts for a table, and drawn as lines of text."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.runtime.model.config.ensembles import EnsembleScheduling, EnsembleStep


class ShownStep(NamedTuple):
    """A step in the order in which they can run.

    The tensors are texts: `ensemble tensor → input`, or one name if both are the same.
    """

    number: int
    model: str
    version: int | None
    after: tuple[int, ...]
    """The numbers of the steps that it waits for."""
    inputs: str
    outputs: str

    @property
    def called(self) -> str:
        """The name of the model, with the version if the ensemble names one."""
        return self.model if self.version is None else f"{self.model}:{self.version}"


def shown_steps(scheduling: EnsembleScheduling) -> list[ShownStep]:
    """Return the steps in the order in which they can run."""
    order = _in_order(scheduling)
    numbers = {id(step): number for number, step in enumerate(order, 1)}
    writers = {tensor: numbers[id(step)] for step in scheduling.steps for _, tensor in step.outputs}
    return [
        ShownStep(
            number,
            step.model,
            step.version,
            tuple(sorted({writers[tensor] for _, tensor in step.inputs if tensor in writers})),
            ", ".join(_pair(tensor, port) for port, tensor in step.inputs),
            ", ".join(_pair(port, tensor) for port, tensor in step.outputs),
        )
        for number, step in enumerate(order, 1)
    ]


def drawn(scheduling: EnsembleScheduling) -> list[str]:
    """Return one line for each step, which begins with the steps that it waits for, as `1+2 → 3`."""
    steps = shown_steps(scheduling)
    width = max(len(step.called) for step in steps)
    lines = []
    for step in steps:
        waits = f"{'+'.join(map(str, step.after))} → " if step.after else ""
        lines.append(f"{waits}{step.number}  {step.called:{width}}  [{step.inputs}] → [{step.outputs}]")
    lefts = [line.index("  ") for line in lines]
    return [" " * (max(lefts) - left) + line for left, line in zip(lefts, lines, strict=True)]


def _pair(left: str, right: str) -> str:
    return left if left == right else f"{left} → {right}"


def _in_order(scheduling: EnsembleScheduling) -> list[EnsembleStep]:
    """Return the steps so that each one comes after those whose tensors it reads, and else as they are configured."""
    left = list(scheduling.steps)
    order: list[EnsembleStep] = []
    while left:
        unwritten = {tensor for step in left for _, tensor in step.outputs}
        ready = [step for step in left if not unwritten.intersection(t for _, t in step.inputs)]
        order += ready
        left = [step for step in left if step not in ready]
    return order
