"""Both servers show the same metrics, statistics, traces and settings, and accept the same changes of them."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.observability.models import trace_entries, write
from tests.server.running import running as moonpool_running
from tests.triton.server import TritonServer, interpreter
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Watching a server",
        "Metrics, statistics, traces and settings are those of a real Triton for the same requests.",
    ),
]
TIMEOUT_S = 60
FLAGS = ("--metrics-config=summary_latencies=true", "--trace-config=rate=1")
# Metrics that moonpool and later versions of Triton have, but not this version.
LATER = {"nv_model_load_duration_secs"}
# Metrics of Triton without a counterpart here.
THEIRS = {"nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"}


# One request waits behind the one that executes until the test makes the file `go` beside the model's file.
CROWDED = """
import pathlib
import time

import triton_python_backend_utils as pb_utils

FOLDER = pathlib.Path(__file__).parent


class TritonPythonModel:
    def execute(self, requests):
        (FOLDER / "begun").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
        values = [pb_utils.get_input_tensor_by_name(each, "IN").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in values]
"""


class Watched(TritonServer):
    """A tritonserver that writes traces on request."""

    traces: Path

    def command(self) -> list[str]:
        return [*super().command(), *FLAGS, f"--trace-config=triton,file={self.traces}"]


class Side:
    """One of the two servers."""

    def __init__(self, repository: Path, grpc_port: int, metrics_port: int, traces: Path) -> None:
        self.repository = repository
        self.channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.traces = traces
        self._metrics_port = metrics_port

    def metrics(self) -> str:
        address = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def counters(self) -> list[str]:
        """Return the counters of requests to `doubles`."""
        names = r'nv_inference_(?:request_(?:success|failure)|count|exec_count)\{model="doubles"'
        return sorted(line for line in self.metrics().splitlines() if re.match(names, line))

    def statistics(self, model: str = "doubles") -> dict[str, Any]:
        """Return the statistics of a model."""
        asked = pb.ModelStatisticsRequest(name=model)
        (found,) = self.stub.ModelStatistics(asked, timeout=TIMEOUT_S).model_stats
        shown: dict[str, Any] = MessageToDict(found, always_print_fields_with_no_presence=True)
        return shown

    def send(self, model: str, value: float, rows: int = 1, request_id: str = "") -> Any:
        """Send one request, and return its call."""
        request = pb.ModelInferRequest(model_name=model, id=request_id)
        request.inputs.add(name="IN", datatype="FP32", shape=[rows, 4])
        request.raw_input_contents.append(np.full((rows, 4), value, np.float32).tobytes())
        return self.stub.ModelInfer.future(request, timeout=TIMEOUT_S)

    def infer(self, model: str, value: float, rows: int = 1, request_id: str = "") -> bool:
        """Send one request, and return true if it succeeded."""
        return bool(self.send(model, value, rows, request_id).code() is grpc.StatusCode.OK)

    def set_trace(self, model: str = "", **changes: list[str]) -> Any:
        """The settings by name, or the error."""
        request = pb.TraceSettingRequest(model_name=model)
        for name, values in changes.items():
            request.settings[name].SetInParent()
            request.settings[name].value.extend(values)
        try:
            shown = self.stub.TraceSetting(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return {name: list(each.value) for name, each in shown.settings.items() if name != "trace_file"}

    def set_log(self, **changes: bool | int | str) -> Any:
        request = pb.LogSettingsRequest()
        for name, value in changes.items():
            if isinstance(value, bool):
                request.settings[name].bool_param = value
            elif isinstance(value, int):
                request.settings[name].uint32_param = value
            else:
                request.settings[name].string_param = value
        try:
            return MessageToDict(self.stub.LogSettings(request, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return error.code().name, error.details()

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of all trace files."""
        found: list[dict[str, Any]] = []
        for path in self.traces.parent.glob(f"{self.traces.name}*"):
            found += trace_entries(path)
        return found


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """The real server, and moonpool's, with the same models."""
    folder = tmp_path_factory.mktemp("watched")
    models = ["doubles", "asks"]
    repository = write(folder / "repository", *models)
    shutil.copytree(repository / "doubles", repository / "tagged")
    with open(repository / "tagged" / "config.pbtxt", "a") as config:
        config.write('metric_tags { key: "team" value: "blue" } metric_tags { key: "a" value: "x" }')
    shutil.copytree(repository / "doubles", repository / "crowded")
    (repository / "crowded" / "1" / "model.py").write_text(CROWDED)
    with open(repository / "crowded" / "config.pbtxt", "a") as config:
        config.write("dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    theirs = Watched(interpreter(), repository, folder)
    theirs.traces = folder / "theirs"
    ours = folder / "ours"
    flags = [*FLAGS, f"--trace-config=triton,file={ours}"]
    copy = shutil.copytree(repository, folder / "copy")
    theirs.start()
    try:
        with moonpool_running(copy, *flags) as server:
            both = (
                Side(repository, theirs.grpc_port, theirs.metrics_port, theirs.traces),
                Side(copy, server.ports["grpc"], server.ports["metrics"], ours),
            )
            for name in (*models, "tagged", "crowded"):
                both[0].stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=TIMEOUT_S)
            yield both
            for side in both:
                side.channel.close()
    finally:
        theirs.stop()


