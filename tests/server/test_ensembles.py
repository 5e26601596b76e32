"""Ensembles in a server: HTTP, gRPC, generate, control, the page, traces and `moonpool check`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tests.ensemble_repositories import REPEATS, Io, chain, step, write_ensemble, write_model
from tests.server.running import RunningServer, running
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

INPUT = {"name": "A", "datatype": "FP32", "shape": [3], "data": [2, 5, 6]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles")
    write_model(folder, "adds")
    write_model(folder, "repeats", REPEATS, more="model_transaction_policy { decoupled: true }")
    write_model(folder, "labelled", outputs=(Io("Y", more='label_filename: "labels.txt"'),))
    (folder / "labelled" / "labels.txt").write_text("cat\ndog\nfox\n")
    write_ensemble(folder, "sorts", chain(["adds", "labelled"]))
    write_ensemble(folder, "sorts_too", [step("sorts", {"A": "A"}, {"B": "B"})])
    own = (Io("B", more='label_filename: "own.txt"'),)
    write_ensemble(folder, "sorts_itself", chain(["labelled"]), outputs=own)
    (folder / "sorts_itself" / "own.txt").write_text("one\ntwo\nthree\n")
    write_model(folder, "wide", inputs=(Io("X", dims="-1"),), outputs=(Io("Y", dims="-1"),))
    write_ensemble(folder, "three", chain(["adds"] * 3))
    write_ensemble(folder, "stream", chain(["repeats", "adds"]))
    write_ensemble(
        folder, "large", chain(["wide", "wide"]), inputs=(Io("A", dims="-1"),), outputs=(Io("B", dims="-1"),)
    )
    write_ensemble(folder, "two", [*chain(["adds"]), step("adds", {"X": "A"}, {"Y": "C"})], outputs=(Io("B"), Io("C")))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    traces = tmp_path_factory.mktemp("traces") / "traces.json"
    flags = [f"--trace-config=triton,file={traces}", "--trace-config=level=TIMESTAMPS"]
    with running(repository, "--model-control-mode=explicit", "--load-model=*", *flags) as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> tuple[int, Any]:
    return server.get(path, "POST", json.dumps(body).encode())


@pytest.mark.promise(
    "Ensembles",
    "An output of an ensemble is classified with its own labels, or else with those of the model that writes it.",
)
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("sorts", ["8.000000:2:fox", "7.000000:1:dog"]),
        ("sorts_too", ["8.000000:2:fox", "7.000000:1:dog"]),
        ("sorts_itself", ["7.000000:2:three", "6.000000:1:two"]),
        ("three", ["9.000000:2", "8.000000:1"]),
    ],
)
def test_an_output_is_classified_with_the_labels_of_its_model(
    server: RunningServer, model: str, expected: list[str]
) -> None:
    asked = [{"name": "B", "parameters": {"classification": 2}}]
    status, body = post(server, f"/v2/models/{model}/infer", inputs=[INPUT], outputs=asked)
    assert (status, body["outputs"][0]["data"]) == (200, expected)

    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        given = tritonclient.grpc.InferInput("A", [3], "FP32")
        given.set_data_from_numpy(np.array([2, 5, 6], np.float32))
        wanted = tritonclient.grpc.InferRequestedOutput("B", class_count=2)
        found = client.infer(model, [given], outputs=[wanted]).as_numpy("B")
    assert found.tolist() == [text.encode() for text in expected]


def test_http_serves_an_ensemble_as_any_model(server: RunningServer) -> None:
    status, body = post(server, "/v2/models/three/infer", inputs=[INPUT], id="7")

    assert (status, body["id"]) == (200, "7")
    assert body["outputs"] == [{"name": "B", "datatype": "FP32", "shape": [3], "data": [5, 8, 9]}]
    assert body["parameters"] == {"sequence_start": False, "sequence_end": False, "sequence_id": 0}
    assert server.get("/v2/models/three")[1]["platform"] == "ensemble"
    assert server.get("/v2/models/three/config")[1]["ensemble_scheduling"]["step"][0]["model_name"]
    status, body = post(server, "/v2/models/two/infer", inputs=[INPUT], outputs=[{"name": "C"}])
    assert [each["name"] for each in body["outputs"]] == ["C"]


def test_generate_asks_an_ensemble_for_one_response_and_for_many(server: RunningServer) -> None:
    status, body = post(server, "/v2/models/three/generate", A=[2, 5, 6])
    assert (status, body["B"]) == (200, [5, 8, 9])
    status, text = post(server, "/v2/models/stream/generate_stream", A=[2, 5, 6])
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert sorted(each["B"] for each in events) == [[3, 6, 7], [4, 7, 8]]


def test_grpc_serves_an_ensemble_as_any_model(server: RunningServer) -> None:
    x = np.array([2, 5, 6], np.float32)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="three")
        request.inputs.add(name="A", datatype="FP32", shape=[3])
        request.raw_input_contents.append(x.tobytes())
        answer = stub.ModelInfer(request, timeout=60)
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [5, 8, 9]
        request.model_name = "stream"
        with pytest.raises(grpc.RpcError, match="doesn't support models with decoupled"):
            stub.ModelInfer(request, timeout=60)
        responses = list(stub.ModelStreamInfer(iter([request]), timeout=60))

    assert [each.error_message for each in responses] == ["", ""]


def test_large_tensors_pass(server: RunningServer) -> None:
    count = 1_000_000
    raw = np.arange(count, dtype=np.float32)
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", 1 << 30)]) as channel:
        request = pb.ModelInferRequest(model_name="large")
        request.inputs.add(name="A", datatype="FP32", shape=[count])
        request.raw_input_contents.append(raw.tobytes())
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, timeout=60)

    assert (np.frombuffer(answer.raw_output_contents[0], np.float32) == raw + 2).all()


def test_a_client_unloads_an_ensemble_with_its_models(server: RunningServer) -> None:
    def loaded() -> set[str]:
        index = post(server, "/v2/repository/index", ready=True)[1]
        return {each["name"] for each in index}

    def change(name: str, what: str, **parameters: Any) -> None:
        path = f"/v2/repository/models/{name}/{what}"
        assert post(server, path, parameters=parameters)[0] == 200

    members = "adds", "repeats", "wide", "labelled"
    for name in ("three", "stream", "large", "two", "sorts_too", "sorts", "sorts_itself", *members):
        change(name, "unload")
    wait_until(lambda: loaded() == set(), what="all to be unloaded")
    change("three", "load")
    assert loaded() == {"three", "adds"}
    change("three", "unload", unload_dependents=True)
    wait_until(lambda: loaded() == set(), what="the ensemble and its model to be unloaded")
    for name in ("three", "stream", "large", "two", "sorts_too", "sorts_itself"):
        change(name, "load")
    status, body = post(
        server, "/v2/repository/models/three/load", parameters={"config": json.dumps({"platform": "ensemble"})}
    )
    assert status == 500
    assert "ensemble scheduling must be set for ensemble three" in body["error"]
    assert post(server, "/v2/models/three/infer", inputs=[INPUT])[0] == 200


def test_the_page_shows_the_steps(server: RunningServer) -> None:
    shown = server.get("/v2/moonpool/overview")[1]
    (three,) = (each for each in shown["models"] if each["name"] == "three")

    assert three["backend"] == "ensemble"
    assert [step["line"] for step in three["steps"]] == [
        "    1  adds  [A → X] → [Y → t1]",
        "1 → 2  adds  [t1 → X] → [Y → t2]",
        "2 → 3  adds  [t2 → X] → [Y → B]",
    ]


@pytest.mark.promise("Ensembles", "A traced request has a trace for each of its steps.")
def test_a_traced_request_has_a_child_for_each_step(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=level=TIMESTAMPS"]
    flags += ["--trace-config=rate=1", "--trace-config=count=-1"]
    with running(repository, *flags) as server:
        assert post(server, "/v2/models/three/infer", inputs=[INPUT], id="7")[0] == 200
        assert post(server, "/v2/models/stream/generate_stream", A=[2, 5, 6])[0] == 200
    rows = json.loads(file.read_text())
    heads = [row for row in rows if "model_name" in row]
    names = {row["id"]: row["model_name"] for row in heads}
    (whole,) = (row["id"] for row in heads if row["model_name"] == "three")
    children = [row for row in heads if row.get("parent_id") == whole]

    assert [row["model_name"] for row in children] == ["adds"] * 3
    assert [row["request_id"] for row in children] == ["7"] * 3
    marks: dict[int, list[str]] = {row["id"]: [] for row in heads}
    for row in rows:
        for stamp in row.get("timestamps", ()):
            marks[row["id"]].append(stamp["name"])
    assert [each for each in marks[whole] if each.startswith("COMPUTE")] == []
    for row in children:
        assert "COMPUTE_START" in marks[row["id"]]
        assert marks[row["id"]][-1] == "REQUEST_END"
    (stream,) = (number for number, name in names.items() if name == "stream")
    assert sorted(row["model_name"] for row in heads if row.get("parent_id") == stream) == ["adds", "adds", "repeats"]


def test_check_draws_the_steps(repository: Path) -> None:
    command = [sys.executable, "-m", "moonpool", "check", str(repository), "three"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert ended.stdout.splitlines()[:3] == [
        "step: three:     1  adds  [A → X] → [Y → t1]",
        "step: three: 1 → 2  adds  [t1 → X] → [Y → t2]",
        "step: three: 2 → 3  adds  [t2 → X] → [Y → B]",
    ]
    assert ended.stdout.splitlines()[3].startswith("ok: three: version 1, 3 steps, loaded in ")
    assert ended.returncode == 0
