"""tritonclient's own shared memory, over both protocols."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.page.models import write
from tests.server.running import RunningServer, running

# The client has a process of its own, because Python's shared memory starts a process that outlives its use.
CLIENT = """
import os
import sys
import numpy as np
import tritonclient.utils.shared_memory as memory
kind = __import__(f"tritonclient.{sys.argv[1]}", fromlist=["InferInput"])
left, right = np.arange(4, dtype=np.float32), np.full(4, 0.5, np.float32)
key = f"/moonpool-clients-{os.getpid()}"
handle = memory.create_shared_memory_region("r", key, 64)
try:
    memory.set_shared_memory_region(handle, [left, right])
    client = kind.InferenceServerClient(sys.argv[2])
    client.register_system_shared_memory("r", key, 64)
    inputs = [kind.InferInput(name, [4], "FP32") for name in ("INPUT0", "INPUT1")]
    outputs = [kind.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    for index, tensor in enumerate([*inputs, *outputs]):
        tensor.set_shared_memory("r", 16, offset=16 * index)
    client.infer("add_sub", inputs, outputs=outputs)
    client.unregister_system_shared_memory("r")
    client.close()
    print(memory.get_contents_as_numpy(handle, np.float32, [4, 4])[2:].tolist())
finally:
    memory.destroy_shared_memory_region(handle)
"""


# The tensors are large enough to be lent. The client repeats one request with other numbers.
LARGE = """
import os
import sys
import numpy as np
import tritonclient.utils.shared_memory as memory
kind = __import__(f"tritonclient.{sys.argv[1]}", fromlist=["InferInput"])
count = 1 << 16
key = f"/moonpool-large-{os.getpid()}"
handle = memory.create_shared_memory_region("large", key, 8 * count)
try:
    client = kind.InferenceServerClient(sys.argv[2])
    client.register_system_shared_memory("large", key, 8 * count)
    given, wanted = kind.InferInput("IN_FP32", [count], "FP32"), kind.InferRequestedOutput("OUT_FP32")
    given.set_shared_memory("large", 4 * count)
    wanted.set_shared_memory("large", 4 * count, offset=4 * count)
    for first in range(4):
        values = np.arange(first, first + count, dtype=np.float32)
        memory.set_shared_memory_region(handle, [values, -values])
        client.infer("every", [given], outputs=[wanted])
        found = memory.get_contents_as_numpy(handle, np.float32, [2, count])
        print((found == values).all())
    client.unregister_system_shared_memory("large")
    client.close()
finally:
    memory.destroy_shared_memory_region(handle)
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("program", "printed"),
    [(CLIENT, "[[0.5, 1.5, 2.5, 3.5], [-0.5, 0.5, 1.5, 2.5]]\n"), (LARGE, 4 * "True\n")],
    ids=["small", "large"],
)
def test_tensors_stay_in_shared_memory(server: RunningServer, protocol: str, program: str, printed: str) -> None:
    pytest.importorskip(f"tritonclient.{protocol}")
    address = server.http if protocol == "http" else server.grpc
    command = [sys.executable, "-c", program, protocol, address]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == printed


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a server without the option for clients' memory."""
    repository = write(tmp_path_factory.mktemp("models"), "add_sub")
    with running(repository, shares_memory=False) as found:
        yield found


# The client makes each call in turn and prints the server's error, and at the end whether the model was asked.
REFUSED = """
import sys
import tritonclient.utils
kind = __import__(f"tritonclient.{sys.argv[1]}", fromlist=["InferInput"])
client = kind.InferenceServerClient(sys.argv[2])
def tried(call):
    try:
        call()
    except tritonclient.utils.InferenceServerException as error:
        print(error.message())
    else:
        print("taken")
def infer(where):
    inputs = [kind.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
    outputs = [kind.InferRequestedOutput("OUTPUT0")]
    for tensor in inputs:
        if where == "input":
            tensor.set_shared_memory("r", 16)
        else:
            tensor.set_data_from_numpy(__import__("numpy").zeros((1, 4), "float32"))
    if where == "output":
        outputs[0].set_shared_memory("r", 16)
    client.infer("add_sub", inputs, outputs=outputs)
tried(lambda: client.register_system_shared_memory("r", "/r", 64))
tried(lambda: client.register_cuda_shared_memory("r", b"eHg=", 0, 64))
tried(lambda: client.unregister_system_shared_memory())
tried(lambda: client.unregister_cuda_shared_memory("r"))
tried(lambda: infer("input"))
tried(lambda: infer("output"))
tried(lambda: infer("neither"))
client.close()
"""


@pytest.mark.promise(
    "HTTP",
    "Clients register, unregister and use shared memory only with `--allow-client-shm=true`. "
    "The refusal names this flag, and `moonpool bench` passes the refusal on.",
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_clients_share_no_memory_unless_the_server_is_told_to_let_them(closed: RunningServer, protocol: str) -> None:
    pytest.importorskip(f"tritonclient.{protocol}")
    address = closed.http if protocol == "http" else closed.grpc
    command = [sys.executable, "-c", REFUSED, protocol, address]
    asked = closed.get("/v2/models/add_sub/stats")[1]["model_stats"][0]["inference_count"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)

    refusal = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    assert ended.stdout.splitlines() == [refusal] * 6 + ["taken"], ended.stderr
    assert closed.get("/v2/systemsharedmemory/status") == (200, [])
    counted = closed.get("/v2/models/add_sub/stats")[1]["model_stats"][0]["inference_count"]
    assert counted == asked + 1


@pytest.mark.promise("HTTP", "Clients register, unregister and use shared …")
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_moonpool_bench_passes_the_refusal_on(closed: RunningServer, scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://127.0.0.1:{closed.ports[scheme]}"
    command = [sys.executable, "-m", "moonpool", "bench", "add_sub", "--url", url]
    command += ["--shared-memory", "system", "--windows", "1", "--seconds", "0.1"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, cwd=tmp_path)

    assert ended.returncode != 0
    assert "--allow-client-shm=true" in ended.stderr
