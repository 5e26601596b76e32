"""Denials of a server's models appear in its metrics, on its page, in `moonpool top` and in its log."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.cli.shell import CommandLine
from tests.server.observability.test_server_metrics import Scrape
from tests.server.page.browser import Browser, Page, needs_chromium
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

pytestmark = pytest.mark.promise(
    "Seeing sandboxes",
    "Acts of a model's Python code that the sandbox refuses are counted by kind, in "
    "metrics, on the page and in `moonpool top`. The log reports them at a bounded rate, "
    "in a tritonserver as well.",
)

MODEL = """
import numpy as np
import socket
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            for _ in range(3):
                try:
                    open("/etc/passwd")
                except OSError:
                    pass
            socket.create_connection(("127.0.0.1", 80))
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [1] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [1] } ]
"""
NAME = "moonpool_instance_sandbox_denials_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    folder = models / "refused" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    for each in (models, folder.parent, folder):
        each.chmod(0o755)
    with running(models, "--sandbox=strict") as server:
        yield server


def ask(server: RunningServer) -> tuple[int, Any]:
    tensor = {"name": "X", "shape": [1], "datatype": "FP32", "data": [1]}
    body = json.dumps({"inputs": [tensor]}).encode()
    return server.get("/v2/models/refused/infer", "POST", body)


def scrape(server: RunningServer) -> Scrape:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        return Scrape(response.read().decode())


def instance(server: RunningServer) -> dict[str, Any]:
    (model,) = server.get("/v2/moonpool/overview?since=0")[1]["models"]
    return dict(model["instances"][0])


def test_refusals_are_in_metrics_overview_top_and_log(server: RunningServer, tmp_path: Path) -> None:
    status, answer = ask(server)
    assert status == 500
    # A client gets the option without a path.
    assert answer["error"].partition("\n")[0].endswith("MOONPOOL_SANDBOX_PORTS would allow it")

    def count(kind: str) -> float:
        return scrape(server)(NAME, model="refused", model_instance="refused_0", kind=kind)

    wait_until(lambda: (count("open"), count("socket")) == (3, 1), 60.0)
    assert count("fork") == 0

    denials = instance(server)["denials"]
    assert denials["counts"] == {"open": 3, "socket": 1}
    told = {each["kind"]: each for each in denials["latest"]}
    assert told["open"]["text"] == "/etc/passwd"
    assert told["open"]["option"] == "MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd"

    shown = CommandLine(tmp_path)("top", "--once", f"http://{server.http}")
    assert "refused by the sandbox: 3 open, 1 socket" in shown.stdout
    assert "open /etc/passwd: MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it" in shown.stdout

    # A report may go out between two of the three.
    server.wait_for("[refused_0] its sandbox did not let it read /etc/passwd")


@needs_chromium
@pytest.mark.slow
def test_refusals_are_on_the_page(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    ask(server)
    wait_until(lambda: instance(server)["denials"]["counts"].get("socket", 0) >= 1, 60.0)
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        page = Page(browser, 1600, 900)
        page.goto(f"http://{server.http}/#/refused/1")
        page.wait_for("document.body?.innerText.includes('refused: ')", "refusals")
        text = page.text("body")
    finally:
        browser.close()
    assert "open /etc/passwd (MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it)" in text
