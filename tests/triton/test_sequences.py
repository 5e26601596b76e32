"""The sequence batcher: the same requests one after the other, and what the model and the callers see of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Answer, Failure, Outcome
from tests.triton.both import Both
from tests.triton.recording import RECORDING

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Sequences", "In sequences and with rescheduled requests, the model and its callers see the same as in Triton."
    ),
    pytest.mark.promise("Fidelity", "Sequences are served as in a real Triton."),
]

MODELS = Path(__file__).parents[1] / "models"

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 2, 3 ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
max_sequence_idle_microseconds: 3600000000
"""


def write(repository: Path, model: str, file: str, batching: str, rows: int = 4) -> None:
    """A model of the tests with this sequence batcher."""
    (repository / model / "1").mkdir(parents=True, exist_ok=True)
    shutil.copy(MODELS / file, repository / model / "1" / "model.py")
    datatype = "TYPE_STRING" if file == "sequences.py" else "TYPE_FP32"
    (repository / model / "config.pbtxt").write_text(
        f"""
        name: "{model}" backend: "python" max_batch_size: {rows}
        input {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }}
        output {{ name: "Y" data_type: {datatype} dims: [ 1 ] }}
        instance_group {{ kind: KIND_CPU }}
        sequence_batching {{ {batching} }}
        """
    )


@pytest.fixture(scope="module", autouse=True)
def models(both: Both, repository: Path) -> Iterator[None]:
    """All models of the module, loaded on both sides; Triton waits a second in each load and unload."""
    names = []
    for number, (batching, rows) in enumerate(BATCHERS):
        names.append(f"sequences_{number}")
        write(repository, names[-1], "sequences.py", batching, rows)
    for number, batching in enumerate(STRATEGIES):
        names.append(f"iterative_{number}")
        write(repository, names[-1], "generates.py", ITERATIVE + batching)
    names.append("texts")
    write(repository, names[-1], "sequences.py", TEXTS)
    with RECORDING.at(__name__, "models"):
        assert set(both.triton.load_all(names).values()) == {None}
    assert {both.moonpool.load(name) for name in names} == {None}
    yield
    for name in names:
        both.moonpool.unload(name)
    both.triton.unload_all(names)


def ask(side: Any, model: str, request: str, rows: int, x: float = 1, **more: Any) -> Outcome:
    """`"7s"` is sequence 7, START."""
    number = request.rstrip("abcse")
    suffix = request[len(number) :]
    outcome: Outcome = side.infer(
        model,
        {"X": np.full((rows, 1) if rows else (1,), x, np.float32)},
        request_id=request,
        correlation_id=int(number or 0) if number.isdigit() or not number else number,
        flags=("s" in suffix) | 2 * ("e" in suffix),
        **more,
    )
    return outcome


def said(outcome: Outcome) -> Any:
    """Return the model's answer without the name of its instance."""
    if isinstance(outcome, Failure):
        code, text = outcome
        return code, text.rpartition("] ")[2]
    said: Any = outcome.outputs["Y"].data[0]
    told = json.loads(said)
    del told["instance"]
    return told


REQUESTS = [
    "42", "42e", "", "s", "1s", "2s", "3s", "3", "2", "4s", "5s", "3e", "3", "2e", "6s", "6e", "1",
    "1s", "1a", "5e", "4", "4e", "1e", "1", "1se", "1",
]  # fmt: skip
BATCHERS = [
    ("direct { }" + CONTROLS, 4),
    ("direct { minimum_slot_utilization: 0.75 max_queue_delay_microseconds: 1000 }" + CONTROLS, 4),
    ("direct { } max_sequence_idle_microseconds: 3600000000", 6),
    ("oldest { max_candidate_sequences: 5 }" + CONTROLS, 4),
    ("oldest { max_candidate_sequences: 8 preferred_batch_size: [ 2 ] } max_sequence_idle_microseconds: 3600000000", 2),
    ("oldest { max_candidate_sequences: 8 }" + CONTROLS, 0),
]
TEXTS = """
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
"""
# The idle time is long, because on the slower side a sequence could end before it is continued.
ITERATIVE = "iterative_sequence: true max_sequence_idle_microseconds: 3600000000 "
STRATEGIES = ["", "oldest { max_candidate_sequences: 2 }"]


