"""A model in a sandbox cannot pass its metrics off as the server's."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.triton.backend.hosting import Client, HostingServer
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

NAMES = [
    "nv_inference_count",
    "moonpool_build_info",
    "process_cpu_seconds_total",
    "python_info",
    "scrape_duration_seconds",
    "up",
]
COUNTS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        self.families, said = [], {}
        for name in json.loads(pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()[0]):
            kind = pb_utils.MetricFamily.COUNTER
            try:
                self.families.append(pb_utils.MetricFamily(name=name, description="x", kind=kind))
                self.families[-1].Metric(labels={"of": "a model"}).increment(7)
                said[name] = "done"
            except pb_utils.TritonModelException as error:
                said[name] = str(error)
        output = pb_utils.Tensor("Y", np.array([json.dumps(said)], object))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
CONFIG = """
backend: "moonpool"
input [ { name: "X" data_type: TYPE_STRING dims: [-1] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [-1] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "MOONPOOL_SANDBOX" value: { string_value: "strict" } }
"""


@pytest.fixture
def contained(repository: Path, client: Client) -> Iterator[str]:
    folder = repository / "counts_contained"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(COUNTS)
    client.load("counts_contained")
    yield "counts_contained"
    client.unload("counts_contained")


@pytest.mark.promise("The sandbox: `strict`", "Its metrics do …")
@pytest.mark.promise("Metrics", "No metric of a model, and …")
def test_its_metrics_have_no_name_that_may_be_the_servers(
    server: HostingServer, client: Client, contained: str
) -> None:
    asked = np.array([json.dumps([*NAMES, "its_own"])], object)

    (text,) = client.infer(contained, asked)

    said = json.loads(text)
    assert said.pop("its_own") == "done"
    assert set(said) == set(NAMES)
    for name, why in said.items():
        assert f"the metric '{name}' would pass for one of the server's" in why
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        told = [line for line in page.read().decode().splitlines() if 'of="a model"' in line]
    assert told == ['its_own{of="a model"} 7']


OPENS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        open("/etc/passwd")
"""


@pytest.mark.promise("Seeing sandboxes", "Acts of a model's Python code …")
def test_the_log_says_what_its_sandbox_refused(server: HostingServer, client: Client, repository: Path) -> None:
    folder = repository / "refused"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(OPENS)
    client.load("refused")
    try:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("refused", np.array(["x"], object))
        said = "its sandbox did not let it read /etc/passwd; MOONPOOL_SANDBOX_PATHS would allow it"
        wait_until(lambda: said in server.log_file.read_text(), 60.0)
    finally:
        client.unload("refused")
    # As in `moonpool serve`, clients get the option without the folder.
    assert "the sandbox refused it: MOONPOOL_SANDBOX_PATHS=ro:passwd would allow it" in str(caught.value)
