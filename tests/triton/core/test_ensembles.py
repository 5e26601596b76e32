"""Ensembles: the same repositories, loaded and asked on both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import (
    FAILS,
    IN,
    LEAVES_OUT,
    OUT,
    REPEATS,
    TELLS,
    TEXT,
    A,
    B,
    Io,
    chain,
    step,
    write_ensemble,
    write_model,
)
from tests.triton.answers import Answer, Failure, Outcome
from tests.triton.both import without_id
from tests.triton.core.conftest import Core
from tests.triton.moonpool_side import MoonpoolSide
from tests.triton.recording import RECORDING

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity", "An ensemble loads or fails as in a real Triton, with the same text, and answers the same."
    ),
]

X = np.array([2, 5, 6], np.float32)
DECOUPLED = "model_transaction_policy { decoupled: true }"
BC = (*B, Io("C"))
TOLD = (Io("B", "STRING", "1"),)
OPTIONAL = (*IN, Io("X2", more="optional: true"))
MODELS: dict[str, dict[str, Any]] = {
    "adds": {},
    "again": {},
    "batched": {"more": "max_batch_size: 4"},
    "large": {"more": "max_batch_size: 8"},
    "ints": {"outputs": (Io("Y", "INT32"),)},
    "four": {"outputs": (Io("Y", dims="4"),)},
    "matrix": {"outputs": (Io("Y", dims="2, 4"),)},
    "rows": {"inputs": (Io("X", dims="-1, 3"),), "outputs": (Io("Y", dims="-1, 3"),)},
    "two": {"inputs": (*IN, Io("X2"))},
    "tells": {"code": TELLS, "outputs": TEXT},
    "tells_two": {"code": TELLS, "inputs": OPTIONAL, "outputs": TEXT},
    "needs_two": {"code": TELLS, "inputs": (*IN, Io("X2")), "outputs": TEXT},
    "fails": {"code": FAILS},
    "leaves_out": {"code": LEAVES_OUT, "outputs": (*OUT, Io("Z"))},
    "repeats": {"code": REPEATS, "more": DECOUPLED},
    "repeats_too": {"code": REPEATS, "more": DECOUPLED},
    "broken": {"code": "raise ValueError('no')"},
}
TWO_READ = {"X": "t", "X2": "u"}
PARTIAL = step("leaves_out", {"X": "A"}, {"Y": "t", "Z": "u"})
GOOD: dict[str, dict[str, Any]] = {
    "one": {"steps": chain(["adds"])},
    "three": {"steps": chain(["adds", "again", "adds"])},
    "nested": {"steps": [step("one", {"A": "A"}, {"B": "t"}), *chain(["adds"], "t")]},
    "through": {"steps": chain(["adds"]), "outputs": (*A, *B)},
    "diamond": {
        "steps": [
            step("adds", {"X": "A"}, {"Y": "t"}),
            step("again", {"X": "t"}, {"Y": "u"}),
            step("needs_two", TWO_READ, {"Y": "B"}),
        ],
        "outputs": TOLD,
    },
    "branches": {"steps": [*chain(["adds"]), *chain(["fails"], "A", "C")], "outputs": BC},
    "telling": {"steps": chain(["adds", "tells"]), "outputs": TOLD},
    "failing": {"steps": chain(["adds", "fails"])},
    "outer_failing": {"steps": [step("failing", {"A": "A"}, {"B": "B"})]},
    "partial": {
        "steps": [step("leaves_out", {"X": "A"}, {"Y": "B", "Z": "C"})],
        "outputs": BC,
    },
    "partial_optional": {"steps": [PARTIAL, step("tells_two", TWO_READ, {"Y": "B"})], "outputs": TOLD},
    "partial_needed": {"steps": [PARTIAL, step("needs_two", TWO_READ, {"Y": "B"})], "outputs": TOLD},
    "unmapped": {"steps": [step("tells_two", {"X": "A"}, {"Y": "B"})], "outputs": TOLD},
    "optional": {
        "steps": [step("tells_two", {"X": "A", "X2": "A2"}, {"Y": "B"})],
        "inputs": (*A, Io("A2", more="optional: true")),
        "outputs": TOLD,
    },
    "optional_first": {
        "steps": [step("adds", {"X": "A2"}, {"Y": "t"}), step("tells_two", {"X": "A", "X2": "t"}, {"Y": "B"})],
        "inputs": (*A, Io("A2", more="optional: true")),
        "outputs": TOLD,
    },
    "mixed": {"steps": chain(["adds", "batched"]), "more": "max_batch_size: 4"},
    "unbatched": {"steps": chain(["adds"]), "more": "max_batch_size: 4"},
    "batching": {"steps": chain(["batched", "large"]), "more": "max_batch_size: 4"},
    "between": {"steps": chain(["adds", "batched", "adds"])},
    "by_rows": {"steps": chain(["rows", "batched"]), "inputs": (Io("A", dims="-1, 3"),), "outputs": (Io("B", dims="-1, 3"),)},
    "stream": {"steps": chain(["repeats", "adds"])},
    "streams": {"steps": chain(["repeats", "repeats_too"])},
    "stream_fails": {"steps": chain(["repeats", "fails"])},
    "said_decoupled": {"steps": chain(["adds"]), "more": DECOUPLED},
}  # fmt: skip
BAD: dict[str, dict[str, Any]] = {
    "bad_datatype": {"steps": chain(["ints", "adds"])},
    "bad_shape": {"steps": chain(["four", "adds"])},
    "bad_rank": {"steps": chain(["matrix", "adds"])},
    "bad_output": {"steps": chain(["four"])},
    "bad_batch": {"steps": chain(["batched"]), "more": "max_batch_size: 8"},
    "bad_input_name": {"steps": [step("adds", {"W": "A"}, {"Y": "B"})]},
    "bad_output_name": {"steps": [step("adds", {"X": "A"}, {"W": "B"})]},
    "bad_unmapped": {"steps": [step("two", {"X": "A"}, {"Y": "B"})]},
    "bad_version": {"steps": [step("adds", {"X": "A"}, {"Y": "B"}, 7)]},
    "bad_version_zero": {"steps": [step("adds", {"X": "A"}, {"Y": "B"}, 0)]},
    "bad_member": {"steps": chain(["nobody"])},
    "bad_self": {"steps": [step("bad_self", {"A": "A"}, {"B": "B"})]},
    "bad_two_origins": {
        "steps": [
            step("repeats", {"X": "A"}, {"Y": "t"}),
            step("repeats_too", {"X": "A"}, {"Y": "u"}),
            step("two", TWO_READ, {"Y": "B"}),
        ]
    },
    "bad_origin_and_caller": {
        "steps": [step("repeats", {"X": "A"}, {"Y": "t"}), step("two", {"X": "t", "X2": "A"}, {"Y": "B"})]
    },
    "bad_outputs_origins": {
        "steps": [*chain(["repeats"]), *chain(["adds"], "A", "C")],
        "outputs": BC,
    },
}  # fmt: skip


class Ensembles:
    """Both sides, with the ensembles that work."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def asked(self, model: str, inputs: dict[str, Any], **options: Any) -> Outcome:
        """Ask both, which must agree. Returns moonpool's answer."""
        theirs = without_id(self.core.triton.infer(model, inputs, **options))
        ours = without_id(self.core.moonpool.infer(model, inputs, **options))
        assert shown(ours) == shown(theirs)
        return ours

    def streamed(self, model: str, inputs: dict[str, Any], **options: Any) -> list[Outcome]:
        theirs = self.core.triton.stream(model, inputs, **options)
        ours = self.core.moonpool.stream(model, inputs, **options)
        # Steps that follow a decoupled model run at once, and any of them may be the first to end.
        assert sorted(map(shown, ours)) == sorted(map(shown, theirs))
        return ours


