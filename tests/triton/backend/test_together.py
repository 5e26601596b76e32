"""Models of both backends in one server: an ensemble of them, an environment and a sandbox of their own, and such as
come and go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer
from tests.triton.backend.zoo import IDENTITY
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

INCREMENTS = IDENTITY.replace("array.copy()", "array + 1")
# The model evaluates its input, and answers with the result or the type of the exception.
EVALUATES = """
import importlib.util, os, socket, sys
import numpy as np
import triton_python_backend_utils as pb_utils

def said(text):
    try:
        return str(eval(text))
    except Exception as error:
        return type(error).__name__

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy()[0].decode() for r in requests]
        arrays = [np.array([said(text)], object) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in arrays]
"""
CONFIG = """
{kind}
input [ {{ name: "X" data_type: {datatype} dims: [-1] }} ]
output [ {{ name: "Y" data_type: {datatype} dims: [-1] }} ]
{more}
"""
STEP = """
step {{
  model_name: "{model}" model_version: -1
  input_map {{ key: "X" value: "{x}" }} output_map {{ key: "Y" value: "{y}" }}
}}
"""
OPTION = 'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
NAMES = ["X", "A", "B", "Y"]
STEPS = ["ours", "theirs", "ours"]
ENSEMBLE = "\n".join(STEP.format(model=model, x=x, y=y) for model, x, y in zip(STEPS, NAMES, NAMES[1:], strict=False))
ROUNDS = 20
ARRAY = np.arange(1000, dtype=np.uint16).astype(np.uint8)


def write(repository: Path, name: str, text: str = "", more: str = "", backend: str = "moonpool") -> None:
    (repository / name / "1").mkdir(parents=True)
    kind, group = f'backend: "{backend}"', "instance_group { kind: KIND_CPU }\n"
    if not text:
        kind, group = 'platform: "ensemble"', ""
    datatype = "TYPE_STRING" if text.startswith(EVALUATES) else "TYPE_UINT8"
    config = CONFIG.format(kind=kind, datatype=datatype, more=group + more)
    (repository / name / "config.pbtxt").write_text(config)
    if text:
        (repository / name / "1" / "model.py").write_text(text)


@pytest.fixture(scope="module", autouse=True)
def models(repository: Path, server: HostingServer) -> Iterator[None]:
    """Loaded for the tests of this file."""
    write(repository, "ours", INCREMENTS)
    write(repository, "theirs", INCREMENTS, backend="python")
    write(repository, "together", more=f"ensemble_scheduling {{ {ENSEMBLE} }}")
    environment = OPTION.format(key="EXECUTION_ENV_PATH", value=interpreter().parents[1])
    write(repository, "elsewhere", EVALUATES, environment)
    write(repository, "strict", EVALUATES, OPTION.format(key="MOONPOOL_SANDBOX", value="strict"))
    write(repository, "free", EVALUATES)
    write(repository, "comes_and_goes", INCREMENTS)
    names = ["together", "elsewhere", "strict", "free"]
    client = Client(server)
    with ThreadPoolExecutor(len(names)) as threads:
        for _ in threads.map(client.load, names):
            pass
        yield
        for _ in threads.map(client.unload, names):
            pass
    client.close()


def evaluate(client: Client, model: str, text: str) -> str:
    (said,) = client.infer(model, np.array([text], object))
    return str(said.decode())


@pytest.mark.promise("Executing in a tritonserver", "Models of both backends are steps of one ensemble.")
def test_an_ensemble_has_steps_of_both_backends(client: Client) -> None:
    for size in (0, 3, 1 << 20):
        array = np.arange(size, dtype=np.int64).astype(np.uint8)

        assert np.array_equal(client.infer("together", array), array + 3)


@pytest.mark.promise(
    "Executing in a tritonserver",
    "In a tritonserver, too, a model has the environment that it names. In the sandbox `strict` "
    "it reaches nothing of the server, of other models or of the network.",
)
def test_a_model_has_the_environment_that_it_names(client: Client) -> None:
    there = str(interpreter().parents[1])

    assert evaluate(client, "elsewhere", "sys.prefix") == there
    found = evaluate(client, "elsewhere", "importlib.util.find_spec('pytriton').origin")
    assert found.startswith(there)
    assert evaluate(client, "free", "sys.prefix") != there


@pytest.mark.promise("Executing in a tritonserver", "In a tritonserver, too, a model has …")
def test_a_model_in_the_sandbox_strict_has_nothing_of_the_server(
    client: Client, server: HostingServer, repository: Path
) -> None:
    other = repository / "free" / "1" / "model.py"
    # In the mounts that root makes for a model, the file is missing. Without root, the sandbox refuses it.
    closed = "FileNotFoundError" if os.geteuid() == 0 else "PermissionError"
    attempts = {
        f"open({str(other)!r}).close()": ("None", closed),
        f"open('/proc/{server.pid}/environ').close()": ("None", "PermissionError"),
        f"socket.create_connection(('127.0.0.1', {server.grpc_port})).close()": ("None", "PermissionError"),
    }
    for text, (free, strict) in attempts.items():
        assert evaluate(client, "free", text) == free
        assert evaluate(client, "strict", text) == strict


@pytest.mark.promise(
    "Executing in a tritonserver",
    "A model may be loaded and unloaded while requests come to it. No request that has reached "
    "it is lost, and nothing grows.",
)
def test_a_model_comes_and_goes_while_it_is_asked(client: Client, server: HostingServer) -> None:
    is_over = Event()
    answered: set[int] = set()

    def ask(asker: int) -> set[str]:
        """Send requests until the test is over, and return the errors."""
        refusals = set()
        while not is_over.is_set():
            try:
                assert np.array_equal(client.infer("comes_and_goes", ARRAY), ARRAY + 1)
                answered.add(asker)
            except InferenceServerException as error:
                refusals.add(error.message())
                is_over.wait(0.01)
        return refusals

    found = []
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, asker) for asker in range(4)]
        try:
            for _ in range(ROUNDS):
                client.load("comes_and_goes")
                assert np.array_equal(client.infer("comes_and_goes", ARRAY), ARRAY + 1)
                wait_until(lambda: len(answered) == 4, TIMEOUT_S, "each to be answered once")
                client.unload("comes_and_goes")
                found.append(server.facts())
        finally:
            is_over.set()
        refusals = set().union(*(each.result() for each in asking))

    # These are the server's own words, so no refused request had reached the model.
    for text in refusals:
        assert text.startswith("Request for unknown model: 'comes_and_goes' "), text
    wait_until(lambda: server.has_no_more_than(found[ROUNDS // 2]), TIMEOUT_S, f"no more than {found}")
