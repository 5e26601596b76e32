"""Moonpool differs on purpose in each row of docs/FIDELITY.md that a snippet can show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from tests.triton.answers import Answer, Failure, Inputs, output_of
from tests.triton.both import Both

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "Where moonpool differs on purpose, the table in FIDELITY says how, and a test checks that it still differs.",
    ),
]


def code_of(lines: str) -> Inputs:
    return {"CODE": np.array([lines.encode()], object)}


LAST = code_of("sender.send(y(0), FINAL)")


class Difference(NamedTuple):
    """A snippet, how Triton's word for it begins, and how moonpool's does."""

    code: str
    theirs: str
    ours: str


SURROGATE = 'np.array(["\\ud800"], object)'
NO_STR = 'class Bad: __str__ = lambda self: 1 / 0\npb_utils.Tensor("X", np.array([Bad()], object))'
NO_STREAM = """class Plain:
    def __dlpack__(self): return np.zeros(1, np.int8).__dlpack__()
    def __dlpack_device__(self): return (1, 0)
pb_utils.Tensor.from_dlpack("X", Plain())"""
REQUEST = 'pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m"'
MODEL_EXCEPTION = "c_python_backend_utils.TritonModelException: "

DIFFERENCES = [
    Difference(
        'pb_utils.deserialize_bytes_tensor(b"\\5\\0\\0\\0a")',
        "struct.error: ",
        MODEL_EXCEPTION + "Invalid bytes tensor data: string extends beyond buffer",
    ),
    Difference(
        'pb_utils.deserialize_bytes_tensor(b"\\1\\0")',
        "struct.error: ",
        MODEL_EXCEPTION + "Invalid bytes tensor data: incomplete length field",
    ),
    Difference(
        f'pb_utils.Tensor("X", {SURROGATE})',
        "builtins.UnicodeEncodeError: ",
        MODEL_EXCEPTION + "element 0 of tensor 'X', of type str, has no UTF-8 form",
    ),
    Difference(
        NO_STR,
        "builtins.ZeroDivisionError: ",
        MODEL_EXCEPTION + "element 0 of tensor 'X', of type Bad, has no UTF-8 form",
    ),
    Difference(
        'pb_utils.Tensor("X", np.zeros(1)).triton_dtype()',
        "builtins.TypeError: Unable to convert function return value",
        "12",
    ),
    Difference(
        'pb_utils.Tensor("Y", np.zeros(1, np.int8)).from_dlpack("X", np.zeros(1, np.int8))',
        "builtins.TypeError",
        "Tensor('X'",
    ),
    Difference(NO_STREAM, "builtins.TypeError", "Tensor('X'"),
    Difference(
        f'{REQUEST}, parameters={{"a": 1.5}}).parameters()',
        MODEL_EXCEPTION + "Expect parameters values to have type bool/int/str, found type",
        "'{\"a\": 1.5}'",
    ),
    Difference(
        """i = asking("streams", ["Y"], "sender.send(y(1)); sender.send(failed()); sender.send(flags=FINAL)")
[r.has_error() for r in i.exec(decoupled=True)]""",
        "list[False, False]",
        "list[False, True, False]",
    ),
    Difference(
        """error = "[response(error=pb_utils.TritonError('mine', pb_utils.TritonError.CANCELLED))]"
