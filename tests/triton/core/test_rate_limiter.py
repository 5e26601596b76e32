"""The rate limiter: what executes at the same time, and which models do not load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
from tests.timed import TIMES
from tests.triton.answers import Answer, Failure
from tests.triton.core.conftest import Core
from tests.triton.moonpool_side import MoonpoolSide
from tests.triton.triton_side import asked

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity",
        "With the rate limiter, no more instances execute at the same time than resources allow, as in a real Triton, "
        "and the same models are refused with its texts.",
    ),
]

CONFIG = """
backend: "python" input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "T" data_type: TYPE_FP64 dims: [2] }]
instance_group [{ kind: KIND_CPU count: %d rate_limiter { resources [%s] priority: %d } }]
"""
GIVEN = ["R:1", "S:2", "d:1:0", "R:3:7", "S:5", "T:4"]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    """Both sides, with a rate limiter."""
    repository = tmp_path_factory.mktemp("rate") / "repository"
    repository.mkdir()
    folder = tmp_path_factory.mktemp("server")
    options = ["--rate-limit=execution_count", *(f"--rate-limit-resource={x}" for x in GIVEN)]
    with asked(repository, folder, options) as triton:
        moonpool = MoonpoolSide(repository, rate_limit=GIVEN)
        try:
            yield Core(repository, triton, moonpool)
        finally:
            moonpool.close()


def resource(name: str, count: int = 1, *, is_global: bool = True) -> str:
    return f'{{ name: "{name}" global: {str(is_global).lower()} count: {count} }}'


def _ask(side: MoonpoolSide, name: str) -> tuple[float, float]:
    """Return the times at which the execution of a request began and ended."""
    answer = side.infer(name, {"X": np.zeros(1, np.float32)})
    assert isinstance(answer, Answer), answer
    began, ended = np.frombuffer(cast(bytes, answer.outputs["T"].data), np.float64)
    return float(began), float(ended)


def _most_at_once(side: MoonpoolSide, names: list[str]) -> int:
    with ThreadPoolExecutor(8) as threads:
        times = sorted(threads.map(lambda name: _ask(side, name), names * 40))
    assert all(began <= later for (began, _), (later, _) in pairwise(times))
    return max(sum(b <= began < e for b, e in times) for began, _ in times)


@pytest.mark.parametrize(
    ("needs", "most"),
    [
        (resource("S"), 2),
        (resource("S", 2), 1),
        (resource("S") + "," + resource("d", is_global=False), 1),
        (resource("R"), 3),
    ],
)
def test_no_more_execute_at_once_than_resources_allow(limited: Core, needs: str, most: int) -> None:
    for name in ("a", "b"):
        limited.write(name, CONFIG % (2, needs, 0), TIMES)
    with _loaded(limited.moonpool, "a", "b"):
        assert _most_at_once(limited.moonpool, ["a", "b"]) <= most


@pytest.mark.parametrize(
    "needs",
    [
        resource("R", 4),
        resource("S", 3),
        resource("d", 2, is_global=False),
        resource("unknown"),
        resource("T") + "," + resource("T", is_global=False),
    ],
)
def test_what_could_never_execute_does_not_load(limited: Core, needs: str) -> None:
    limited.write("never", CONFIG % (1, needs, 0), TIMES)
    theirs, ours = limited.triton.load("never"), limited.moonpool.load("never")
    assert isinstance(theirs, Failure)
    assert isinstance(ours, Failure)
    text = theirs.text
    assert ours.text in text or text in ours.text
    assert "Resource" in ours.text


def test_an_instance_of_priority_3_executes_less_often_by_as_much(limited: Core) -> None:
    for name, priority in (("often", 1), ("seldom", 3)):
        limited.write(name, CONFIG % (1, resource("R", 3), priority), TIMES)
    with _loaded(limited.moonpool, "often", "seldom"):
        share = _share_of_the_second(limited.moonpool, ["often", "seldom"])

    # A quarter, as in Triton, and what it has while few requests of the other one wait.
    assert 0.1 < share < 0.45


@contextmanager
def _loaded(side: MoonpoolSide, *names: str) -> Iterator[None]:
    for name in names:
        assert side.load(name) is None
    yield
    for name in names:
        side.unload(name)


def _share_of_the_second(side: MoonpoolSide, names: list[str]) -> float:
    """Return the part of executions that the second model has while requests of both wait."""
    with ThreadPoolExecutor(32) as threads:
        asked = [(name, threads.submit(_ask, side, name)) for name in names * 60]
        began = sorted((future.result()[0], name) for name, future in asked)
    order = [name for _, name in began]
    # At the beginning there may be too few requests to choose from, and at the end one model has none left.
    last = len(order) - order[::-1].index(names[0])
    both = order[16:last]
    return both.count(names[1]) / len(both)
