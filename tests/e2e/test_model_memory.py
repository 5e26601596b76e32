"""Tests of the memory of inputs and outputs: what models do with it, and when it is given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError
from moonpool.runtime.hosting import supervisor
from moonpool.runtime.model import budgets

pytestmark = pytest.mark.usefixtures("undisturbed")

SQUARE: Config = {
    "input": [tensor("HOW", "STRING", 1), tensor("X", "FP32", -1, -1)],
    "output": [tensor("Y", "FP32", -1, -1), tensor("Z", "FP32", -1, -1)],
}
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def keeper(runtime: moonpool.Runtime) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_TIDY_S", 0.05)
        patch.setattr(budgets, "KEEP_FIRST_MS", 50)
        patch.setattr(budgets, "KEEP_MS", 50)
        with hosted(runtime, "keeper", MODELS / "keeper.py", SQUARE | options(REGION_BYTES="4K")):
            yield


def handle(runtime: moonpool.Runtime, how: str, x: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    return runtime.infer("keeper", {"HOW": [how], "X": x}, timeout_s=60.0)


def shared_bytes(runtime: moonpool.Runtime) -> int:
    """Return the size of all shared memory of the model's only instance."""
    record = hosted_in(runtime, "keeper").supervisor.records[0]
    return int(record.instance.state.link.size_bytes())


# The answer for X.
VIEWS: dict[str, NDArray[Any]] = {
    "same": X,
    "slice": X[1:],
    "middle": X[1:2, 1:2],
    "column": X[:, 1],
    "transpose": X.T,
    "backwards": X[::-1, ::-1],
    "flat": X.reshape(-1),
    "as integers": X.view(np.int32),
    "as bytes": X.view(np.uint8),
    "broadcast": np.broadcast_to(X[:1], X.shape),
    "nothing": X[:0],
    "of a subclass": X,
    "mutate": X + 1,
}


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("in_place", [False, True], ids=["copied in", "written in place"])
def test_a_view_of_an_input_is_a_good_output(runtime: moonpool.Runtime, how: str, in_place: bool) -> None:
    x = X.copy()
    if in_place:
        x = runtime.empty("keeper", "X", X.shape)
        x[...] = X

    y = handle(runtime, how, x)["Y"]
    others = [handle(runtime, "same", np.full((3, 4), i, np.float32))["Y"] for i in range(5)]

    assert y.dtype == VIEWS[how].dtype
    assert np.array_equal(y, VIEWS[how])
    assert [other[0, 0] for other in others] == [0, 1, 2, 3, 4]
    assert in_place or np.array_equal(x, X)


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("how", ["twice", "overlapping", "one array twice"])
def test_two_outputs_may_share_their_memory(runtime: moonpool.Runtime, how: str) -> None:
    for _ in range(3):
        outputs = handle(runtime, how, X)
        first = X + 1 if how == "one array twice" else X

        assert np.array_equal(outputs["Y"], first)
        assert np.array_equal(outputs["Z"], X[1:] if how == "overlapping" else first)


@pytest.mark.usefixtures("keeper")
def test_inputs_that_a_model_keeps_stay_what_they_were_and_are_given_back_in_the_end(runtime: moonpool.Runtime) -> None:
    ones = np.ones((100, 4), np.float32)
    size = shared_bytes(runtime)

    kept = [handle(runtime, "keep", ones * i)["Y"] for i in range(20)]
    for i in range(20):
        assert np.array_equal(handle(runtime, "same", ones * -i)["Y"], ones * -i)

    assert np.array_equal(handle(runtime, "kept", ones)["Y"], ones * sum(range(20)))
    assert np.array_equal(handle(runtime, "first kept", ones)["Y"], ones * 0)
    assert [y[0, 0] for y in kept] == [2 * i for i in range(20)]
    assert shared_bytes(runtime) > size
    handle(runtime, "forget", ones)
    kept.clear()
    for _ in range(2000):  # no more memory than before
        handle(runtime, "same", ones)
    wait_until(lambda: shared_bytes(runtime) <= size, 60.0)


@pytest.mark.usefixtures("keeper")
def test_one_tensor_given_twice_is_refused(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelError, match="output 'Y' is given twice"):
        handle(runtime, "one tensor twice", X)


@pytest.mark.promise("Requests", "Regions that were added because the first one was too small are given back.")
@pytest.mark.usefixtures("keeper")
def test_memory_grows_for_what_is_large_and_is_given_back(runtime: moonpool.Runtime) -> None:
    wait_until(lambda: shared_bytes(runtime) == 8192, 60.0)
    large = np.full((1 << 10, 1 << 11), 7, np.float32)

    first = handle(runtime, "big", large)["Y"]
    second = handle(runtime, "big", large)["Y"]
    assert shared_bytes(runtime) > 3 * 8 << 20
    del large
    assert (first == 7).all()
    assert (second == 7).all()
    del first
    assert (second == 7).all()
    del second

    wait_until(lambda: shared_bytes(runtime) == 8192, 60.0)
    assert np.array_equal(handle(runtime, "same", X)["Y"], X)