asking("returns", ["Y"], error).exec()""",
        "Response(list[], TritonError(__ErrorCode.INTERNAL, 'mine'))",
        "Response(list[], TritonError(__ErrorCode.CANCELLED, 'mine'))",
    ),
    Difference(
        'asking("batch", ["Y"]).exec().error().code()', "<__ErrorCode.INTERNAL: 1>", "<__ErrorCode.INVALID_ARG: 3>"
    ),
    Difference(f"{REQUEST}, correlation_id=-1)", "builtins.RuntimeError: Unable to cast", "builtins.TypeError"),
]


# A request to an unknown model. Triton's error for it differs between versions (`newer`).
NOTHING = 'asking("nothing_of_that_name", ["Y"])'


def newer(code: str, model: str, why: str, *, in_list: bool = False) -> Difference:
    """Return the difference for a model that asks this one: the older text and the newer one."""
    begins = f"Model {model} - Error when running inference: "
    before = f"Failed for execute the inference request. Model '{model}' is not ready."
    shown = "list[{}]" if in_list else "{}"
    both = (shown.format(f'"{begins}{text}"') for text in (before, why))
    return Difference(code, *both)


UNKNOWN = "Request for unknown model: 'nothing_of_that_name' is not found"
NEWER_TEXTS = [
    newer(f"{NOTHING}.exec().error().message()", "nothing_of_that_name", UNKNOWN),
    newer(
        f"async def bad(): return await {NOTHING}.async_exec()\nimport asyncio; asyncio.run(bad()).error().message()",
        "nothing_of_that_name",
        UNKNOWN,
    ),
    newer(
        f"[r.error().message() for r in {NOTHING}.exec(decoupled=True)]", "nothing_of_that_name", UNKNOWN, in_list=True
    ),
    newer('asking("", ["Y"]).exec().error().message()', "", "Request for unknown model: '' is not found"),
    newer(
        'asking("batch", ["Y"], model_version=7).exec().error().message()',
        "batch",
        "Request for unknown model: 'batch' version 7 is not found",
    ),
]

# The core's errors for requests that it does not hand on.
OF_THE_CORE = [
    Difference(
        'asking("nothing_of_that_name", ["Y"]).exec().error().code()',
        "<__ErrorCode.INTERNAL: 1>",
        "<__ErrorCode.NOT_FOUND: 2>",
    ),
    Difference(
        'asking("batch", ["Y"]).exec().error().message()',
        '"Model batch - Error when running inference: [request id: <id_unknown>] expected 1 inputs',
        '"Model batch - Error when running inference: expected 1 inputs',
    ),
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.code[:100])
def test_a_difference_is_what_it_is_said_to_be(both: Both, difference: Difference) -> None:
    theirs, ours = both.said(difference.code)

    assert theirs.startswith(difference.theirs)
    assert ours.startswith(difference.ours)


@pytest.mark.parametrize("difference", OF_THE_CORE, ids=lambda difference: difference.code[:100])
def test_a_difference_of_the_core_is_what_it_is_said_to_be(both: Both, difference: Difference) -> None:
    theirs, ours = both.said(difference.code)

    assert theirs.startswith(difference.theirs)
    assert ours.startswith(difference.ours)


@pytest.mark.promise("Readiness", "A model that asks a model …")
@pytest.mark.parametrize("difference", NEWER_TEXTS, ids=lambda difference: difference.code[:100])
def test_a_text_is_that_of_todays_triton(both: Both, difference: Difference) -> None:
    assert both.said(difference.code) == (difference.theirs, difference.ours)


# Triton's stub or its server dies of each of these, so only moonpool is asked.
SURVIVED = {
    "an array by DLPack": (
        'pb_utils.Tensor.from_dlpack("X", np.arange(3, dtype=np.int32))',
        "Tensor('X', [3], array(<i4, (3,), list[0, 1, 2]))",
    ),
    "an array by its capsule": (
        'pb_utils.Tensor.from_dlpack("X", np.arange(3, dtype=np.int32).__dlpack__())',
        "Tensor('X', [3], array(<i4, (3,), list[0, 1, 2]))",
    ),
    "an error without outputs, to another model": (
        'asking("batch", ["Y"], X=np.full((1, 2), -3, np.int32)).exec()',
        "Response(list[], TritonError(__ErrorCode.NOT_FOUND, 'refused -3'))",
    ),
    "a load of a model that is nowhere": (
        "try: pb_utils.load_model('nothing_of_that_name')\n"
        "except pb_utils.TritonModelException as error: said = str(error)\n"
        "said.startswith('Failed to load model: ')",
        "True",
    ),
    "a metric whose name it cannot have": (
        'pb_utils.MetricFamily("with space", "d", pb_utils.MetricFamily.COUNTER)',
        MODEL_EXCEPTION + "Error when creating MetricFamily: Failed to process the request for model "
        "'snippets_0_0', message: Invalid metric name",
    ),
    "a loop that is cancelled, which is newer than this Triton": (
        'asking("streams", ["Y"], "sender.send(y(1), FINAL)").exec(decoupled=True).cancel()',
        "None",
    ),
    "is_cancelled of a request of the model's making": (f"{REQUEST}).is_cancelled()", "False"),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_calls_that_triton_dies_of_do_no_harm(both: Both, name: str) -> None:
    code, said = SURVIVED[name]

    assert both.ours(code) == said


def test_a_sender_may_be_asked_after_the_end(both: Both) -> None:
    lines = "sender.send(y(1), FINAL)\nattempt(sender.is_cancelled)"

    assert isinstance(both.moonpool.infer("sends", code_of(lines)), Answer)
    assert isinstance(both.moonpool.infer("sends", LAST), Answer)


@pytest.mark.parametrize("after", ["raise ValueError('on purpose')", "returned = [y(2)]"])
def test_an_exception_after_the_last_response_harms_nobody(both: Both, after: str) -> None:
    outcome = both.moonpool.infer("sends", code_of(f"sender.send(y(1), FINAL)\n{after}"))

    assert isinstance(outcome, Answer)
    assert outcome.outputs == {"Y": output_of(np.ones(1, np.float32))}
    assert isinstance(both.moonpool.infer("sends", LAST), Answer)


@pytest.mark.promise("Responses at any time", "If a model that is …")
@pytest.mark.parametrize("after", ["sender.send(y(2))", "raise ValueError('on purpose')", "returned = [y(2)]"])
def test_an_answer_that_was_sent_stands(both: Both, after: str) -> None:
    inputs = code_of(f"sender.send(y(1))\n{after}")

    theirs, ours = both.triton.infer("sends", inputs), both.moonpool.infer("sends", inputs)

    assert theirs == Failure("INTERNAL", "expected a single response, got 2")
    assert isinstance(ours, Answer)
    assert ours.outputs == {"Y": output_of(np.ones(1, np.float32))}
    assert isinstance(both.moonpool.infer("sends", LAST), Answer)


@pytest.mark.parametrize("model", ["sends", "streams"])
def test_a_request_that_nobody_can_answer_ends(both: Both, model: str) -> None:
    (outcome,) = both.moonpool.stream(model, code_of("del sender"))

    assert isinstance(outcome, Failure)
    assert outcome.text.startswith("the model ended without a last response to this request")


def test_a_generator_is_a_wrong_return(both: Both) -> None:
    outcome = both.moonpool.infer("returns", code_of("(x for x in [])"))

    assert outcome == Failure(
        "INTERNAL",
        "Failed to process the request(s) for model 'returns_0_0', message: Expected a list in the "
        "execute return, found type '<class 'generator'>'.",
    )


# The module's own names, and those of moonpool that docs/TRITON_MODELS.md explains.
MORE = {
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "InferenceResponseSender",
    "InferenceTrace",
    "MemoryType",
    "Metric",
    "MetricKind",
    "ResponseIterator",
    "empty",
}


def test_the_module_lists_tritons_names_and_few_of_its_own(both: Both) -> None:
    theirs, ours = both.said("' '.join(name for name in dir(pb_utils) if not name.startswith('_'))")

    assert {*ours.strip("'").split()} == {*theirs.strip("'").split(), *MORE}
