"""Only the expected processes use the GPU: on the fake driver and on a card."""

from __future__ import annotations

import os

import pytest
from tests.e2e.hosting import MODELS
from tests.gpu.cards import run

pytestmark = pytest.mark.promise(
    "Device memory",
    "The runtime makes no context until it handles device memory itself. Without a visible GPU, "
    "a load that needs one fails and says why.",
)

PROGRAM = """
    import ctypes
    import numpy as np
    import moonpool
    from moonpool.ipc.cuda.driver import LIBRARY

    def has_context():
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        driver = ctypes.CDLL(LIBRARY)
        assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active)) == 0
        return bool(is_active.value)

    x = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "input": [{"name": "X", **x}, {"name": "HOW", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "Y", **x}, {"name": "ON_CPU", "data_type": "TYPE_BOOL", "dims": [1]}],
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}],
    }
    with moonpool.Runtime() as runtime:
        try:
            runtime.load("m", sys.argv[1], config=config)
        except moonpool.ConfigError as error:
            print(error)
            sys.exit()
        inputs = {"X": np.ones(4, np.float32), "HOW": np.array([b"host"], object)}
        said = [has_context(), *runtime.infer("m", inputs)["Y"].tolist(), has_context()]
        runtime.empty("m", "X", (4,), device=0)
        print(said, has_context())
"""
MODEL = str(MODELS / "on_device.py")


def test_the_runtime_has_no_context_until_it_handles_memory_of_the_device(environment: dict[str, str] | None) -> None:
    said = run(PROGRAM, MODEL, environment=environment)

    assert said == "[False, 2.0, 2.0, 2.0, 2.0, False] True"


def test_without_a_gpu_that_can_be_seen_the_load_fails_and_says_why(environment: dict[str, str] | None) -> None:
    hidden = {**(environment or os.environ), "CUDA_VISIBLE_DEVICES": ""}

    said = run(PROGRAM, MODEL, environment=hidden)

    assert "has kind KIND_GPU but no GPUs are available" in said
