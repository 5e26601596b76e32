"""A server changes the number of instances while clients use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.server.asking import Clients
from tests.server.repositories import write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

PIDS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "PID", "data_type": "TYPE_INT64", "dims": [1]})
        return config

    def execute(self, requests):
        pid = np.array([os.getpid()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", pid)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: COUNT kind: KIND_CPU }]
"""
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()


def count(number: int) -> str:
    return CONFIG.replace("COUNT", str(number))


def asking(server: RunningServer) -> Clients:
    """Ask all the time, more of them than there are instances."""

    def ask() -> set[int]:
        status, answer = server.get("/v2/models/m/infer", "POST", BODY)
        assert status == 200, answer
        return {answer["outputs"][0]["data"][0]}

    return Clients(ask, 6)


@pytest.mark.promise(
    "The model repository of a server",
    "A load of a loaded model whose configuration differs in `instance_group` alone adds and removes instances. The "
    "others keep their processes, and no client gets an error.",
)
def test_a_load_changes_the_number_of_instances(tmp_path: Path) -> None:
    write(tmp_path, "m", PIDS, count(1))
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with running(tmp_path, *flags) as server, asking(server) as clients:
        wait_until(lambda: clients.pids)
        (first,) = clients.pids
        # The configuration that the server shows, with what the model completed, and one other number.
        _, config = server.get("/v2/models/m/config")
        config["instance_group"][0]["count"] = 3
        load = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        assert server.get("/v2/repository/models/m/load", "POST", load)[0] == 200
        wait_until(lambda: len(clients.pids) == 3)
        assert server.get("/v2/models/m/config")[1]["instance_group"][0]["count"] == 3

        # What the repository says holds again.
        assert server.get("/v2/repository/models/m/load", "POST", b"{}")[0] == 200
        clients.forget()
        write_config(tmp_path, count(2))
        assert server.get("/v2/repository/models/m/load", "POST", b"{}")[0] == 200
        wait_until(lambda: len(clients.pids) == 2 and first in clients.pids)
        assert clients.errors == []
        assert server.get("/v2/models/m/stats")[1]["model_stats"][0]["inference_count"] > 0


def write_config(repository: Path, text: str) -> None:
    (repository / "m" / "config.pbtxt").write_text(text)


def test_a_poll_follows_the_number_of_instances(tmp_path: Path) -> None:
    write(tmp_path, "m", PIDS, count(2))
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with running(tmp_path, *flags) as server, asking(server) as clients:
        wait_until(lambda: len(clients.pids) == 2)
        before = set(clients.pids)
        write_config(tmp_path, count(4))
        wait_until(lambda: len(clients.pids) == 4)
        assert before < clients.pids
        assert clients.errors == []
