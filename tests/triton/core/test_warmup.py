"""Warm-up: what the model gets, and why a load fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.triton.answers import LogLine
from tests.triton.core.conftest import Core, Loads
from tests.triton.recording import RECORDING

from moonpool.ipc.tensors import CODES, DTYPES

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity", "Warm-up gives a model what it gives it in a real Triton, and fails a load with Triton's text."
    ),
]

SHOWS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            shown = sorted((t.name(), str(t.as_numpy().dtype), t.as_numpy().tolist()) for t in request.inputs())
            pb_utils.Logger.log_info(f"{self.name}: {len(requests)} {shown} {request.request_id()!r} {request.correlation_id()} {request.flags()}")
            x = pb_utils.get_input_tensor_by_name(request, "X")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy())]))
        return responses
"""
RAISES = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("on purpose")
"""
REFUSES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        errors = [pb_utils.TritonError(f"no {number}") for number, _ in enumerate(requests)]
        return [pb_utils.InferenceResponse(error=error) for error in errors]
"""
LATE = """
import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("late")))
        sender.send(flags=1)
"""


@dataclass
class Case:
    """A model with one sample, which gives X."""

    batch: int = 1
    most: int = 0
    datatype: str = "FP32"
    dims: str = "2"
    data: str = "zero_data: true"
    sample: str = ""
    more: str = ""
    inputs: str = ""
    count: int = 1
    code: str = SHOWS
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def config(self) -> str:
        dims = "-1" if self.dims == "-1" else "2"
        tensor = f"data_type: TYPE_{self.datatype} dims: [{dims}]"
        value = self.sample or f"data_type: TYPE_{self.datatype} dims: [{self.dims}] {self.data}"
        return f"""
            backend: "python" max_batch_size: {self.most} {self.more}
            input [{{ name: "X" {tensor} }}] output [{{ name: "Y" {tensor} }}]
            instance_group [{{ kind: KIND_CPU }}]
            model_warmup [{{
                name: "S" batch_size: {self.batch} count: {self.count}
                inputs {{ key: "X" value {{ {value} }} }} {self.inputs}
            }}]
        """


START = """sequence_batching {
    control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }]
}"""
WORKS = {
    "zeros": Case(),
    "a batch": Case(batch=3, most=4),
    "twice": Case(count=2),
    "nothing": Case(batch=0, dims="-1"),
    "a file": Case(data='input_data_file: "f"', files={"f": b"\0\0\x80\x3f" * 2}),
    "a file with more": Case(data='input_data_file: "f"', files={"f": b"\0\0\x80\x3f" * 9}),
    "no text": Case(datatype="STRING"),
    "random text": Case(datatype="STRING", data="random_data: true"),
    "texts of a file": Case(datatype="STRING", data='input_data_file: "f"', files={"f": b"\1\0\0\0a\2\0\0\0bc"}),
    "not zero": Case(data="zero_data: false"),
    "a sequence": Case(most=2, more=START),
    "a sequence with its start": Case(
        most=2, more=START, inputs='inputs { key: "START" value { data_type: TYPE_INT32 dims: [1] input_data_file: "f" } }', files={"f": b"\1\0\0\0"}
    ),
}  # fmt: skip
_TOO_LARGE = "batch size 3 for 'warmed_more_than_the_largest_batch_0', max allowed is 2; "
_RAISED = (
    "Failed to process the request(s) for model 'warmed_raises_0', message: ValueError: on purpose\n\nAt:\n"
    "  FOLDER/warmed_raises/1/model.py(4): execute\n; "
)
# tritonserver 2.51 dies in every third of these loads, so it is not asked again. This is what it says to them.
TOLD = {
    "raises": (Case(batch=2, most=2, code=RAISES), 2 * _RAISED),
    "refuses": (Case(batch=2, most=2, code=REFUSES), "no 0; no 1; "),
    "refuses later": (Case(code=LATE, more="model_transaction_policy { decoupled: true }"), "late; "),
    "more than the largest batch": (Case(batch=3, most=2), 3 * _TOO_LARGE),
}
FAILS = {
    "dims are missing": Case(dims="-1"),
    "data is missing": Case(data=""),
    "another datatype": Case(sample="data_type: TYPE_INT32 dims: [2] zero_data: true"),
    "no datatype": Case(sample="dims: [2] zero_data: true"),
    "another shape": Case(dims="3"),
    "no file": Case(data='input_data_file: "f"'),
    "a short file": Case(data='input_data_file: "f"', files={"f": b"123"}),
}