def shown(outcome: Outcome) -> str:
    """An outcome as text, without the ids that texts of steps have behind the name of their ensemble."""
    if isinstance(outcome, Answer):
        parts = sorted(outcome.outputs.items()), sorted(outcome.parameters.items())
        return repr((*parts, outcome.request_id))
    return repr(outcome).replace("[request id: <id_unknown>] ", "")


@pytest.fixture(scope="module")
def ensembles(core: Core) -> Iterator[Ensembles]:
    for name, given in MODELS.items():
        write_model(core.repository, name, **given)
    for name, given in (GOOD | BAD).items():
        write_ensemble(core.repository, name, **given)
    # No test may start a process that outlives it, so members of the bad ones are loaded here, too.
    for name in MODELS.keys() - {"broken"} | GOOD.keys():
        assert core.moonpool.load(name) is None, name
    with RECORDING.at(__name__, "ensembles"):
        for name in GOOD:
            assert core.triton.load(name) is None, name
    yield Ensembles(core)
    for name in MODELS.keys() - {"broken"}:
        core.moonpool.unload(name)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_fails_the_load_with_the_same_text(ensembles: Ensembles, name: str) -> None:
    theirs = ensembles.core.triton.load(name)
    ours = ensembles.core.moonpool.load(name)

    assert isinstance(theirs, Failure)
    assert isinstance(ours, Failure)
    # The server names the model that it was to load before the reason.
    reason = theirs.text.removeprefix(f"load failed for model '{name}': ").rstrip("\n")
    assert (ours.code, ours.text) == (theirs.code, reason)


