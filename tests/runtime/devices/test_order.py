"""The side that receives work on a device waits for it there. One side alone is late, so nothing else orders the
work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS
from tests.runtime.devices.conftest import FakeHost, Foreign, Host, on_host

VALUES = np.arange(1, 17, dtype=np.float32)
DELAY_US = 30_000


def load_library(host: Host, **options: str) -> None:
    """A model that leaves its output to a library with a stream of its own."""
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", **options}
    x = {"data_type": "TYPE_FP32", "dims": [-1]}
    host.runtime.load(
        "library",
        MODELS / "gpu_library.py",
        config={
            "input": [{"name": "X", **x}],
            "output": [{"name": "Y", **x}],
            "instance_group": [{"kind": "KIND_GPU"}],
            "parameters": {key: {"string_value": value} for key, value in given.items()},
        },
    )


@pytest.mark.promise(
    "Device memory in a model",
    "Runtime and stub wait on the device for the work that the other one has put there, also at the end of a stub.",
)
def test_a_model_waits_for_what_the_runtime_does_late(fake_host: FakeHost) -> None:
    fake_host.load()
    fake_host.infer(Foreign(VALUES), "host")
    x = Foreign(VALUES + 5)
    fake_host.fake.delay(DELAY_US)
    y, on_cpu = fake_host.infer(x, "host")
    fake_host.fake.delay(0)
    assert not on_cpu
    assert (on_host(y) == VALUES + 6).all()


@pytest.mark.promise("Device memory in a model", "Runtime and stub wait on the device …")
@pytest.mark.parametrize("wanted", ["where they are", "ordinary"])
def test_a_caller_waits_for_what_a_model_s_library_does_late(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", str(DELAY_US))
    load_library(fake_host, MOONPOOL_ENVIRONMENT="FAKE_*")
    fake_host.fake.delay(0)
    options: dict[str, Any] = {} if wanted == "where they are" else {"outputs_in": "cpu"}
    for step in range(2):
        x = fake_host.runtime.empty("library", "X", VALUES.shape, device=0)
        x.device.write(x.address, VALUES + step)
        y = fake_host.runtime.infer("library", {"X": x}, timeout_s=60, **options)["Y"]
        assert isinstance(y, np.ndarray) == (wanted == "ordinary")
        assert (on_host(y) == VALUES + step).all()