@pytest.mark.parametrize("number", range(len(BATCHERS)))
def test_requests_of_sequences_are_seen_and_refused_alike(both: Both, number: int) -> None:
    rows, model = BATCHERS[number][1], f"sequences_{number}"
    requests = [each for each in REQUESTS if rows != 4 or not each.startswith(("5", "6"))]
    for request in requests:
        theirs = said(ask(both.triton, model, request, min(rows, 1)))
        ours = said(ask(both.moonpool, model, request, min(rows, 1)))
        assert ours == theirs, request
    if rows:
        assert said(ask(both.moonpool, model, "7s", 2)) == said(ask(both.triton, model, "7s", 2))


@pytest.mark.needs("a folder of the test")
@pytest.mark.parametrize("number", range(len(STRATEGIES)))
def test_rescheduled_requests_come_again_alike(both: Both, tmp_path: Path, number: int) -> None:
    found = []
    # Triton ends a sequence after its last response. Another sequence gives it the time to do so before "7" comes
    # again.
    asked = ("", "7", "7s", "", "7")
    for side, name in ((both.triton, "theirs"), (both.moonpool, "ours")):
        log = tmp_path / name
        outcomes = [ask(side, f"iterative_{number}", request, 1, 3, parameters={"log": str(log)}) for request in asked]
        found.append(([said_briefly(each) for each in outcomes], side.text_of(str(log))))
    assert found[0] == found[1]


def test_an_id_that_is_given_to_the_model_as_text_arrives_here(both: Both) -> None:
    what = "unexpected number of string elements 2 for inference input 'ID', expecting 1"
    assert said(ask(both.triton, "texts", "some.s", 1)) == ("INVALID_ARG", what)
    ours = said(ask(both.moonpool, "texts", "some.s", 1))
    assert ours["controls"] == {"ID": ["object", [1, 1], "b'some.'"]}


def said_briefly(outcome: Outcome) -> Any:
    return outcome.outputs if isinstance(outcome, Answer) else said(outcome)


WRONG = {
    "a choice too many": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_START '
    "fp32_false_true: [ 0, 1 ] int32_false_true: [ 0, 1 ] } }",
    "no choice": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_READY } }',
    "three values": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_END '
    "bool_false_true: [ false, true, true ] } }",
    "no datatype": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID } }',
    "a choice for the id": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID '
    "data_type: TYPE_INT64 fp32_false_true: [ 0, 1 ] } }",
    "no name": "control_input { control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }",
    "a name twice": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_READY '
    'int32_false_true: [ 0, 1 ] } } control_input { name: "C" control { kind: '
    "CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }",
    "a kind twice": 'control_input { name: "C" control { kind: CONTROL_SEQUENCE_READY '
    'int32_false_true: [ 0, 1 ] } } control_input { name: "D" control { kind: '
    "CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }",
    "too much of the slots": "direct { minimum_slot_utilization: 1.5 }",
    "too large a batch": "oldest { preferred_batch_size: [ 8 ] }",
    "an empty batch": "oldest { preferred_batch_size: [ 0 ] }",
}


@pytest.mark.promise("Sequences", "Errors in a request of a sequence, or in the configuration, have Triton's texts.")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batcher_is_refused_in_the_same_words(both: Both, repository: Path, name: str) -> None:
    model = "wrong_" + name.replace(" ", "_")
    write(repository, model, "sequences.py", WRONG[name])
    assert both.triton.load(model) is not None
    ours = both.moonpool.load(model)
    assert ours is not None
    text = ours.text.rpartition(": ")[2] if ": " in ours.text else ours.text
    assert both.triton.has_logged(f"Poll failed for model directory '{model}': {text}")


USELESS = {
    "an input as a state": 'state { input_name: "X" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] }',
    "an input as a control": 'control_input { name: "X" control { kind: CONTROL_SEQUENCE_START '
    "fp32_false_true: [ 0, 1 ] } }",
}


def test_a_batcher_that_does_nothing_useful_in_triton_is_refused(both: Both, repository: Path) -> None:
    names = {name: "useless_" + name.replace(" ", "_") for name in USELESS}
    for name, model in names.items():
        write(repository, model, "sequences.py", USELESS[name])
    assert set(both.triton.load_all([*names.values()]).values()) == {None}
    both.triton.unload_all([*names.values()])
    state, control = (both.moonpool.load(model) for model in names.values())
    assert state is not None
    assert "sequence batching state 'X' is an input of the model already" in state.text
    assert control is not None
    assert "control tensor 'X' is an input of the model" in control.text
