"""Programs that people use with servers: perf_analyzer and curl, unmodified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.running import RunningServer

from moonpool.runtime.conformance.tensors import GOOD

ROOT = Path(__file__).parents[3]
VARIABLE = "MOONPOOL_PERF_ANALYZER"
USUAL = ROOT / ".venv-clients" / "bin" / "perf_analyzer"


@pytest.fixture(scope="module")
def perf_analyzer() -> Path:
    found = os.environ.get(VARIABLE) or (str(USUAL) if USUAL.exists() else None)
    if found is None:
        pytest.skip(f"no perf_analyzer: {USUAL.parents[1].name} is not here and {VARIABLE} not set")
    return Path(found)


def _pressed(program: Path, *flags: str) -> str:
    """Return its output after a short measurement, which must succeed."""
    libraries = program.parents[1].glob("lib/python*/site-packages/nvidia/*/lib")
    ended = subprocess.run(
        [program, "-m", "add_sub", "--measurement-mode=count_windows", "--measurement-request-count=20", "--max-trials=20", "--stability-percentage=999", *flags],
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )  # fmt: skip
    if "error while loading shared libraries" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.parametrize(
    ("protocol", "mode"), [("http", []), ("grpc", ["--shared-memory=system"])], ids=["http", "grpc"]
)
def test_perf_analyzer_presses(server: RunningServer, perf_analyzer: Path, protocol: str, mode: list[str]) -> None:
    address = server.http if protocol == "http" else server.grpc

    said = _pressed(perf_analyzer, "-i", protocol, "-u", address, "--concurrency-range=2", *mode)

    assert "Throughput:" in said
    # This figure comes from the server's statistics.
    assert "Avg request latency" in said


def test_perf_analyzer_reads_streams(server: RunningServer, perf_analyzer: Path) -> None:
    said = _pressed(perf_analyzer, "-i", "grpc", "-u", server.grpc, "--streaming")

    assert "Throughput:" in said


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_asks(server: RunningServer) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--fail", "--max-time", "20", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    url = f"http://{server.http}/v2/models"
    answer = json.loads(curl("--compressed", f"{url}/add_sub/infer", "-d", json.dumps(GOOD)))
    events = curl("-N", f"{url}/says/generate_stream", "-d", '{"text_input":"hi","count":3}')

    data = {output["name"]: output["data"] for output in answer["outputs"]}
    assert data == {"OUTPUT0": [2.0, 3.0, 4.0, 5.5], "OUTPUT1": [0.0, 1.0, 2.0, 2.5]}
    assert events.count("data: ") == 3
    assert "nv_inference_request_success" in curl(f"http://{server.metrics}/metrics")
