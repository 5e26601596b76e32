"""tritonclient's own shared memory, over both protocols."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.server.running import RunningServer

# In a process of its own: with Python's own shared memory comes a process that outlives what it was for.
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


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_stay_in_shared_memory(server: RunningServer, protocol: str) -> None:
    pytest.importorskip(f"tritonclient.{protocol}")
    address = server.http if protocol == "http" else server.grpc
    command = [sys.executable, "-c", CLIENT, protocol, address]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[[0.5, 1.5, 2.5, 3.5], [-0.5, 0.5, 1.5, 2.5]]\n"


# Large enough to be lent; the same request again and again, with other numbers.
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
def test_large_tensors_are_where_the_client_wants_them(
    server: RunningServer, protocol: str
) -> None:
    pytest.importorskip(f"tritonclient.{protocol}")
    address = server.http if protocol == "http" else server.grpc
    command = [sys.executable, "-c", LARGE, protocol, address]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == 4 * "True\n"