def test_the_same_requests_count_the_same(sides: tuple[Side, Side]) -> None:
    told = []
    for side in sides:
        outcomes = [side.infer("doubles", 1), side.infer("doubles", 13), side.infer("doubles", 2, 3)]
        assert outcomes == [True, False, True]
        # Triton counts a batch when its requests have been answered.
        wait_until(lambda side=side: side.statistics()["executionCount"] == "3", TIMEOUT_S)  # type: ignore[misc]
        shown = side.statistics()
        assert int(shown.pop("lastInference")) > 0
        told.append(json.loads(json.dumps(shown), object_hook=_without_times))
    theirs, ours = told

    assert ours == theirs
    wait_until(lambda: sides[0].counters() == sides[1].counters(), TIMEOUT_S, "the same counters")


def test_a_request_that_a_full_queue_refuses_counts_here_alone(sides: tuple[Side, Side]) -> None:
    waiting = 'nv_inference_pending_request_count{model="crowded",version="1"} 1'
    failures = r'^nv_inference_request_failure\{model="crowded",reason="(\w+)".*\} ([1-9]\d*)$'
    refused = []
    for side in sides:
        folder = side.repository / "crowded" / "1"
        first = side.send("crowded", 1)
        wait_until((folder / "begun").exists, TIMEOUT_S, "the first request to execute")
        second = side.send("crowded", 2)
        wait_until(lambda side=side: waiting in side.metrics(), TIMEOUT_S, "one that waits")  # type: ignore[misc]
        assert "Exceeds maximum queue size" in side.send("crowded", 3).details()
        (folder / "go").touch()
        assert [each.code() for each in (first, second)] == [grpc.StatusCode.OK] * 2
        counted = side.statistics("crowded")["inferenceStats"]["fail"]["count"]
        refused.append((counted, re.findall(failures, side.metrics(), re.MULTILINE)))

    assert refused == [("0", []), ("1", [("REJECTED", "1")])]


def _without_times(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name != "ns"}


def test_metrics_have_the_same_names_types_texts_and_labels(sides: tuple[Side, Side]) -> None:
    texts = [side.metrics() for side in sides]
    described = [set(re.findall(r"^# (?:HELP|TYPE) nv_.*$", text, re.MULTILINE)) for text in texts]
    labelled = [
        {
            (name, tuple(re.findall(r'(\w+)="', labels)))
            for name, labels in re.findall(r"^(nv_\w+)(\{.*\})? \S+$", text, re.MULTILINE)
        }
        for text in texts
    ]

    def named(lines: set[str], names: set[str]) -> set[str]:
        return {line for line in lines if line.split()[2] in names}

    assert described[1] - named(described[1], LATER) == described[0] - named(described[0], THEIRS)
    assert {each for each in labelled[1] if each[0] not in LATER} == {
        each for each in labelled[0] if each[0] not in THEIRS
    }


