"""Draws the steps of an ensemble as lines of text, for people."""

from __future__ import annotations

from moonpool.runtime.model.config.ensembles import EnsembleScheduling, EnsembleStep


def drawn(scheduling: EnsembleScheduling) -> list[str]:
    """Return one line for each step, in the order in which they can run.

    A line begins with the steps that the step waits for, as `1+2 → 3`, and shows tensors as `ensemble tensor → input`. A name
    that is the same on both sides stands once.
    """
    order = _in_order(scheduling)
    numbers = {id(step): number for number, step in enumerate(order, 1)}
    writers = {tensor: numbers[id(step)] for step in scheduling.steps for _, tensor in step.outputs}
    width = max(len(_called(step)) for step in order)
    lines = []
    for number, step in enumerate(order, 1):
        before = sorted({writers[tensor] for _, tensor in step.inputs if tensor in writers})
        waits = f"{'+'.join(map(str, before))} → " if before else ""
        read = ", ".join(_pair(tensor, port) for port, tensor in step.inputs)
        written = ", ".join(_pair(port, tensor) for port, tensor in step.outputs)
        lines.append(f"{waits}{number}  {_called(step):{width}}  [{read}] → [{written}]")
    lefts = [line.index("  ") for line in lines]
    return [" " * (max(lefts) - left) + line for left, line in zip(lefts, lines, strict=True)]


def _called(step: EnsembleStep) -> str:
    return step.model if step.version is None else f"{step.model}:{step.version}"


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
