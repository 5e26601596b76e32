"""A contained model on a GPU: it gets what it is sent, and its GPU alone. The driver is a fake, which needs no
nodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS
from tests.gpu.cards import Fake
from tests.runtime.devices.conftest import FakeHost, Foreign, Host, on_host

import moonpool
from moonpool.ipc.errors import CudaUnavailable
from moonpool.runtime.isolation import gpu_access

pytestmark = pytest.mark.promise(
    "GPUs in the runtime",
    "A contained instance gets the nodes of the driver and of its own GPU, and sees only "
    "that GPU. It gets one only if its configuration and the server name it.",
)

VALUES = np.arange(16, dtype=np.float32)


@pytest.fixture
def strict(fake_host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    (tmp_path / "0000:10:00.0").mkdir()
    (tmp_path / "0000:10:00.0" / "information").write_text("Device Minor: 0\n")
    monkeypatch.setattr(gpu_access, "_INFORMATION", f"{tmp_path}/{{}}/information")
    # The fake driver knows GPUs by their numbers only.
    monkeypatch.setattr(gpu_access, "uuid", str)
    fake_host.load(SANDBOX="strict")
    return fake_host


@pytest.mark.parametrize("how", ["pass", "add"])
def test_arrays_on_a_device_go_in_and_out_by_descriptor(strict: Host, how: str) -> None:
    for x in (strict.on_device(VALUES), Foreign(VALUES), VALUES):
        y, _ = strict.infer(x, how)

        assert (on_host(y) == VALUES + (how == "add")).all()


def test_device_memory_without_descriptors_is_an_error_of_the_request_and_the_instance_lives(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("FAKE_CUDA_NO_DESCRIPTORS", "1")
    strict: Host = request.getfixturevalue("strict")
    process = strict.runtime.instances("m")[0]["pid"]
    needed = r"device 0 \(Fake GPU 0\) does not share memory by descriptor .* MOONPOOL_SANDBOX"

    with pytest.raises(CudaUnavailable, match=needed):
        strict.infer(strict.on_device(VALUES))
    with pytest.raises(moonpool.ModelError, match=needed):
        strict.infer(VALUES, "add")
    y, _ = strict.infer(VALUES)

    assert (on_host(y) == VALUES).all()
    assert strict.runtime.instances("m")[0]["pid"] == process


def test_it_is_said_what_it_was_given(strict: Host) -> None:
    sandbox = strict.runtime.instances("m")[0]["sandbox"]

    assert "use GPU 0" in sandbox["granted"]
    assert "seccomp" in sandbox["layers"]


PROGRAM = """
    import json, pathlib, sys, tempfile
    import numpy as np
    import moonpool
    from moonpool.runtime.isolation import gpu_access

    folder = pathlib.Path(sys.argv[2])
    for bus in ("10", "11"):
        (folder / f"0000:{bus}:00.0").mkdir()
        (folder / f"0000:{bus}:00.0" / "information").write_text("Device Minor: 0")
    gpu_access._INFORMATION = f"{folder}/{{}}/information"
    gpu_access.uuid = str
    x = {"data_type": "TYPE_FP32", "dims": [-1]}
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "MOONPOOL_GPU_AS_NUMPY": "copy"}
    given |= {"MOONPOOL_ENVIRONMENT": "FAKE_*", "MOONPOOL_SANDBOX": "strict"}
    config = {
        "input": [{"name": "X", **x}, {"name": "HOW", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "Y", **x}, {"name": "ON_CPU", "data_type": "TYPE_BOOL", "dims": [1]}],
        "parameters": {key: {"string_value": value} for key, value in given.items()},
        "instance_group": [{"kind": "KIND_GPU", "gpus": [1]}],
    }
    came = []
    with moonpool.Runtime() as runtime:
        runtime.load("m", sys.argv[1], config=config)
        for gpu in (0, 1):
            array = runtime.empty("m", "X", (4,), device=gpu)
            array.device.write(array.address, np.full(4, gpu, np.float32))
            for how in (b"pass", b"add"):
                y = runtime.infer("m", {"X": array, "HOW": np.array([how], object)})["Y"]
                came.append([y.device.ordinal, *map(int, y.to_host())])
        wanted = {"X": np.zeros(4, np.float32), "HOW": np.array([b"pass"], object)}
        for where in ("gpu:1", "gpu:0"):
            y = runtime.infer("m", wanted, outputs_in=where)["Y"]
            came.append(y.device.ordinal if isinstance(y, moonpool.DeviceArray) else "cpu")
    print(json.dumps(came))
"""


def test_its_gpu_is_the_only_one_that_it_sees_whatever_its_number(fake: Fake, tmp_path: Path) -> None:
    """Inputs on another GPU are copied to it. Outputs that are wanted on another GPU come in ordinary memory."""
    said = fake.run(PROGRAM, str(MODELS / "on_device.py"), str(tmp_path), FAKE_CUDA_DEVICES=2)

    assert json.loads(said) == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 2, 2, 2, 2], 1, "cpu"]
