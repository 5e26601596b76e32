"""A model on a GPU behind a server: clients send bytes and get bytes, wherever the model leaves its outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.e2e.hosting import MODELS
from tests.gpu.cards import Fake
from tests.server.running import running

pytestmark = pytest.mark.promise(
    "GPUs in the runtime", "Clients of a server get bytes, in whichever memory a model leaves its outputs."
)

CONFIG = """
    backend: "python"
    input [
      { name: "X" data_type: TYPE_FP32 dims: [ -1 ] },
      { name: "HOW" data_type: TYPE_STRING dims: [ 1 ] }
    ]
    output [
      { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
      { name: "ON_CPU" data_type: TYPE_BOOL dims: [ 1 ] }
    ]
    instance_group { kind: KIND_GPU }
    parameters { key: "MOONPOOL_GPU_AS_NUMPY" value { string_value: "copy" } }
"""


def test_clients_get_the_bytes_of_what_a_model_leaves_on_a_device(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    shutil.copy(MODELS / "on_device.py", tmp_path / "m" / "1" / "model.py")
    x = {"name": "X", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}
    how = {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": ["add"]}
    body = json.dumps({"inputs": [x, how]}).encode()
    variables = {"LD_LIBRARY_PATH": str(fake.library.parent)}

    with running(tmp_path, variables=variables) as server:
        for _ in range(3):
            status, answer = server.get("/v2/models/m/infer", "POST", body)

            assert status == 200, answer
            assert answer["outputs"][0]["data"] == [2, 3, 4]
