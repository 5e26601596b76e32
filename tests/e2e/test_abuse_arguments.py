"""Calls every function and constructor of `pb_utils` with every wrong value, in a real stub."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool

CONFIG: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}
VALUES = (
    "None", "True", "0", "-1", "3.5", "2**31", "2**63", "2**64", "2**70", "float('nan')", "''", "'x'",
    "b'x'", "b'\\xff'", "'\\ud800'", "'a\\0b'", "'x' * 10**6", "[]", "[None]", "['x']", "[3]", "()", "{}",
    "{'k': 1}", "{'k': 2**70}", "{'k': None}", "{'k': float('nan')}", "{3: 1}", "{'k': '\\ud800'}",
    "{'\\ud800': 1}", "{'k': []}", "object()", "int", "print", "lambda: 0", "...", "NotImplemented",
    "np.zeros(2)", "np.zeros(0)", "np.array(None)", "np.zeros(2, complex)", "np.zeros(2, '>f4')",
    "np.array(['x'])", "np.zeros(1, 'M8[s]')", "np.zeros(1, [('a', 'f4')])", "np.int64(3)", "np.str_('s')",
    "set()", "iter([])", "range(2)", "(i for i in [])", "memoryview(b'x')", "bytearray(b'x')", "sys", "Exception()",
    "pb_utils.Tensor", "pb_utils.Tensor('X', np.zeros(2))", "[pb_utils.Tensor('X', np.zeros(2))]",
    "pb_utils.InferenceResponse()", "request", "pb_utils.TritonError('e')", "pb_utils.TritonError.INTERNAL",
    "pb_utils.InferenceTrace.__new__(pb_utils.InferenceTrace)", "request.get_response_sender()",
    "type('S', (str,), {'__str__': lambda s: 1 / 0, 'encode': lambda s: 1 / 0})('evil')",
    "type('I', (), {'__index__': lambda s: 1 / 0})()", "type('B', (), {'__bool__': lambda s: 1 / 0})()",
    "type('R', (), {'__repr__': lambda s: 1 / 0})()", "type('L', (list,), {'__iter__': lambda s: 1 / 0})([1])",
    "type('D', (dict,), {'items': lambda s: 1 / 0})(k=1)",
)  # fmt: skip
_REQUEST = "pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name='m'"
TARGETS = (
    "pb_utils.Tensor({})",
    "pb_utils.Tensor({}, np.zeros(2))",
    "pb_utils.Tensor('X', {})",
    "pb_utils.Tensor('X', np.zeros(2), {})",
    "pb_utils.Tensor.from_dlpack({}, np.zeros(2))",
    "pb_utils.Tensor.from_dlpack('X', {})",
    "pb_utils.Tensor('X', np.zeros(2)).__dlpack__(stream={})",
    "pb_utils.Tensor('X', np.zeros(2)).__dlpack__(max_version={})",
    "pb_utils.Tensor('X', np.zeros(2)).__dlpack__(dl_device={})",
    "pb_utils.TritonError({})",
    "pb_utils.TritonError('x', {})",
    "pb_utils.TritonModelException({})",
    "pb_utils.InferenceResponse({})",
    "pb_utils.InferenceResponse([], {})",
    "pb_utils.InferenceResponse(parameters={})",
    "pb_utils.InferenceRequest(inputs={}, requested_output_names=[], model_name='m')",
    "pb_utils.InferenceRequest(inputs=[], requested_output_names={}, model_name='m')",
    "pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name={})",
    *(
        f"{_REQUEST}, {name}={{}})"
        for name in ["request_id", "correlation_id", "model_version", "flags", "timeout", "preferred_memory", "trace", "parameters"]
    ),
    f"{_REQUEST}).set_flags({{}})",
    f"{_REQUEST}).set_release_flags({{}})",
    f"{_REQUEST}).get_response_sender().send({{}})",
    "pb_utils.InferenceRequest({})",
    "pb_utils.InferenceTrace({})",
    "pb_utils.InferenceResponseSender({})",
    "pb_utils.ResponseIterator({})",
    "pb_utils.PreferredMemory({})",
    "pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, {})",
    "pb_utils.Logger.log({})",
    "pb_utils.Logger.log('x', {})",
    "pb_utils.Logger.log_info({})",
    "pb_utils.MetricFamily({}, 'd', pb_utils.MetricFamily.COUNTER)",
    "pb_utils.MetricFamily('n', {}, pb_utils.MetricFamily.COUNTER)",
    "pb_utils.MetricFamily('n', 'd', {})",
    "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.COUNTER).Metric(labels={})",
    "pb_utils.MetricFamily('h', 'd', pb_utils.MetricFamily.HISTOGRAM).Metric(buckets={})",
    "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.COUNTER).Metric().increment({})",
    "pb_utils.MetricFamily('g', 'd', pb_utils.MetricFamily.GAUGE).Metric().set({})",
    "pb_utils.load_model({})",
    "pb_utils.load_model('nobody', {})",
    "pb_utils.load_model('nobody', '', {})",
    "pb_utils.unload_model({})",
    "pb_utils.is_model_ready({})",
    "pb_utils.is_model_ready('nobody', {})",
    "pb_utils.ModelConfig({})",
    "pb_utils.ModelConfig('{{}}').add_input({})",
    "pb_utils.ModelConfig('{{}}').set_max_batch_size({})",
    "pb_utils.get_input_tensor_by_name(request, {})",
    "pb_utils.get_input_tensor_by_name({}, 'X')",
    "pb_utils.get_output_config_by_name({}, 'X')",
    "pb_utils.triton_string_to_numpy({})",
    "pb_utils.triton_to_numpy_type({})",
    "pb_utils.numpy_to_triton_type({})",
    "pb_utils.serialize_byte_tensor({})",
    "pb_utils.deserialize_bytes_tensor({})",
    "pb_utils.using_decoupled_model_transaction_policy({})",
    "pb_utils.empty({})",
    "pb_utils.empty(3, {})",
)  # fmt: skip
# These are plain functions in Triton, too, and fail with Python's own texts.
PYTHONS = (
    "pb_utils.get_", "pb_utils.triton", "pb_utils.numpy", "pb_utils.serialize", "pb_utils.deserialize",
    "pb_utils.using", "pb_utils.ModelConfig", "pb_utils.empty", "pb_utils.Tensor.from_dlpack('X'",
    "pb_utils.Tensor('X', np.zeros(2)).__dlpack__",
)  # fmt: skip
OURS = ("TypeError", "TritonModelException", "BufferError", "ValueError", "RuntimeError")


@pytest.fixture(scope="module")
def evaluating(runtime: moonpool.Runtime) -> Iterator[object]:
    with hosted(runtime, "m", MODELS / "evaluate.py", CONFIG):
        yield runtime.instances("m")[0]["pid"]


@pytest.mark.promise(
    "Abuse", "Every wrong value in every argument of `pb_utils` is refused or accepted, and does no harm."
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_value_is_refused_or_taken_and_no_more(
    runtime: moonpool.Runtime, evaluating: object, target: str
) -> None:
    codes = np.array([target.format(value).encode() for value in VALUES], np.object_)

    said = runtime.infer("m", {"CODE": codes}, timeout_s=60.0)["SAID"]

    for code, text in zip(codes, said, strict=True):
        kind, colon, _ = text.decode().partition(":")
        if colon and kind.isidentifier() and kind.endswith(("Error", "Exception", "Iteration")):
            # Errors that a value's own methods raise are passed on.
            allowed = kind in OURS or (kind == "ZeroDivisionError" and b"1 / 0" in code)
            assert allowed or target.startswith(PYTHONS), f"{code.decode()}: {text.decode()}"
    assert runtime.instances("m")[0]["pid"] == evaluating
