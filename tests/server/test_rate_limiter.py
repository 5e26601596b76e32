"""A server with a rate limiter: its options, and clients over both protocols."""

from __future__ import annotations

import json
import queue
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tests.server.libraries import _gevent_is_there, _grpc_is_there  # noqa: F401
from tests.server.repositories import write
from tests.server.running import running
from tests.timed import TIMES

BODY = b'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [0]}]}'
CONFIG = """
backend: "python" input [{ name: "X" data_type: TYPE_FP32 dims: [1] }] output [{ name: "T" data_type: TYPE_FP64 dims: [2] }]
instance_group [{ kind: KIND_CPU count: 2 rate_limiter { resources [{ name: "R" global: true count: %d }] } }]
"""


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`--rate-limit=execution_count` limits what executes at the same time by resources, for clients of both protocols.",
)
def test_no_more_execute_at_once_than_resources_allow(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, config=CONFIG % 1, text=TIMES)
    limits = ("--rate-limit=execution_count", "--rate-limit-resource=R:1")
    with running(tmp_path, *limits) as server:

        def ask(name: str) -> tuple[float, float]:
            address = f"http://{server.http}/v2/models/{name}/infer"
            with urllib.request.urlopen(address, BODY, timeout=60) as answer:
                began, ended = json.load(answer)["outputs"][0]["data"]
            return began, ended

        given = tritonclient.grpc.InferInput("X", [1], "FP32")
        given.set_data_from_numpy(np.zeros(1, np.float32))
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            answers: queue.Queue[Any] = queue.Queue()
            for name in "ab" * 40:
                client.async_infer(name, [given], lambda result, error: answers.put((result, error)))
            with ThreadPoolExecutor(4) as threads:
                times = list(threads.map(ask, "ab" * 40))
            for _ in range(80):
                answer, error = answers.get(timeout=60)
                assert error is None
                times.append(tuple(answer.as_numpy("T").tolist()))
    times.sort()
    assert len(times) == 160
    assert all(ended <= began for (_, ended), (began, _) in pairwise(times))


@pytest.mark.parametrize(
    ("flags", "is_ready"),
    [
        (["--rate-limit=execution_count", "--rate-limit-resource=R:1"], False),
        (["--rate-limit=execution_count"], True),
        (["--rate-limit=off", "--rate-limit-resource=R:1"], True),
        (["--rate-limit-resource=R:1"], True),
    ],
)
def test_a_model_that_could_never_execute_is_not_served(tmp_path: Path, flags: list[str], *, is_ready: bool) -> None:
    write(tmp_path, "m", config=CONFIG % 2, text=TIMES)
    with running(tmp_path, "--exit-on-error=false", *flags) as server:
        assert (server.get("/v2/models/m/ready")[0] == 200) == is_ready
        text = 'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model instances, the minimum required count is 2'
        assert (text in server.text()) != is_ready
