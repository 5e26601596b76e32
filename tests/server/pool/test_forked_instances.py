"""Instances that are forked from a template serve several front ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.server.repositories import CONFIG, write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

PREFORK = """
parameters [{ key: "MOONPOOL_PREFORK" value { string_value: "initialize" } }]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.promise("Forked instances", "Models that ask others, decoupled ones …"),
]


def ask(server: RunningServer) -> int:
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    status, said = server.get("/v2/models/echo/infer", "POST", json.dumps(body).encode())
    assert status != 200 or said["outputs"][0]["data"] == [1, 2, 3, 4]
    return status


def instance(server: RunningServer) -> dict[str, Any]:
    _, told = server.get("/v2/moonpool/overview")
    ((found,),) = [each["instances"] for each in told["models"]]
    return dict(found)


def test_front_ends_are_served_by_a_forked_instance_and_by_the_next_one(tmp_path: Path) -> None:
    write(tmp_path, "echo", config=CONFIG + PREFORK)
    with running(tmp_path, "--frontends=2") as server:
        # Each request has a new connection, so both front ends get some.
        assert {ask(server) for _ in range(20)} == {200}
        pid = instance(server)["pid"]
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != server.process.pid

        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: instance(server)["pid"] not in (None, pid), 60.0)
        wait_until(lambda: ask(server) == 200, 60.0)
        assert {ask(server) for _ in range(20)} == {200}
