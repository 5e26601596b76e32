"""Ensembles from Python: steps, errors, ends, loading and unloading, with real stubs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import (
    ADDS,
    FAILS,
    IN,
    REPEATS,
    TELLS,
    TEXT,
    B,
    Io,
    chain,
    ensemble_text,
    step,
    write_ensemble,
    write_model,
)
from tests.inside import hosted_in, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.repository_control import RepositoryControl

X = np.array([2, 5, 6], np.float32)
TIMEOUT_S = 60.0
ANY = (Io("X", dims="-1"),), (Io("Y", dims="-1"),)
# Waits until the file HELD, beside the model, is gone.
HOLDS = """
import os
import time

import triton_python_backend_utils as pb_utils

HELD = os.path.join(os.path.dirname(__file__), "HELD")


class TritonPythonModel:
    def execute(self, requests):
        while os.path.exists(HELD):
            time.sleep(0.002)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(each, "X").as_numpy() + 1)]
            )
            for each in requests
        ]
"""
DIES = """
import os


class TritonPythonModel:
    def execute(self, requests):
        os._exit(7)
"""


def write_all(folder: Path) -> None:
    batching = "max_batch_size: 4"
    write_model(folder, "adds")
    write_model(folder, "batched", more=batching)
    write_model(folder, "repeats", REPEATS, more="model_transaction_policy { decoupled: true }")
    write_model(folder, "fails", FAILS)
    write_model(folder, "tells", TELLS, outputs=TEXT)
    text_in = (Io("X", "STRING", "-1"),)
    write_model(
        folder,
        "words",
        TELLS.replace("as_numpy().tolist()", "as_numpy().astype(str).tolist()"),
        inputs=text_in,
        outputs=TEXT,
    )
    write_ensemble(folder, "three", chain(["adds", "adds", "adds"]))
    write_ensemble(folder, "grouped", chain([f"group{number}" for number in range(3)]), more=batching)
    for number in range(3):
        write_model(folder, f"group{number}", more="max_batch_size: 64 dynamic_batching {}")
    write_ensemble(folder, "hundred", chain(["adds"] * 100))
    write_ensemble(folder, "outer", [step("three", {"A": "A"}, {"B": "t"}), *chain(["adds"], "t")])
    write_ensemble(folder, "stream", chain(["adds", "repeats", "adds"]))
    write_ensemble(folder, "streams", chain(["repeats", "repeats"]))
    write_ensemble(folder, "failing", chain(["adds", "fails"]))
    write_ensemble(folder, "wordy", chain(["tells", "words"]), outputs=(Io("B", "STRING", "1"),))
    write_ensemble(folder, "mixed", chain(["batched", "adds", "batched"]), more=batching)
    write_ensemble(folder, "branches", [*chain(["adds"]), *chain(["fails"], "A", "C")], outputs=(*B, Io("C")))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def runtime(repository: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(repository, drain_timeout_s=10.0) as runtime:
        yield runtime


def in_flight(runtime: moonpool.Runtime, *names: str) -> int:
    return sum(hosted_in(runtime, name).scheduler.in_flight for name in names)


class TestRequests:
    @pytest.mark.promise(
        "Ensembles",
        "A model whose platform is `ensemble` sends each request through the models of its steps. It is asked as any "
        "other model: from Python, over HTTP and gRPC, and by models.",
    )
    def test_each_step_gets_what_the_one_before_gave(self, runtime: moonpool.Runtime) -> None:
        assert runtime.infer("three", {"A": X})["B"].tolist() == [5, 8, 9]
        assert runtime.infer("three", {"A": X}, timeout_s=TIMEOUT_S)["B"].tolist() == [5, 8, 9]
        assert runtime.submit("three", {"A": X}).result(TIMEOUT_S).outputs["B"].tolist() == [5, 8, 9]
        assert [each.outputs["B"].tolist() for each in runtime.stream("three", {"A": X})] == [[5, 8, 9]]

    def test_event_loops_and_threads_may_ask_it(self, runtime: moonpool.Runtime) -> None:
        async def ask() -> list[Any]:
            asked = (runtime.ainfer("three", {"A": X + n}, timeout_s=TIMEOUT_S) for n in range(20))
            return [each["B"].tolist() for each in await asyncio.gather(*asked)]

        assert asyncio.run(ask()) == [[5 + n, 8 + n, 9 + n] for n in range(20)]
        got: list[Any] = []
        threads = [
            threading.Thread(target=lambda: got.append(runtime.infer("three", {"A": X})["B"].tolist()))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [[5, 8, 9]] * 8

    def test_steps_of_requests_in_one_event_loop_share_batches(self, runtime: moonpool.Runtime) -> None:
        async def ask() -> None:
            asked = (runtime.ainfer("grouped", {"A": X[None] + n}) for n in range(24))
            assert [each["B"].tolist() for each in await asyncio.gather(*asked)] == [
                [[5 + n, 8 + n, 9 + n]] for n in range(24)
            ]

        before = executions(runtime, "group2")
        asyncio.run(ask())
        # The first request goes alone, and the others stay together; if somebody else drives a batch of them, they may
        # part once.
        assert executions(runtime, "group2") - before < 12

    def test_a_hundred_steps_are_no_more_than_three(self, runtime: moonpool.Runtime) -> None:
        assert runtime.infer("hundred", {"A": X}, timeout_s=TIMEOUT_S)["B"].tolist() == [102, 105, 106]

    def test_strings_stay_strings(self, runtime: moonpool.Runtime) -> None:
        (told,) = runtime.infer("wordy", {"A": X})["B"].tolist()
        (seen,) = json.loads(told)["inputs"]["X"]

        assert "[2.0, 5.0, 6.0]" in seen

    def test_an_allocator_gets_the_outputs(self, runtime: moonpool.Runtime) -> None:
        class Allocator(moonpool.ResponseAllocator):
            def __init__(self) -> None:
                self.asked: list[tuple[str, str, tuple[int, ...]]] = []

            def alloc(self, name: str, datatype: str, shape: Any, size_bytes: int, userp: object) -> Any:
                assert userp is None
                self.asked.append((name, datatype, shape))
                return bytearray(size_bytes)

        allocator = Allocator()
        response = runtime.request("three", {"A": X}, allocator=allocator)

        assert response.outputs["B"].tolist() == [5, 8, 9]
        assert allocator.asked == [("B", "FP32", (3,))]


@pytest.mark.needs("shared memory")
@pytest.mark.promise("Ensembles", "A tensor goes from stub to stub without a copy where both may share memory.")
def test_a_large_tensor_is_lent_from_stub_to_stub(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_model(tmp_path, name, inputs=ANY[0], outputs=ANY[1])
    one_any = (Io("A", dims="-1"),), (Io("B", dims="-1"),)
    write_ensemble(tmp_path, "wide", chain(["first", "second"]), *one_any)
    x = np.zeros(4_000_000, np.float32)
    with moonpool.Runtime(tmp_path) as runtime:
        assert (runtime.infer("wide", {"A": x})["B"] == 2).all()
        requests = {model: region_bytes(runtime, model, "request") for model in ("first", "second")}

    assert requests["first"] > x.nbytes > requests["second"]


def region_bytes(runtime: moonpool.Runtime, model: str, direction: str) -> int:
    """The size of the memory of a model's only instance in this direction."""
    start = f'moonpool_region_allocated_bytes{{direction="{direction}",model="{model}"'
    (line,) = (each for each in runtime.metrics().splitlines() if each.startswith(start))
    return int(line.rpartition(" ")[2])


