"""Tests of the example models, as an author of models would write them: `pytest examples/test_models.py`."""

from pathlib import Path

import numpy as np
import pytest

import moonpool
from moonpool import testing

MODELS = Path(__file__).parent / "models"


@pytest.fixture(params=[testing.load, testing.load_in_stub], ids=["here", "in_stub"])
def load(request):
    """Each test that loads a model with this runs twice: in its own process, and in a stub."""
    return request.param


def test_add_sub(load):
    with load(MODELS / "add_sub") as model:
        response = model.infer(INPUT0=[[1, 2, 3, 4]], INPUT1=[[4, 3, 2, 1]])

        assert response["OUTPUT0"].tolist() == [[5, 5, 5, 5]]
        assert response["OUTPUT1"].tolist() == [[-3, -1, 1, 3]]


def test_add_sub_answers_every_request_of_a_batch(load):
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with load(MODELS / "add_sub") as model:
        responses = model.infer_batch([{"INPUT0": rows, "INPUT1": rows * n} for n in range(3)])

        for n, response in enumerate(responses):
            assert (response["OUTPUT0"] == rows * (1 + n)).all()


def test_add_sub_refuses_rows_of_another_length(load):
    refused = pytest.raises(moonpool.InvalidRequest, match="unexpected shape for input 'INPUT0'")
    with load(MODELS / "add_sub") as model, refused:
        model.infer(INPUT0=[[1, 2]], INPUT1=[[1, 2]])


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (2, 0), (3, 1), (100, 25)])
def test_primes(load, limit, count):
    with load(MODELS / "primes") as model:
        assert model.infer(LIMIT=[[limit]])["COUNT"].tolist() == [[count]]


def test_normalise_takes_rows_of_any_length(load):
    with load(MODELS / "normalise") as model:
        for length in (1, 2, 1000):
            rows = np.random.default_rng(length).normal(7, 3, (2, length)).astype(np.float32)
            result = model.infer(X=rows)["Y"]

            assert result.shape == rows.shape
            assert result.mean(axis=1) == pytest.approx([0, 0], abs=1e-5)


def test_crashes_raises_as_it_is_told(load):
    with load(MODELS / "crashes") as model:
        with pytest.raises(moonpool.ModelError, match="ValueError: as you wish"):
            model.infer(WISH=[["raise"]])
        assert model.infer(WISH=[["hello"]])["ANSWER"].tolist() == [[b"alive: hello"]]


def test_crashes_comes_back():
    # A process that dies can only be one that is not the test's own.
    with testing.load_in_stub(MODELS / "crashes") as model:
        with pytest.raises(moonpool.StubDied):
            model.infer(WISH=[["exit"]])
        assert model.infer(WISH=[["hello"]])["ANSWER"].tolist() == [[b"alive: hello"]]


def test_hangs_is_cut_off():
    cut_off = pytest.raises(moonpool.ExecuteTimedOut)
    with testing.load_in_stub(MODELS / "hangs") as model, cut_off:
        model.infer(SECONDS=[[3600.0]])
