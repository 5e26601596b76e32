"""Instances on several GPUs, each process with the fake driver from its start."""

from __future__ import annotations

import json

import pytest
from tests.e2e.hosting import MODELS
from tests.gpu.cards import Fake

PROGRAM = """
    import json, sys
    import numpy as np
    import moonpool

    group = json.loads(sys.argv[1])
    x = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "input": [{"name": "X", **x}, {"name": "HOW", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "Y", **x}, {"name": "ON_CPU", "data_type": "TYPE_BOOL", "dims": [1]}],
        "parameters": {
            "FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"},
            "MOONPOOL_ENVIRONMENT": {"string_value": "FAKE_*"},
        },
        **({"instance_group": [group]} if group else {}),
    }
    with moonpool.Runtime() as runtime:
        try:
            runtime.load("m", sys.argv[2], config=config)
        except moonpool.ConfigError as error:
            print(json.dumps(str(error)))
            sys.exit()
        hosted = runtime._models.find("m", None)
        found = [record.instance for record in hosted.supervisor.records]
        said = [[each.name, each.kind, each.device_id] for each in found]
        came = []
        for gpu in (0, 1):
            array = runtime.empty("m", "X", (4,), device=gpu)
            array.device.write(array.address, np.full(4, gpu, np.float32))
            inputs = {"X": array, "HOW": np.array([b"pass"], object)}
            for _ in range(4):
                y = runtime.infer("m", inputs)["Y"]
                came.append([y.device.ordinal, *map(int, y.to_host())])
    print(json.dumps([said, came]))
"""
VALUES = [[0, 0, 0, 0, 0]] * 4 + [[1, 1, 1, 1, 1]] * 4


@pytest.mark.promise("GPUs in the runtime", "Instances are placed on GPUs as …")
@pytest.mark.parametrize(
    ("group", "instances"),
    [
        ({}, [["m_0", "GPU", 0], ["m_1", "GPU", 1]]),
        ({"kind": "KIND_GPU", "gpus": [1]}, [["m_0_0", "GPU", 1]]),
        (
            {"name": "g", "kind": "KIND_GPU", "count": 2},
            [["g_0", "GPU", 0], ["g_1", "GPU", 0], ["g_2", "GPU", 1], ["g_3", "GPU", 1]],
        ),
        ({"kind": "KIND_CPU"}, [["m_0_0", "CPU", 0]]),
    ],
    ids=["nothing said", "one", "all, twice", "none"],
)
def test_there_are_so_many_instances_on_each_gpu_and_tensors_stay_on_theirs(
    fake: Fake, group: dict[str, object], instances: list[list[object]]
) -> None:
    said = fake.run(PROGRAM, json.dumps(group), str(MODELS / "on_device.py"), FAKE_CUDA_DEVICES=2)

    assert json.loads(said) == [instances, VALUES]


@pytest.mark.promise(
    "GPUs in the runtime",
    "If a configuration names a GPU that does not exist, the load fails, and the error says "
    "which GPUs there are, or why there are none.",
)
@pytest.mark.parametrize(
    ("settings", "group", "words"),
    [
        ({"FAKE_CUDA_DEVICES": 2}, {"kind": "KIND_GPU", "gpus": [2]}, "GPUs of this machine are: 0, 1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"kind": "KIND_GPU"}, "no GPU can be used"),
    ],
    ids=["another one", "none visible"],
)
def test_a_gpu_that_is_not_there_fails_the_load_with_what_there_is(
    fake: Fake, settings: dict[str, object], group: dict[str, object], words: str
) -> None:
    said = fake.run(PROGRAM, json.dumps(group), str(MODELS / "on_device.py"), **settings)

    assert words in json.loads(said)
