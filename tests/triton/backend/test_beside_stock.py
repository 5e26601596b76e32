"""A model in moonpool's stubs and in those of Triton's backend, in one server, gets and answers the same."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

# The model answers with what it sees of a request, and adds to its state.
SEES = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.batching = json.loads(args["model_config"]).get("sequence_batching", {})

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        states = [each["output_name"] for each in self.batching.get("state", ())]
        seen = {"states": states, "inputs": {}}
        for tensor in request.inputs():
            array = tensor.as_numpy()
            seen["inputs"][tensor.name()] = [str(array.dtype), array.shape, str(array.ravel()[:3])]
        text = np.array([json.dumps(seen)], object)
        tensors = [pb_utils.Tensor("Y", text)]
        if states:
            tensors.append(pb_utils.Tensor("NEXT", np.array([7], np.int32)))
        return pb_utils.InferenceResponse(tensors)
"""
# The model asks itself, and hands its trace on.
ASKS_ITSELF = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        left = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0].decode())
        context = request.trace().get_context()
        if left > 0:
            asked = pb_utils.InferenceRequest(
                model_name=self.name, requested_output_names=["Y"], trace=request.trace(),
                inputs=[pb_utils.Tensor("X", np.array([str(left - 1)], object))],
            )
            asked.exec()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([repr(context)], object))])
"""
# The model answers with what it sees of the server's environment.
LOOKS_AROUND = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        seen = np.array([json.dumps(dict(os.environ))], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", seen)]) for _ in requests]
"""
CONFIG = """
backend: "{backend}"
input [ {{ name: "X" data_type: {datatype} dims: [-1] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [-1] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
{more}
"""
STATES = """
sequence_batching {
  state [ {
    input_name: "STATE" output_name: "NEXT" data_type: TYPE_INT32 dims: [1]
    initial_state: { name: "zero" data_type: TYPE_INT32 dims: [1] zero_data: true }
  } ]
}
"""
CORRELATION = """
sequence_batching {{
  control_input [ {{ name: "ID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {} }} ] }} ]
}}
"""
ID_TYPES = ["TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING"]
MODELS = {
    "states": (SEES, "TYPE_FP32", 1, STATES),
    "strings": (SEES, "TYPE_STRING", 1, ""),
    "looks_around": (LOOKS_AROUND, "TYPE_FP32", 1, ""),
    "asks_itself": (ASKS_ITSELF, "TYPE_STRING", 3, ""),
    **{f"ids_{each}": (SEES, "TYPE_FP32", 1, CORRELATION.format(each)) for each in ID_TYPES},
}
BACKENDS = {"stock": "python", "ours": "moonpool"}


@pytest.fixture(scope="module", autouse=True)
def models(repository: Path, server: HostingServer) -> Iterator[None]:
    """Each in both backends, loaded for the tests of this file."""
    names = []
    for side, backend in BACKENDS.items():
        for name, (text, datatype, count, more) in MODELS.items():
            names.append(f"{side}_{name}")
            folder = repository / names[-1]
            (folder / "1").mkdir(parents=True)
            config = CONFIG.format(backend=backend, datatype=datatype, count=count, more=more)
            (folder / "config.pbtxt").write_text(config)
            (folder / "1" / "model.py").write_text(text)
    client = Client(server)
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(client.load, names)]
        yield
        assert [*threads.map(client.unload, names)]
    client.close()


def asked(client: Client, model: str, array: np.ndarray, **options: Any) -> tuple[Any, Any]:
    """Return the answers or errors of both backends, Triton's first, without the model's name."""

    def ask(side: str) -> Any:
        try:
            (said,) = client.infer(f"{side}_{model}", array, **options)
            return json.loads(said)
        except InferenceServerException as error:
            return str(error).replace(f"{side}_", "")

    theirs, ours = map(ask, BACKENDS)
    return theirs, ours


