"""`--host-policy`: instances run on the processors of the policy that their group names."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.inside import registry_of
from tests.server.repositories import CONFIG, write
from tests.server.running import running

import moonpool
from moonpool.runtime.model.config.model import unused_fields
from moonpool.runtime.model.config.options import _cpus, policy_of, read_host_policies
from moonpool.runtime.server.options.sources import BadOption, read_options
from moonpool.runtime.server.process import _host_policies

CPUS = sorted(os.sched_getaffinity(0))
FIRST, LAST = CPUS[0], CPUS[-1]
TELLS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        cpus = np.array(sorted(os.sched_getaffinity(0)), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("CPUS", cpus)]) for _ in requests]
"""
TELLS_CONFIG = """
backend: "python" instance_group [{ kind: KIND_CPU }]
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }] output [{ name: "CPUS" data_type: TYPE_INT32 dims: [-1] }]
"""
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()


def group(count: int, policy: str = "") -> dict[str, Any]:
    return {"kind": "KIND_CPU", "count": count, "host_policy": policy}


def cpus_of(runtime: moonpool.Runtime) -> list[list[int]]:
    pids = [each["pid"] for each in runtime.instances("m")]
    return [sorted(os.sched_getaffinity(pid)) for pid in pids]


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`--host-policy` says on which processors instances run, by the `host_policy` of their group or by its kind.",
)
def test_instances_of_a_server_run_on_the_processors_of_their_kind(tmp_path: Path) -> None:
    write(tmp_path, "m", TELLS, TELLS_CONFIG)
    with running(tmp_path, f"--host-policy=cpu,cpu-cores={LAST}") as server:
        status, answer = server.get("/v2/models/m/infer", "POST", BODY)
    assert (status, answer["outputs"][0]["data"]) == (200, [LAST])


@pytest.mark.skipif(len(CPUS) < 2, reason="one processor is like another")
def test_each_group_has_its_policy(tmp_path: Path) -> None:
    write(tmp_path, "m")
    with moonpool.Runtime(tmp_path, models=[]) as runtime:
        registry = registry_of(runtime)
        policies = {"near": (FIRST,), "far": (LAST,), "cpu": (LAST,)}
        registry.rules = replace(registry.rules, host_policies=policies)
        groups = [group(1, "near"), group(1, "far"), group(1), group(1, "unknown")]
        runtime.load("m", config={"instance_group": groups})
        assert cpus_of(runtime) == [[FIRST], [LAST], [LAST], CPUS]

        # Another policy is another instance.
        before = [each["pid"] for each in runtime.instances("m")]
        groups[1] = group(1, "near")
        runtime.load("m", config={"instance_group": groups})
        after = {each["pid"]: os.sched_getaffinity(each["pid"]) for each in runtime.instances("m")}
        assert len(set(before) & set(after)) == 3
        assert sum(cpus == {FIRST} for cpus in after.values()) == 2

        runtime.load("m", options={"MOONPOOL_CPUS": str(FIRST)}, config={"instance_group": groups})
        assert cpus_of(runtime) == [[FIRST]] * 4


def test_a_policy_is_that_of_the_kind_unless_the_group_names_one() -> None:
    assert policy_of("mine", "GPU", 3) == "mine"
    assert policy_of("", "GPU", 3) == "gpu_3"
    assert [policy_of("", kind, 0) for kind in ("CPU", "MODEL")] == ["cpu", "model"]


def test_settings_of_one_policy_are_joined() -> None:
    cores = f"p,cpu-cores={','.join(map(str, CPUS))}"
    assert read_host_policies([cores, f"p,cpu-cores={LAST}"]) == {"p": (LAST,)}
    assert read_host_policies([]) == {}


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="the kernel shows no NUMA nodes")
def test_a_node_stands_for_its_processors() -> None:
    cpus = _cpus(Path("/sys/devices/system/node/node0/cpulist").read_text().strip())
    if set(cpus) <= set(CPUS):
        assert read_host_policies(["p,numa-node=0"]) == {"p": cpus}
    else:
        with pytest.raises(ValueError, match="the server may run on"):
            read_host_policies(["p,numa-node=0"])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("near", "must be <policy>,<setting>=<value>"),
        ("near,cpu-cores", "must be <policy>,<setting>=<value>"),
        (",cpu-cores=0", "must be <policy>,<setting>=<value>"),
        ("near,cores=0", "has the settings cpu-cores and numa-node, not 'cores'"),
        ("near,cpu-cores=a", "must be numbers of processors"),
        ("near,cpu-cores=5-2", "leaves processors []"),
        ("near,cpu-cores=9999", "leaves processors [9999], and the server may run on"),
        ("near,numa-node=../../x", "must have a number as numa-node"),
        ("near,numa-node=9999", "names NUMA node 9999, which this machine does not have"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadOption) as caught:
        read_options({"host-policy": [text]}, {})
    assert what in str(caught.value)
    with pytest.raises(BadOption, match="--host-policy"):
        _host_policies([text])


def test_the_policy_of_a_group_is_no_ignored_field(tmp_path: Path) -> None:
    write(tmp_path, "m", config=CONFIG.replace("KIND_CPU", 'KIND_CPU host_policy: "x"'))
    with moonpool.Runtime(tmp_path) as runtime:
        config = runtime.config("m")
        assert config.instance_groups[0].host_policy == "x"
        assert unused_fields(config.raw) == []