def name_of(what: str) -> str:
    return f"warmed_{what.replace(' ', '_')}"


@pytest.fixture(scope="module")
def loads(core: Core) -> Iterator[Loads]:
    cases = WORKS | FAILS
    for what, case in cases.items():
        core.write(name_of(what), case.config, case.code, **case.files)
    loads = Loads(core, __name__, [name_of(what) for what in cases])
    yield loads
    loads.unload()


class OfWarmup:
    """Chooses the lines of the models that are warmed up, sorted by the models."""

    def __call__(self, lines: list[LogLine]) -> list[LogLine] | None:
        found = [line for line in lines if line.text.startswith("warmed_")]
        count = sum(case.batch * case.count for case in WORKS.values())
        return sorted(found, key=_model) if len(found) >= count else None

    def __repr__(self) -> str:
        return "of warm-up"


def _model(line: LogLine) -> str:
    return line.text.partition(":")[0]


@pytest.fixture(scope="module")
def logged(core: Core, loads: Loads) -> list[list[LogLine]]:  # noqa: ARG001 - the models are loaded
    """The lines of all models, in Triton and in moonpool."""
    with RECORDING.at(__name__, "lines"):
        return [side.lines(OfWarmup()) for side in (core.triton, core.moonpool)]


@pytest.mark.parametrize("what", WORKS)
def test_a_model_gets_the_same(loads: Loads, logged: list[list[LogLine]], what: str) -> None:
    assert loads.of(name_of(what)) == (None, None)
    theirs, ours = ([line for line in lines if _model(line) == name_of(what)] for lines in logged)

    assert ours == theirs
    assert len(ours) == WORKS[what].batch * WORKS[what].count


@pytest.mark.parametrize("what", FAILS)
def test_a_load_fails_with_the_same_text(loads: Loads, what: str) -> None:
    theirs, ours = loads.of(name_of(what))

    assert theirs is not None
    assert ours is not None
    assert _plain(ours.text) == _plain(theirs.text)
    assert ours.code == theirs.code


@pytest.mark.parametrize("what", TOLD)
def test_a_load_fails_with_the_text_that_triton_had(core: Core, what: str) -> None:
    case, told = TOLD[what]
    core.write(name_of(what), case.config, case.code)

    failure = core.moonpool.load(name_of(what))

    assert failure is not None
    text = _plain(failure.text).replace(str(core.repository), "FOLDER")
    assert text == f"failed to run warmup sample 'S': {told}"
    assert failure.code == "INVALID_ARG"


def _plain(text: str) -> str:
    """Leave out what docs/FIDELITY.md has rows for: the request's id, and the place of a mistake in a configuration."""
    text = re.sub(r"\[request id: .*?\] |^[^ ]*config\.pbtxt:\d+: \S+: ", "", text)
    # Triton has no blank after the name of a file.
    text = re.sub(r"from (\S+?) ?only", r"from \1 only", text)
    return text.replace("_0'", "'")


def test_warm_up_does_not_count_here(core: Core) -> None:
    case = Case(batch=2, most=2)
    core.write("counted", case.config, case.code)
    assert (core.triton.load("counted"), core.moonpool.load("counted")) == (None, None)
    try:
        theirs, ours = core.triton.counts("counted"), core.moonpool.counts("counted")
    finally:
        core.triton.unload("counted")
        core.moonpool.unload("counted")
    assert (theirs["inference_count"], theirs["execution_count"]) == (2, 1)
    assert (ours["inference_count"], ours["execution_count"]) == (0, 0)


def test_random_numbers_are_numbers(core: Core) -> None:
    """Triton gives random bytes, which may be no number: moonpool's are from 0 to 1."""
    case = Case(data="random_data: true")
    core.write("random", case.config, case.code)
    core.moonpool.forget_log()
    assert core.moonpool.load("random") is None
    core.moonpool.unload("random")
    (line,) = core.moonpool.log()
    values = re.findall(r"0\.\d+", line.text)
    assert len(values) == 2
    assert DTYPES[CODES["FP32"]].name in line.text