@pytest.mark.promise(
    "Ensembles", "If a step fails, the request ends with its error: Triton's prefix, and the code of the model."
)
@pytest.mark.parametrize(
    "name",
    ["one", "three", "nested", "through", "diamond", "branches", "telling", "failing", "outer_failing", "partial",
     "partial_optional", "partial_needed", "unmapped", "optional", "optional_first", "between"],
)  # fmt: skip
def test_it_answers_the_same(ensembles: Ensembles, name: str) -> None:
    ensembles.asked(name, {"A": X})


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("through", ["A"]), ("branches", ["B"]), ("branches", ["C"]), ("partial", ["B"]), ("partial", ["C"])],
)  # fmt: skip
def test_it_gives_the_outputs_that_are_wanted(ensembles: Ensembles, name: str, outputs: list[str]) -> None:
    ensembles.asked(name, {"A": X}, outputs=outputs)


@pytest.mark.parametrize("name", ["optional", "optional_first"])
def test_optional_inputs_reach_the_step(ensembles: Ensembles, name: str) -> None:
    assert isinstance(ensembles.asked(name, {"A": X, "A2": X + 1}), Answer)


@pytest.mark.promise(
    "Ensembles", "Between models that batch and models that do not, a batch dimension of 1 is added or taken away."
)
@pytest.mark.parametrize("name", ["mixed", "unbatched", "batching"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_dimension_is_added_and_stripped(ensembles: Ensembles, name: str, rows: int) -> None:
    ensembles.asked(name, {"A": np.stack([X] * rows)})


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_of_a_model_that_does_not_batch_are_a_batch_of_one_that_does(ensembles: Ensembles, rows: int) -> None:
    ensembles.asked("by_rows", {"A": np.stack([X] * rows)})


@pytest.mark.promise(
    "Ensembles",
    "A step's model gets the id, the parameters, the priority, the timeout and the sequence of the caller's request.",
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"request_id": "7"},
        {"correlation_id": 9, "flags": 3},
        {"correlation_id": 9, "flags": 1},
        {"correlation_id": "nine", "flags": 2},
        {"queue_timeout_us": 5_000_000},
        {"parameters": {"x": 1, "y": "z", "b": True}},
    ],
)
def test_the_models_see_the_same_request(ensembles: Ensembles, options: dict[str, Any]) -> None:
    assert isinstance(ensembles.asked("telling", {"A": X}, **options), Answer)


@pytest.mark.parametrize("inputs", [{}, {"A": X[:2]}, {"A": X.astype(np.int32)}, {"Q": X}])
def test_bad_requests_are_refused_with_the_same_text(ensembles: Ensembles, inputs: dict[str, Any]) -> None:
    assert isinstance(ensembles.asked("three", inputs), Failure)


@pytest.mark.parametrize(
    ("name", "first"), [("stream", 3), ("stream", 0), ("streams", 2), ("streams", 0), ("stream_fails", 2), ("three", 2), ("failing", 2)]
)  # fmt: skip
def test_streams_are_the_same(ensembles: Ensembles, name: str, first: int) -> None:
    ensembles.streamed(name, {"A": np.array([first, 1, 1], np.float32)})


@pytest.mark.parametrize("name", ["one", "stream", "said_decoupled", "mixed"])
def test_the_configuration_is_shown_the_same(ensembles: Ensembles, name: str) -> None:
    theirs = ensembles.core.triton.config(name)
    ours = ensembles.core.moonpool.config(name)

    for field in ("platform", "backend", "instance_group", "optimization", "ensemble_scheduling"):
        assert bool(ours.get(field)) == bool(theirs.get(field)), field
    assert ours["model_transaction_policy"].get("decoupled", False) == theirs["model_transaction_policy"].get(
        "decoupled", False
    )


def test_failures_count_in_the_same_way(ensembles: Ensembles) -> None:
    sides = ensembles.core.triton, ensembles.core.moonpool

    def counts() -> list[dict[str, str]]:
        pattern = r'^(nv_inference_request_failure\{model="failing".*) (\S+)$'
        return [dict(side.metrics(pattern)) for side in sides]

    before = counts()
    ensembles.asked("failing", {"A": X})
    after = counts()

    assert after[0].keys() == after[1].keys()
    changed = [{line for line in now if now[line] != then[line]} for then, now in zip(before, after, strict=True)]
    assert changed[0] == changed[1] != set()


def test_models_come_and_go_together(ensembles: Ensembles) -> None:
    ours, theirs = MoonpoolSide(ensembles.core.repository), ensembles.core.triton
    try:
        for name in ("one", "three"):
            assert ours.load(name) is None
        for side in (ours, theirs):
            side.unload("again")
            assert not side.ready("three")
            assert side.ready("one")
            assert side.load("again") is None
            assert side.ready("three")
    finally:
        ours.close()


def test_the_told_texts_are_json(ensembles: Ensembles) -> None:
    """The texts that are compared above say something."""
    answer = ensembles.asked("telling", {"A": X}, request_id="7")

    assert isinstance(answer, Answer)
    (text,) = answer.outputs["B"].data
    assert isinstance(text, bytes)
    assert json.loads(text)["id"] == "7"