@pytest.mark.promise(
    "Executing in a tritonserver",
    "States that the server keeps of a sequence, and its id in every datatype, are inputs of "
    "the model as with Triton's backend.",
)
def test_states_that_the_server_keeps_are_inputs(client: Client) -> None:
    x = np.ones(2, np.float32)
    options: list[dict[str, Any]] = [{"sequence_start": True}, {}, {"sequence_end": True}]
    for each in options:
        theirs, ours = asked(client, "states", x, sequence_id=7, **each)
        assert ours == theirs
        assert ours["inputs"]["STATE"] == ["int32", [1], "[0]"]
        assert ours["states"] == ["NEXT"]


@pytest.mark.promise("Executing in a tritonserver", "States that the server keeps of …")
@pytest.mark.parametrize("datatype", ID_TYPES)
@pytest.mark.parametrize("which", [7, 2**31 + 5, 2**62, "some"], ids=str)
def test_the_id_of_a_sequence_is_an_input_of_each_datatype(client: Client, datatype: str, which: int | str) -> None:
    x = np.ones(2, np.float32)
    for each in ({"sequence_start": True}, {}, {"sequence_end": True}):
        theirs, ours = asked(client, f"ids_{datatype}", x, sequence_id=which, **each)
        assert ours == theirs


@pytest.mark.promise("The launcher of a tritonserver", "The server's open files do not …")
def test_the_environment_of_the_server_is_a_models(client: Client) -> None:
    theirs, ours = asked(client, "looks_around", np.ones(1, np.float32))
    # The shell that starts Triton's stubs says which directory it is in.
    assert {**ours, "PWD": ""} == {**theirs, "PWD": ""}
    assert {"PATH", "LD_LIBRARY_PATH", "PYTEST_CURRENT_TEST"} <= set(ours)


MALFORMED = {
    "nothing": (2, b""),
    "a length cut short": (1, b"\x01\x00"),
    "a text cut short": (1, struct.pack("<I", 5) + b"ab"),
    "a huge length": (1, b"\xff\xff\xff\xff"),
    "too few": (3, struct.pack("<I", 1) + b"a"),
    "too many": (1, 2 * (struct.pack("<I", 1) + b"a")),
    "something behind": (1, struct.pack("<I", 1) + b"abc"),
}


@pytest.mark.promise(
    "Executing in a tritonserver",
    "An input that does not hold as many strings as its shape says is refused in Triton's "
    "words, before the model sees it.",
)
@pytest.mark.parametrize("case", MALFORMED)
def test_strings_that_are_none_are_refused_alike(server: HostingServer, case: str) -> None:
    theirs, ours = (posted(server, f"{side}_strings", *MALFORMED[case]) for side in BACKENDS)
    assert ours.replace("ours_", "") == theirs.replace("stock_", "")
    assert "error" in json.loads(ours)


def posted(server: HostingServer, model: str, count: int, strings: bytes) -> str:
    """Return the server's answer to an input of so many strings, whose bytes are sent as they are."""
    header = json.dumps(
        {
            "inputs": [
                {"name": "X", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": len(strings)}}
            ]
        }
    ).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/v2/models/{model}/infer",
        header + strings,
        {"Inference-Header-Content-Length": str(len(header))},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


@pytest.mark.promise(
    "Executing in a tritonserver",
    "If a model makes a request with the trace of another one, its trace is a child of that "
    "one, as with Triton's backend.",
)
def test_requests_of_a_traced_model_are_traced_below_it(client: Client, server: HostingServer) -> None:
    for side in BACKENDS:
        model = f"{side}_asks_itself"
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
        client.grpc.update_trace_settings(model, settings)
        (context,) = client.infer(model, np.array(["2"], object))
        client.grpc.update_trace_settings(model, {"trace_level": ["OFF"]})
        assert context == b"None"
        wait_until(partial(are_nested, server, model), TIMEOUT_S, "the traces of three requests")


def are_nested(server: HostingServer, model: str) -> bool:
    """Return true if a request, a request that it made, and a third that this one made are all traced."""
    traces = [each for each in server.traces() if each["model_name"] == model]
    parents = {each["id"]: each.get("parent_id", 0) for each in traces}

    def depth(number: int) -> int:
        return 1 + depth(parents[number]) if parents[number] in parents else 0

    return sorted(map(depth, parents)) == [0, 1, 2]
