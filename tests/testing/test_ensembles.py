"""Ensembles that are loaded for tests, in the test's own process and in stubs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import (
    ADDS,
    FAILS,
    REPEATS,
    TELLS,
    TEXT,
    B,
    Io,
    chain,
    step,
    write_ensemble,
    write_model,
)

from moonpool import InvalidRequest, LoadFailed, ModelError, testing
from moonpool.testing import EnsembleModel, LoadedModel

X = np.array([2, 5, 6], np.float32)
Loads = Callable[..., LoadedModel]

pytestmark = pytest.mark.promise(
    "Testing models",
    "`testing.load_ensemble` loads an ensemble with the models of its steps, which lie beside it, in the test's own "
    "process. It answers as in a runtime.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles")
    decoupled = "model_transaction_policy { decoupled: true }"
    batching = "max_batch_size: 4"
    write_model(folder, "adds")
    write_model(folder, "batched", more=batching)
    write_model(folder, "repeats", REPEATS, more=decoupled)
    write_model(folder, "fails", FAILS)
    write_model(folder, "tells", TELLS, outputs=TEXT)
    names = Io("X", "STRING", "-1")
    words = TELLS.replace("as_numpy().tolist()", "as_numpy().astype(str).tolist()")
    write_model(folder, "words", words, inputs=(names,), outputs=TEXT)
    text = (Io("B", "STRING", "1"),)
    write_ensemble(folder, "three", chain(["adds"] * 3))
    write_ensemble(folder, "hundred", chain(["adds"] * 100))
    write_ensemble(folder, "outer", [step("three", {"A": "A"}, {"B": "t"}), *chain(["adds"], "t")])
    write_ensemble(folder, "streams", chain(["repeats", "adds", "repeats"]))
    write_ensemble(folder, "failing", chain(["adds", "fails"]))
    write_ensemble(folder, "telling", chain(["adds", "tells"]), outputs=text)
    write_ensemble(folder, "wordy", chain(["tells", "words"]), outputs=text)
    write_ensemble(folder, "mixed", chain(["batched", "adds", "batched"]), more=batching)
    branches = [*chain(["adds"]), *chain(["fails"], "A", "C")]
    write_ensemble(folder, "branches", branches, outputs=(*B, Io("C")))
    write_ensemble(folder, "second", [step("adds", {"X": "A"}, {"Y": "B"}, 2)])
    write_ensemble(folder, "lacks", chain(["adds", "nobody"]))
    write_ensemble(folder, "circle", [step("circle", {"A": "A"}, {"B": "B"})])
    write_ensemble(folder, "unfit", chain(["adds", "words"]))
    (folder / "adds" / "2").mkdir()
    (folder / "adds" / "2" / "model.py").write_text(ADDS.replace("x + 1", "x + 100"))
    (folder / "adds" / "config.pbtxt").write_text(
        (folder / "adds" / "config.pbtxt").read_text() + "version_policy { specific { versions: [1] } }"
    )
    return folder


@pytest.fixture(params=[testing.load_ensemble, testing.load_in_stub], ids=["here", "stub"])
def load(request: pytest.FixtureRequest) -> Any:
    return request.param


def responses_of(load: Loads, path: Path, request: Any) -> list[Any]:
    with load(path) as model:
        return [
            (each.error.message(), each.error.code().name)
            if each.error
            else {name: array.tolist() for name, array in each.outputs.items()}
            for each in model.responses(request)
        ]


@pytest.mark.parametrize(
    ("name", "request_", "expected"),
    [
        ("three", {"A": X}, [{"B": [5, 8, 9]}]),
        ("hundred", {"A": X}, [{"B": [102, 105, 106]}]),
        ("outer", {"A": X}, [{"B": [6, 9, 10]}]),
        ("mixed", {"A": [X.tolist()]}, [{"B": [[5, 8, 9]]}]),
        ("second", {"A": X}, [{"B": [102, 105, 106]}]),
        ("failing", {"A": X}, [("in ensemble 'failing', not today", "NOT_FOUND")]),
        ("branches", testing.request({"A": X}, outputs=["B"]), [{"B": [3, 6, 7]}]),
        ("streams", {"A": [1, 2, 3]}, [{"B": [2, 3, 4]}, {"B": [3, 4, 5]}]),
    ],
)
def test_it_answers_as_in_a_runtime(folder: Path, load: Loads, name: str, request_: Any, expected: list[Any]) -> None:
    assert responses_of(load, folder / name, request_) == expected


def test_the_models_get_the_details_of_the_request(folder: Path) -> None:
    request = testing.request({"A": X}, request_id="me", parameters={"a": 1}, correlation_id=7, flags=1)
    found = [
        responses_of(load, folder / name, request)
        for name in ("telling", "wordy")
        for load in (testing.load_ensemble, testing.load_in_stub)
    ]
    assert b'"id": "me"' in found[0][0]["B"][0]
    assert b'"sequence": 7' in found[0][0]["B"][0]
    assert found[0] == found[1]
    assert found[2] == found[3]


def test_a_request_that_does_not_fit_is_refused(folder: Path, load: Loads) -> None:
    with load(folder / "three") as model:
        with pytest.raises(InvalidRequest, match="unexpected shape for input 'A'"):
            model.infer(A=[1, 2])
        assert model.why_not_ready() is None


@pytest.mark.promise(
    "Ensembles", "An ensemble whose models do not fit together is not loaded, and the error has Triton's text."
)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lacks", "ensemble lacks contains models that are not available or ambiguous: nobody"),
        ("circle", "circular dependency between ensembles: circle -> ... -> circle -> circle"),
        (
            "unfit",
            "in ensemble unfit, ensemble tensor t1: inconsistent data type: TYPE_FP32 is inferred from model adds "
            "while TYPE_STRING is inferred from model words",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused(folder: Path, load: Loads, name: str, what: str) -> None:
    with pytest.raises(LoadFailed) as caught:
        load(folder / name)
    assert str(caught.value) == what


def test_a_stream_may_be_left(folder: Path) -> None:
    with testing.load_ensemble(folder / "streams") as model:
        assert model.config.decoupled
        stream = model.stream(A=[1000, 2, 3])
        assert next(stream)["B"].tolist() == [1001, 3, 4]
        stream.close()
        request = testing.request({"A": [3, 0, 0]}, cancel_after=1)
        # What the last step still sends is seen, and no further step begins: there would be 15 responses.
        assert len(model.responses(request)) == 4


def test_the_model_that_raised_is_the_cause(tmp_path: Path) -> None:
    write_model(tmp_path, "raises", ADDS.replace("x = ", "raise KeyError('mine')\n            x = "))
    write_ensemble(tmp_path, "e", chain(["raises"]))
    with testing.load_ensemble(tmp_path / "e") as model:
        with pytest.raises(ModelError, match=r"in ensemble 'e', .*KeyError") as caught:
            model.infer(A=X)
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_test_brings_models_of_its_own(folder: Path) -> None:
    with (
        testing.load(folder / "adds", name="fails") as stands_in,
        testing.load_ensemble(folder / "failing", models={"fails": stands_in}) as model,
    ):
        assert model.infer(A=X)["B"].tolist() == [4, 7, 8]
        assert model.members["fails"] is stands_in
        assert model.members["adds"].version == 1
    with pytest.raises(LoadFailed, match="a function has none"):
        testing.load_ensemble(folder / "failing", models={"fails": dict})


def test_each_is_loaded_by_its_own_function(folder: Path) -> None:
    with pytest.raises(LoadFailed, match="'three' is an ensemble"):
        testing.load(folder / "three")
    with pytest.raises(LoadFailed, match="'adds' is not an ensemble"):
        testing.load_ensemble(folder / "adds")


def test_a_model_may_ask_an_ensemble(folder: Path) -> None:
    with testing.load(folder / "adds", models={"three": folder / "three"}) as model:
        ensemble = model.host._targets["three"]
        assert isinstance(ensemble, EnsembleModel)
        assert ensemble.infer(A=X)["B"].tolist() == [5, 8, 9]
