"""States of sequences: what a model gets at the start, the texts of refusals, and what Triton's Python models do not
have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Answer, Failure
from tests.triton.core.conftest import Core, Loads

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity",
        "States of sequences have the initial values, names, shapes and texts that they have in a real Triton.",
    ),
]

SHOWS = """
import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensors = [tensor for tensor in request.inputs() if tensor.name() != "X"]
            shown = [[t.name(), str(t.as_numpy().dtype), t.as_numpy().tolist()] for t in tensors]
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            text = np.array([repr(shown)], object).reshape(x.shape)
            after = np.ones_like(tensors[0].as_numpy())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", text), pb_utils.Tensor("OUT", after)]))
        return responses
"""
NAMED = 'input_name: "IN" output_name: "OUT"'
ONE = "data_type: TYPE_FP32 dims: [ 1 ]"


def initial(text: str, name: str = 'name: "i"') -> str:
    return f"state {{ {NAMED} {ONE} initial_state {{ {name} {text} }} }}"


STARTS = {
    "zeros": (initial(f"{ONE} zero_data: true"), 0),
    "a file": (initial(f'{ONE} data_file: "f"'), 0),
    "a file with more": (initial(f'{ONE} data_file: "f2"'), 0),
    "a file in a batch": (initial(f'{ONE} data_file: "f"'), 2),
    "texts": (f"state {{ {NAMED} data_type: TYPE_STRING dims: [ 2 ] }}", 0),
    "a file with a text": (
        f"state {{ {NAMED} data_type: TYPE_STRING dims: [ 1 ] "
        'initial_state { name: "i" data_type: TYPE_STRING dims: [ 1 ] data_file: "t" } }',
        0,
    ),
}
REFUSED = {
    "another datatype": initial("data_type: TYPE_INT32 dims: [ 1 ] zero_data: true"),
    "no name": initial(f"{ONE} zero_data: true", ""),
    "another rank": initial("data_type: TYPE_FP32 dims: [ 1, 1 ] zero_data: true"),
    "a variable size": initial("data_type: TYPE_FP32 dims: [ -1 ] zero_data: true"),
    "another size": initial("data_type: TYPE_FP32 dims: [ 2 ] zero_data: true"),
    "no data": initial(ONE),
    "a short file": initial(f'{ONE} data_file: "s"'),
    "no file": initial(f'{ONE} data_file: "n"'),
    "two values": f'state {{ {NAMED} {ONE} initial_state [ {{ name: "i" {ONE} zero_data: true }}, {{ name: "j" {ONE} zero_data: true }} ] }}',
    "one name twice": f"{initial(f'{ONE} zero_data: true')} {initial(f'{ONE} zero_data: true').replace('OUT', 'OTHER')}",
}
FILES = {"f": np.float32(5).tobytes(), "f2": np.array([6, 7], np.float32).tobytes(), "t": b"\1\0\0\0a", "s": b"ab"}  # fmt: skip


def write(core: Core, name: str, state: str, most: int) -> None:
    core.write(
        name,
        f"""
        backend: "python" max_batch_size: {most}
        input [ {{ name: "X" {ONE} }} ]
        output [ {{ name: "Y" data_type: TYPE_STRING dims: [ 1 ] }} ]
        instance_group [ {{ kind: KIND_CPU }} ]
        sequence_batching {{ {state} }}
        """,
        SHOWS,
    )
    folder = core.repository / name / "initial_state"
    folder.mkdir()
    for file, content in FILES.items():
        (folder / file).write_bytes(content)


def ask(side: Any, name: str, most: int, flags: int) -> Any:
    x = np.ones((1, 1) if most else (1,), np.float32)
    return side.infer(name, {"X": x}, correlation_id=7, flags=flags)


def name_of(what: str) -> str:
    return f"states_{what.replace(' ', '_')}"


@pytest.fixture(scope="module")
def loads(core: Core) -> Iterator[Loads]:
    kept = initial(f"{ONE} zero_data: true")
    cases = {**STARTS, **{what: (state, 0) for what, state in REFUSED.items()}, "kept": (kept, 0)}
    for what, (state, most) in cases.items():
        write(core, name_of(what), state, most)
    loads = Loads(core, __name__, [name_of(what) for what in cases])
    yield loads
    loads.unload()


@pytest.mark.parametrize("what", STARTS)
def test_a_sequence_starts_with_the_same_value(core: Core, loads: Loads, what: str) -> None:
    assert loads.of(name_of(what)) == (None, None)
    most = STARTS[what][1]

    theirs, ours = (ask(side, name_of(what), most, 3) for side in (core.triton, core.moonpool))

    assert isinstance(theirs, Answer)
    assert ours == theirs


@pytest.mark.parametrize("what", REFUSED)
def test_a_load_fails_with_the_same_text(loads: Loads, what: str) -> None:
    theirs, ours = loads.of(name_of(what))

    assert theirs is not None
    assert ours is not None
    assert re.sub(r"^[^ ]*config\.pbtxt:\d+: \S+: ", "", ours.text) == theirs.text.replace("from sonly", "from s only")
    assert ours.code == theirs.code


def test_a_python_model_gets_its_state_back_here_alone(core: Core, loads: Loads) -> None:
    """Triton's Python backend gives the model the initial value with every request, and sends the new one to nobody."""
    assert loads.of("states_kept") == (None, None)

    sides = (core.triton, core.moonpool)
    theirs, ours = ([ask(side, "states_kept", 0, flags) for flags in (1, 0, 2)] for side in sides)

    told = [[answer.outputs["Y"].data[0] for answer in side] for side in (theirs, ours)]
    zero, one = b"[['IN', 'float32', [0.0]]]", b"[['IN', 'float32', [1.0]]]"
    assert told == [[zero, zero, zero], [zero, one, one]]
    assert [set(answer.outputs) for answer in (*theirs, *ours)] == [{"Y"}] * 6


def test_a_client_may_not_ask_for_a_state(core: Core, loads: Loads) -> None:
    assert loads.of("states_kept") == (None, None)
    options: dict[str, Any] = {"correlation_id": 8, "flags": 1, "outputs": ["OUT"]}
    sides = (core.triton, core.moonpool)

    x = {"X": np.ones(1, np.float32)}
    theirs, ours = (side.infer("states_kept", x, **options) for side in sides)

    assert isinstance(theirs, Failure)
    assert ours == theirs