class TestStreams:
    def test_a_stream_that_is_closed_leaves_nothing_open(self, runtime: moonpool.Runtime) -> None:
        stream = runtime.stream("streams", {"A": np.full(3, 30, np.float32)})
        next(stream)
        stream.close()

        wait_until(lambda: not in_flight(runtime, "streams", "repeats"), what="the stream to end")


class TestErrors:
    def test_a_model_that_dies_fails_its_request_alone(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds")
        write_model(tmp_path, "dies", DIES)
        write_ensemble(tmp_path, "dying", chain(["adds", "dies"]))
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        with moonpool.Runtime(tmp_path) as runtime:
            with pytest.raises(moonpool.StubDied, match="in ensemble 'dying', "):
                runtime.infer("dying", {"A": X}, timeout_s=TIMEOUT_S)
            assert runtime.infer("three", {"A": X})["B"].tolist() == [5, 8, 9]
            assert in_flight(runtime, "dying", "dies", "adds") == 0
            wait_until(lambda: runtime.is_ready("dying"), TIMEOUT_S, "the model to come back")


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[tuple[moonpool.Runtime, Path]]:
    """A runtime with `held`, which adds 1, waits in `holds` and adds 1, and the file that holds it."""
    write_model(folder, "adds")
    write_model(folder, "holds", HOLDS)
    write_ensemble(folder, "held", chain(["adds", "holds", "adds"]))
    held = folder / "holds" / "1" / "HELD"
    held.touch()
    with moonpool.Runtime(folder, drain_timeout_s=20.0) as runtime:
        try:
            yield runtime, held
        finally:
            held.unlink(missing_ok=True)


class TestInTheMiddle:
    @pytest.mark.promise(
        "Ensembles",
        "A caller that leaves takes its request out of all steps: those that run are told, and no other one begins.",
    )
    def test_a_caller_that_leaves_begins_no_further_step(self, tmp_path: Path) -> None:
        with holding(tmp_path) as (runtime, held):
            stream = runtime.stream("held", {"A": X}, timeout_s=TIMEOUT_S)
            wait_until(lambda: in_flight(runtime, "holds") == 1, what="the second step of the first to begin")
            stream._deadline = time.monotonic()
            with pytest.raises(moonpool.RequestTimedOut):
                next(stream)
            wait_until(lambda: not in_flight(runtime, "adds", "held"), what="the first to leave")
            future = runtime.submit("held", {"A": X})
            wait_until(lambda: in_flight(runtime, "holds") == 2, what="the second step to begin")
            assert future.cancel()
            before = runtime.statistics("adds")["inference_count"]
            held.unlink()
            wait_until(lambda: not in_flight(runtime, "held", "holds", "adds"), what="the steps to end")

            assert runtime.statistics("adds")["inference_count"] == before
            assert runtime.statistics("held")["inference_stats"]["fail"]["count"] == 2
            assert runtime.infer("held", {"A": X})["B"].tolist() == [5, 8, 9]

    def test_a_model_that_is_unloaded_finishes_the_requests_of_its_ensemble(self, tmp_path: Path) -> None:
        with holding(tmp_path) as (runtime, held):
            futures = [runtime.submit("held", {"A": X}) for _ in range(5)]
            wait_until(lambda: in_flight(runtime, "holds") > 0, what="a step to begin")
            registry_of(runtime).begin_unload("adds")
            with pytest.raises(moonpool.ModelUnavailable, match=r"'held' which is .* unloading"):
                runtime.infer("held", {"A": X})
            held.unlink()

            assert [each.result(TIMEOUT_S).outputs["B"].tolist() for each in futures] == [[5, 8, 9]] * 5

    def test_no_more_requests_than_allowed_are_in_a_step(self, tmp_path: Path) -> None:
        limited = "max_inflight_requests: 2"
        write_model(tmp_path, "adds")
        write_model(tmp_path, "holds", HOLDS)
        write_ensemble(tmp_path, "held", chain(["adds", "holds", "adds"]))
        file = tmp_path / "held" / "config.pbtxt"
        file.write_text(file.read_text().replace("ensemble_scheduling {", f"ensemble_scheduling {{ {limited}"))
        held = tmp_path / "holds" / "1" / "HELD"
        held.touch()
        with moonpool.Runtime(tmp_path) as runtime:
            futures = [runtime.submit("held", {"A": X}) for _ in range(50)]
            try:
                wait_until(lambda: runtime.statistics("adds")["inference_count"] >= 2, what="two to be in")
                assert in_flight(runtime, "holds") <= 2
                assert in_flight(runtime, "held") == 50
                # Those that wait at the gate may leave, and those that are behind it may.
                assert [futures[number].cancel() for number in (0, 1, 10, 49)] == [True] * 4
            finally:
                held.unlink()
            rest = [each for each in futures if not each.cancelled()]

            assert [each.result(TIMEOUT_S).outputs["B"].tolist() for each in rest] == [[5, 8, 9]] * 46
            wait_until(lambda: not in_flight(runtime, "held", "holds", "adds"), what="the end")


@pytest.mark.slow
@pytest.mark.promise("Ensembles", "Of ten thousand requests at once, each has an outcome, and nothing stays behind.")
def test_ten_thousand_requests_at_once_all_have_an_outcome(tmp_path: Path) -> None:
    slow = ADDS.replace("        responses = []", "        time.sleep(0.005)\n        responses = []")
    batching = "max_batch_size: 64 dynamic_batching { }"
    write_model(tmp_path, "adds", more=batching)
    write_model(tmp_path, "slow", "import time\n" + slow, more=batching)
    write_ensemble(tmp_path, "three", chain(["adds", "slow", "adds"]), more="max_batch_size: 64")
    with moonpool.Runtime(tmp_path) as runtime:
        futures: list[Future[moonpool.Response]] = []
        for number in range(10_000):
            futures.append(runtime.submit("three", {"A": X[None] + number % 50}))
            if number % 10 == 9:
                futures[-1].cancel()
        good = cancelled = 0
        for number, future in enumerate(futures):
            if future.cancelled():
                cancelled += 1
                continue
            assert future.result(TIMEOUT_S).outputs["B"][0][0] == 5 + number % 50
            good += 1

        assert good + cancelled == 10_000
        wait_until(lambda: not in_flight(runtime, "three", "slow", "adds"), what="the end")
        statistics = runtime.statistics("three")["inference_stats"]
        # A caller may leave when its answer is just counted.
        assert good <= statistics["success"]["count"] <= good + cancelled
        assert statistics["success"]["count"] + statistics["fail"]["count"] == 10_000


class TestStatistics:
    @pytest.mark.promise(
        "Ensembles",
        "An ensemble has statistics of its own. Its compute times are the sums over its steps, as in Triton.",
    )
    def test_compute_times_are_sums_over_the_steps(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds")
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        with moonpool.Runtime(tmp_path) as runtime:
            for _ in range(5):
                runtime.infer("three", {"A": X})
            own = runtime.statistics("three")
            step = runtime.statistics("adds")["inference_stats"]

        assert (own["inference_count"], own["execution_count"]) == (5, 5)
        assert own["inference_stats"]["success"]["count"] == 5
        assert step["success"]["count"] == 15
        own_ns = {kind: each["ns"] for kind, each in own["inference_stats"].items()}
        step_ns = {kind: each["ns"] for kind, each in step.items()}
        assert own_ns["compute_input"] == step_ns["compute_input"]
        # What comes between the answer and its outcome counts as inference here, and as output there.
        assert step_ns["compute_infer"] <= own_ns["compute_infer"] <= own_ns["success"]
        assert own["batch_stats"][0]["batch_size"] == 1

    def test_a_failure_counts_as_one_of_the_ensemble(self, runtime: moonpool.Runtime) -> None:
        before = runtime.statistics("failing")["inference_stats"]["fail"]["count"]
        with pytest.raises(moonpool.ModelError):
            runtime.infer("failing", {"A": X})

        assert runtime.statistics("failing")["inference_stats"]["fail"]["count"] == before + 1
        assert 'nv_inference_request_failure{model="failing",reason="OTHER",version="1"}' in runtime.metrics()


class TestLoading:
    @pytest.mark.promise(
        "Ensembles",
        "Loading an ensemble loads the models of its steps. It goes when one of them is unloaded, and comes back with "
        "it.",
    )
    def test_models_come_and_go_together(self, repository: Path) -> None:
        with moonpool.Runtime(repository, models=["outer"]) as runtime:
            assert sorted(runtime.models()) == ["adds", "outer", "three"]
            assert runtime.is_ready("outer")
            runtime.unload("adds")
            assert runtime.models() == {}
            assert runtime.why_not_ready("outer") == "Request for unknown model: 'outer' has no available versions"
            runtime.load("adds")
            assert sorted(runtime.models()) == ["adds", "outer", "three"]
            assert runtime.infer("outer", {"A": X})["B"].tolist() == [6, 9, 10]
            runtime.unload("outer")
            runtime.load("adds")
            assert sorted(runtime.models()) == ["adds", "three"]

    @pytest.mark.promise(
        "Ensembles", "Unloading an ensemble with its dependents takes the models along that were loaded for it alone."
    )
    def test_models_that_were_loaded_for_it_alone_go_with_it(self, repository: Path) -> None:
        with moonpool.Runtime(repository, models=["failing"]) as runtime:
            runtime.load("adds")
            runtime.load("branches")
            registry_of(runtime).begin_unload("failing", with_members=True)
            wait_until(lambda: sorted(runtime.models()) == ["adds", "branches", "fails"])
            registry_of(runtime).begin_unload("branches", with_members=True)
            wait_until(lambda: sorted(runtime.models()) == ["adds"])

    @pytest.mark.parametrize(
        ("steps", "what"),
        [
            (chain(["nobody", "adds", "none"]), "ensemble e contains models that are not available or ambiguous: nobody, none"),
            ([step("e2", {"A": "A"}, {"B": "B"})], "circular dependency between ensembles: e -> ... -> e2 -> e"),
            (chain(["broken"]), "ensemble 'e' depends on 'broken' which has no loaded version. Model 'broken' loading failed "
             "with error: version 1 is at UNAVAILABLE state: Internal: ValueError: no"),
        ],
    )  # fmt: skip
    def test_members_that_cannot_be_had_fail_the_load(self, tmp_path: Path, steps: list[str], what: str) -> None:
        write_model(tmp_path, "adds")
        write_model(tmp_path, "broken", "raise ValueError('no')")
        write_ensemble(tmp_path, "e", steps)
        write_ensemble(tmp_path, "e2", [step("e", {"A": "A"}, {"B": "B"})])
        with moonpool.Runtime(tmp_path, models=[]) as runtime:
            with pytest.raises(moonpool.LoadFailed) as caught:
                runtime.load("e")
            assert str(caught.value).startswith(what)
            assert caught.value.code == "INVALID_ARG"
            assert "e" not in runtime.models()

    def test_circles_that_load_at_once_end(self, tmp_path: Path) -> None:
        for number in range(3):
            other = f"e{(number + 1) % 3}"
            write_ensemble(tmp_path, f"e{number}", [step(other, {"A": "A"}, {"B": "B"})])

        with pytest.raises(moonpool.LoadFailed, match="circular dependency between ensembles"):
            moonpool.Runtime(tmp_path)

    @pytest.mark.promise(
        "Ensembles",
        "A model that is replaced serves its ensembles from then on. An ensemble that it does not fit any more is "
        "unloaded.",
    )
    def test_an_ensemble_follows_a_model_that_is_replaced(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds")
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        code = tmp_path / "adds" / "1" / "model.py"
        config = tmp_path / "adds" / "config.pbtxt"
        with moonpool.Runtime(tmp_path) as runtime:
            code.write_text(ADDS.replace("x + 1", "x + 10"))
            runtime.load("adds")
            assert runtime.infer("three", {"A": X})["B"].tolist() == [32, 35, 36]
            was = config.read_text()
            config.write_text(was.replace("FP32", "FP64"))
            runtime.load("adds")
            assert sorted(runtime.models()) == ["adds"]
            config.write_text(was)
            runtime.load("adds")
            assert runtime.infer("three", {"A": X})["B"].tolist() == [32, 35, 36]

    @pytest.mark.promise(
        "Ensembles",
        "Instances of a step's model come and go while the ensemble serves. Other changes of a model or of the steps "
        "load anew, and the old ensemble serves until the new one is ready.",
    )
    def test_what_changes_under_an_ensemble_changes_while_it_serves(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds")
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        config = tmp_path / "adds" / "config.pbtxt"
        steps = tmp_path / "three" / "config.pbtxt"
        with moonpool.Runtime(tmp_path) as runtime:
            before = hosted_in(runtime, "three")
            runtime.scale("adds", 2)
            config.write_text(config.read_text() + "instance_group [{ count: 3 kind: KIND_CPU }]")
            runtime.load("adds")
            assert len(runtime.instances("adds")) == 3
            assert runtime.infer("three", {"A": X})["B"].tolist() == [5, 8, 9]
            assert hosted_in(runtime, "three") is before

            steps.write_text(ensemble_text(chain(["adds"] * 5)))
            pids = [each["pid"] for each in runtime.instances("adds")]
            runtime.load("three")
            assert runtime.infer("three", {"A": X})["B"].tolist() == [7, 10, 11]
            assert [each["pid"] for each in runtime.instances("adds")] == pids

            steps.write_text(ensemble_text(chain(["adds", "nobody"])))
            with pytest.raises(moonpool.LoadFailed, match="not available or ambiguous: nobody"):
                runtime.load("three")
            assert runtime.infer("three", {"A": X})["B"].tolist() == [7, 10, 11]

    def test_an_ensemble_is_scaled_by_its_models(self, runtime: moonpool.Runtime) -> None:
        with pytest.raises(moonpool.InvalidRequest) as caught:
            runtime.scale("mixed", 2)
        assert str(caught.value) == (
            "model 'mixed' is an ensemble, which has no instances; scale the models of its steps: batched, adds"
        )

    def test_the_versions_of_an_ensemble_follow_its_policy(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds")
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        (tmp_path / "three" / "2").mkdir()
        steps = tmp_path / "three" / "config.pbtxt"
        with moonpool.Runtime(tmp_path) as runtime:
            assert runtime.models()["three"] == [2]
            steps.write_text(steps.read_text() + "version_policy { all { } }")
            runtime.load("three")
            assert runtime.models()["three"] == [1, 2]
            assert runtime.infer("three", {"A": X}, version=1)["B"].tolist() == [5, 8, 9]

    def test_a_decoupled_model_makes_an_ensemble_decoupled_later(self, tmp_path: Path) -> None:
        write_model(tmp_path, "adds", inputs=IN)
        write_ensemble(tmp_path, "three", chain(["adds"] * 3))
        with moonpool.Runtime(tmp_path) as runtime:
            runtime.infer("three", {"A": X})
            (tmp_path / "adds" / "1" / "model.py").write_text(REPEATS)
            config = tmp_path / "adds" / "config.pbtxt"
            config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }")
            runtime.load("adds")

            assert runtime.config("three").decoupled
            assert len(list(runtime.stream("three", {"A": np.ones(3, np.float32)}))) == 1

    def test_an_ensemble_comes_from_a_dictionary_and_from_a_folder(self, tmp_path: Path, repository: Path) -> None:
        write_ensemble(tmp_path, "mine", chain(["adds", "adds"]))
        with moonpool.Runtime(repository, models=["adds"]) as runtime:
            runtime.load("mine", tmp_path / "mine")
            assert runtime.infer("mine", {"A": X})["B"].tolist() == [4, 7, 8]
            runtime.load("three", config={"max_batch_size": 0})
            assert runtime.infer("three", {"A": X})["B"].tolist() == [5, 8, 9]

    def test_an_ensemble_comes_with_the_request_of_a_client(self, repository: Path) -> None:
        tensors = {"data_type": "TYPE_FP32", "dims": [3]}
        maps = {"input_map": {"X": "A"}, "output_map": {"Y": "B"}}
        config = {
            "platform": "ensemble",
            "input": [{"name": "A", **tensors}],
            "output": [{"name": "B", **tensors}],
            "ensemble_scheduling": {"step": [{"model_name": "adds", "model_version": -1, **maps}]},
        }
        with moonpool.Runtime(repository, models=[]) as runtime:
            control = RepositoryControl(runtime, mode="explicit")
            control.load("brought", json.dumps(config), {"file:1/empty": b""})
            assert runtime.infer("brought", {"A": X})["B"].tolist() == [3, 6, 7]

    def test_an_ensemble_is_as_ready_as_its_models(self, runtime: moonpool.Runtime) -> None:
        assert runtime.is_ready("outer")
        assert runtime.instances("outer") == []
        assert 'moonpool_model_ready{model="outer",version="1"} 1' in runtime.metrics()
        assert repr(runtime.empty("three", "A", 3).shape) == "(3,)"


CACHED = "response_cache { enable: true }"


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[tuple[Path, moonpool.Runtime]]:
    folder = tmp_path / "cached"
    write_model(folder, "adds")
    write_model(folder, "fails", FAILS)
    write_model(folder, "holds", HOLDS)
    write_ensemble(folder, "two", chain(["adds", "adds"]), more=CACHED)
    outer = [step("two", {"A": "A"}, {"B": "t"}), *chain(["adds"], "t")]
    write_ensemble(folder, "outer", outer, more=CACHED)
    write_ensemble(folder, "failing", chain(["adds", "fails"]), more=CACHED)
    write_ensemble(folder, "slow", chain(["holds"]), more=CACHED)
    with moonpool.Runtime(folder, models=[], response_cache_bytes=1 << 20) as runtime:
        yield folder, runtime


def executions(runtime: moonpool.Runtime, name: str) -> int:
    count = runtime.statistics(name)["execution_count"]
    assert isinstance(count, int)
    return count


class TestCache:
    @pytest.mark.promise(
        "Ensembles",
        "An ensemble with `response_cache` answers an equal request without asking a model. If one of its models is "
        "replaced, its responses are forgotten.",
    )
    def test_an_equal_request_asks_no_model(self, cached: tuple[Path, moonpool.Runtime]) -> None:
        folder, runtime = cached
        runtime.load("outer")
        before = executions(runtime, "adds")
        for name, result in (("two", [4, 7, 8]), ("outer", [5, 8, 9])):
            assert runtime.infer(name, {"A": X})["B"].tolist() == result
            asked = executions(runtime, "adds")
            assert asked > before
            assert runtime.infer(name, {"A": X})["B"].tolist() == result
            assert runtime.submit(name, {"A": X}).result(TIMEOUT_S).outputs["B"].tolist() == result
            assert asyncio.run(runtime.ainfer(name, {"A": X}))["B"].tolist() == result
            assert executions(runtime, "adds") == asked
            counts = runtime.statistics(name)["inference_stats"]
            assert counts["cache_hit"]["count"] == 3
            assert counts["cache_miss"]["count"] == 1
            before = asked
        # The last one as a step of the other ensemble.
        assert 'nv_cache_num_hits_per_model{model="two",version="1"} 4' in runtime.metrics()

        code = folder / "adds" / "1" / "model.py"
        code.write_text(ADDS.replace("x + 1", "x + 10"))
        runtime.load("adds")
        assert runtime.infer("two", {"A": X})["B"].tolist() == [22, 25, 26]
        assert runtime.infer("outer", {"A": X})["B"].tolist() == [32, 35, 36]

    def test_errors_are_not_kept(self, cached: tuple[Path, moonpool.Runtime]) -> None:
        _, runtime = cached
        runtime.load("failing")
        for _ in range(2):
            with pytest.raises(moonpool.ModelError, match="in ensemble 'failing', not today"):
                runtime.infer("failing", {"A": X})
        assert executions(runtime, "fails") == 2

    def test_a_caller_that_leaves_is_forgotten(self, cached: tuple[Path, moonpool.Runtime]) -> None:
        folder, runtime = cached
        held = folder / "holds" / "1" / "HELD"
        held.touch()
        runtime.load("slow")
        scheduler = hosted_in(runtime, "slow").scheduler
        x = X.copy()
        with pytest.raises(moonpool.RequestTimedOut):
            runtime.infer("slow", {"A": x}, timeout_s=0.05)
        kept = weakref.ref(x)
        del x
        stays = runtime.submit("slow", {"A": X})
        wait_until(lambda: scheduler.in_flight == 1)
        held.unlink()
        assert stays.result(TIMEOUT_S).outputs["B"].tolist() == [3, 6, 7]
        # The thread that drove the request may be about to forget it.
        wait_until(lambda: kept() is None)
        assert runtime.statistics("slow")["inference_stats"]["cache_miss"]["count"] == 1

    def test_what_was_asked_before_a_model_was_replaced_is_not_kept(
        self, cached: tuple[Path, moonpool.Runtime]
    ) -> None:
        folder, runtime = cached
        held = folder / "holds" / "1" / "HELD"
        held.touch()
        runtime.load("slow")
        before = runtime.submit("slow", {"A": X + 1})
        executing = hosted_in(runtime, "holds").scheduler
        wait_until(lambda: executing.executing == 1)
        code = folder / "holds" / "1" / "model.py"
        code.write_text(HOLDS.replace("as_numpy() + 1", "as_numpy() + 10"))
        runtime.load("holds")
        held.unlink()
        assert before.result(TIMEOUT_S).outputs["B"].tolist() == [4, 7, 8]
        assert runtime.infer("slow", {"A": X + 1})["B"].tolist() == [13, 16, 17]


def test_a_model_asks_an_ensemble(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    asks = ADDS.replace(
        'pb_utils.Tensor("Y", x + 1)',
        'pb_utils.InferenceRequest(model_name="three", requested_output_names=["B"], '
        'inputs=[pb_utils.Tensor("A", x)]).exec().output_tensors()[0]',
    ).replace("pb_utils.InferenceResponse([", "pb_utils.InferenceResponse([rename(")
    asks = asks.replace(".output_tensors()[0]", ".output_tensors()[0])") + (
        "\n\ndef rename(tensor):\n    return pb_utils.Tensor('Y', tensor.as_numpy())\n"
    )
    write_model(tmp_path, "asks", asks)
    runtime.load("asks", tmp_path / "asks")
    try:
        assert runtime.infer("asks", {"X": X})["Y"].tolist() == [5, 8, 9]
    finally:
        runtime.unload("asks")
