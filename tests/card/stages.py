"""The stages of a visit to a machine with a card, in their order, with the limit of each of their processes.

A stage has rounds, and a round has steps, which are processes side by side. The limits of all rounds together are the
time that such a machine is there for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

# All of it takes no longer, whatever hangs.
TOTAL_S = 540
# The limits are for a machine of so many processors, or more. One that has fewer gets more time for each step.
_PROCESSORS = 8


def patience() -> float:
    """Return what the limits are multiplied with on this machine, 1 or more."""
    return max(1.0, _PROCESSORS / len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Step:
    """One process, `python -m MODULE ARGUMENT…`, which is killed with all of its children at its limit."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 60


@dataclass(frozen=True)
class Stage:
    """Rounds of steps. Each step records at least one result."""

    name: str
    rounds: tuple[tuple[Step, ...], ...]

    @property
    def limit_s(self) -> float:
        """The seconds that all rounds take at most."""
        return sum(max(step.limit_s for step in each) for each in self.rounds)


def _stage(name: str, *steps: tuple[str, float]) -> Stage:
    """Return a stage whose steps, each an argument and a limit, follow one another."""
    return Stage(
        name,
        tuple(
            (Step(f"{name} {argument}".strip(), f"tests.card.{name}", tuple(argument.split()), limit_s),)
            for argument, limit_s in steps
        ),
    )


def _tests(limit_s: float, *files: str, workers: int = 1) -> tuple[Step, ...]:
    return tuple(Step(file, "tests.card.suite", (file, str(workers)), limit_s) for file in files)


# Each file runs in processes of its own, so that a broken context or a hang affects one file only. Only the last one
# fills the card.
_TESTS = Stage(
    "tests",
    (
        (
            *_tests(
                55,
                "tests/gpu/test_driver.py",
                "tests/gpu/test_lane.py",
                "tests/gpu/test_device_array.py",
                "tests/gpu/test_card_processes.py",
                "tests/gpu/test_libraries.py",
            ),
            *_tests(55, "tests/ipc/test_memory_contract.py", workers=4),
        ),
        (
            *_tests(45, "tests/gpu/test_two_processes.py"),
            *_tests(45, "tests/runtime/devices", "tests/gpu/test_card_libraries.py", workers=4),
        ),
        _tests(40, "tests/gpu/test_card_limits.py"),
    ),
)

STAGES = (
    _stage("facts", ("", 15)),
    _stage("probe", ("", 60)),
    _TESTS,
    _stage("strict", ("", 60), ("hostile", 40)),
    _stage(
        "figures",
        ("sizes", 28),
        ("forms pure", 10),
        ("torch", 22),
        ("callers", 18),
        ("pipeline", 10),
        ("strict", 11),
        ("kill", 12),
        ("sleep", 24),
    ),
    Stage(
        "breadth",
        (
            tuple(
                step
                for each in ("onnx", "torch", "torch expandable", "cupy", "cupy asynchronous", "cuda_core", "pipeline")
                for (step,) in _stage("breadth", (each, 25)).rounds
            ),
            *_stage("breadth", ("full", 25)).rounds,
        ),
    ),
    _stage("soak", ("", 30)),
    _stage("report", ("", 10)),
)


def chosen(names: Sequence[str]) -> list[Stage]:
    """Return the stages with these names, all if there are none. A file of tests stands for a stage with that file
    alone.

    The report is always the last one. Raises `ValueError` for a name that is neither.
    """
    by_name = {stage.name: stage for stage in STAGES}
    found = []
    for name in names or by_name:
        if name.startswith("tests/"):
            found.append(Stage("tests", (_tests(60, name),)))
        elif name in by_name:
            found.append(by_name[name])
        else:
            raise ValueError(f"There is no stage {name!r}; there are: {' '.join(by_name)}, or a file in tests/.")
    if found[-1] != by_name["report"]:
        found.append(by_name["report"])
    return found