SETTINGS: list[tuple[str, dict[str, list[str]]]] = [
    ("", {}),
    ("doubles", {}),
    ("nope", {}),
    ("", {"trace_rate": ["7"]}),
    ("doubles", {"trace_rate": ["9"]}),
    ("", {"trace_rate": ["6"], "trace_count": ["3"]}),
    ("doubles", {}),
    ("doubles", {"trace_rate": []}),
    ("", {"trace_rate": ["7", "8"]}),
    ("", {"trace_rate": ["x"]}),
    ("", {"trace_rate": ["99999999999999999999999"]}),
    ("", {"trace_count": ["-2"]}),
    ("", {"trace_count": ["x"]}),
    ("", {"log_frequency": ["x"]}),
    ("", {"trace_level": ["OFF", "TENSORS"]}),
    ("", {"trace_level": ["TENSORS"], "trace_count": ["-1"]}),
    ("", {"trace_rate": ["0"]}),
    ("", {"trace_count": ["0"]}),
    ("", {"trace_level": ["x"]}),
    ("", {"trace_level": []}),
    ("", {"trace_file": ["f"]}),
    ("", {"trace_mode": ["opentelemetry"]}),
    ("", {"nonsense": ["a"]}),
    ("", {"trace_rate": [], "trace_count": [], "log_frequency": []}),
]


def test_trace_settings_are_answered_and_refused_alike(sides: tuple[Side, Side]) -> None:
    theirs, ours = ([side.set_trace(model, **changes) for model, changes in SETTINGS] for side in sides)

    for asked, their, our in zip(SETTINGS, theirs, ours, strict=True):
        assert our == their, asked


LOG_SETTINGS: list[dict[str, bool | int | str]] = [
    {},
    {"log_info": False},
    {"log_info": True, "log_verbose_level": 1},
    {"log_info": 1},
    {"log_verbose_level": True},
    {"log_verbose_level": 0, "log_format": "ISO8601"},
    {"log_format": "default"},
    {"log_format": "x"},
    {"log_format": True},
    {"log_file": "x"},
    {"nonsense": True},
]


def test_log_settings_are_answered_and_refused_alike(sides: tuple[Side, Side]) -> None:
    theirs, ours = ([side.set_log(**changes) for changes in LOG_SETTINGS] for side in sides)

    for asked, their, our in zip(LOG_SETTINGS, theirs, ours, strict=True):
        assert our == their, asked


def test_traces_tell_the_same_of_the_same_requests(sides: tuple[Side, Side]) -> None:
    told = []
    for side in sides:
        side.set_trace(trace_level=["TIMESTAMPS", "TENSORS"], trace_rate=["1"], log_frequency=["1"])
        assert side.infer("doubles", 1, request_id="mine")
        assert not side.infer("doubles", 13)
        assert side.infer("asks", 2)
        wait_until(lambda side=side: len(_models(side.entries())) == 4, TIMEOUT_S, "the traces")  # type: ignore[misc]
        side.set_trace(trace_level=["OFF"], log_frequency=[])
        told.append(side.entries())
    theirs, ours = told

    assert _models(ours) == _models(theirs)
    assert _activities(ours) == _activities(theirs)


def _models(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((each for each in entries if "model_name" in each), key=lambda each: int(each["id"]))


def _activities(entries: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    """Count the activities of each trace. Those of tensors include their data."""
    told: dict[int, Counter[str]] = {}
    for each in entries:
        names = [mark["name"] for mark in each.get("timestamps", ())]
        if "tensor" in each:
            names.append(f"{each['activity']} {sorted(each['tensor'].items())}")
        told.setdefault(each["id"], Counter()).update(names)
    return told
