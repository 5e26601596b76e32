"""The metrics of a server with real stubs, read by Prometheus' own parser."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.ensemble_repositories import REPEATS, chain, write_ensemble, write_model
from tests.inside import registry_of
from tests.server.observability.models import write
from tests.waiting import wait_until

import moonpool
from moonpool import ModelError
from moonpool.runtime.observe.metric_families import KINDS
from moonpool.runtime.observe.metrics_options import metrics_options
from moonpool.runtime.process.usage import usage_of
from moonpool.runtime.server.metrics import ServerMetrics

pytestmark = [
    pytest.mark.promise(
        "Watching a server",
        "Requests, batches, durations, responses by place, restarts, recoveries, processes, "
        "memory and connections are counted.",
    ),
    pytest.mark.promise("Seeing sandboxes", "Metrics have the level and the layers of each instance."),
]

ONE = {"IN": np.ones((1, 4), np.float32)}
ON = ["summary_latencies=true", "histogram_latencies=true"]


class Scrape:
    """The values of a scrape, by name and labels."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                # The parser adds "_total" to Triton's counters, whose names end without it.
                if family.type == "counter" and f"# TYPE {name} " not in text:
                    name = name.removesuffix("_total")
                self.types[name] = family.type
                of = self.values.setdefault(name, {})
                key = frozenset(sample.labels.items())
                assert key not in of, f"{name} {sample.labels} is there twice"
                of[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """Return the only value with these labels, and maybe more."""
        wanted = set(labels.items())
        (value,) = [v for key, v in self.values[name].items() if wanted <= key]
        return value


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    folder = write(tmp_path_factory.mktemp("models"))
    with moonpool.Runtime(folder, metrics=metrics_options(ON)) as runtime:
        yield runtime


@pytest.fixture
def metrics(runtime: moonpool.Runtime) -> Iterator[ServerMetrics]:
    metrics = ServerMetrics(registry_of(runtime))
    yield metrics
    metrics.close()


@pytest.mark.promise(
    "Watching a server",
    "Metrics can be read by Prometheus, each family and each line once, and are those that the "
    "page names, with these types and labels.",
)
def test_every_line_can_be_read_and_is_there_once(metrics: ServerMetrics) -> None:
    found = Scrape(metrics.text())

    assert found("moonpool_build_info") == 1
    assert "unknown" not in found.types.values()
    # No two families have the same name.
    names = [line.split()[2] for line in metrics.text().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_the_work_of_a_model_is_counted(runtime: moonpool.Runtime, metrics: ServerMetrics) -> None:
    before = Scrape(metrics.text())
    for _ in range(4):
        runtime.infer("doubles", ONE)
    runtime.infer("doubles", {"IN": np.ones((3, 4), np.float32)})
    with pytest.raises(ModelError):
        runtime.infer("doubles", {"IN": np.full((2, 4), 13, np.float32)})
    after = Scrape(metrics.text())

    def came(name: str, **labels: str) -> float:
        labels["model"] = "doubles"
        return after(name, **labels) - before(name, **labels)

    assert came("nv_inference_request_success") == 5
    assert came("nv_inference_request_failure", reason="BACKEND") == 1
    assert came("nv_inference_count") == 7
    assert came("nv_inference_exec_count") == 6
    assert came("moonpool_batch_size_count") == 6
    assert came("moonpool_batch_size_sum") == 4 + 3 + 2
    assert came("moonpool_batch_size_bucket", le="1") == 4
    assert came("moonpool_batch_size_bucket", le="2") == 5
    assert came("moonpool_batch_size_bucket", le="4") == 6
    assert came("moonpool_request_duration_seconds_count") == 5
    seconds = came("moonpool_request_duration_seconds_sum")
    assert seconds == pytest.approx(came("nv_inference_request_duration_us") / 1e6, abs=1e-5)
    assert came("moonpool_request_duration_seconds_bucket", le="60") == 5
    assert came("nv_inference_request_summary_us_count") == 5
    assert came("nv_inference_compute_infer_summary_us_count") == 5
    assert after("nv_inference_request_summary_us", model="doubles", quantile="0.5") > 0
    assert after("moonpool_requests_in_flight", model="doubles") == 0


FIRST = "nv_inference_first_response_histogram_ms"


def test_first_responses_of_all_models_are_counted(runtime: moonpool.Runtime, metrics: ServerMetrics) -> None:
    before = Scrape(metrics.text())
    x = np.array([2, 0, 0, 0], np.float32)
    for _ in range(3):
        assert len(list(runtime.stream("counts", {"IN": x}))) == 2
        runtime.infer("doubles", ONE)
    found = Scrape(metrics.text())

    for model in ("counts", "doubles"):
        for suffix, labels in (("count", {}), ("bucket", {"le": "+Inf"})):
            name = f"{FIRST}_{suffix}"
            assert found(name, model=model, **labels) - before(name, model=model, **labels) == 3
        bounds = {dict(key)["le"] for key in found.values[f"{FIRST}_bucket"] if ("model", model) in key}
        assert bounds == {"100", "500", "2000", "5000", "+Inf"}
    # Of a model that is not decoupled it is the time to the outcome.
    ms = found("nv_inference_request_duration_us", model="doubles") / 1000
    assert found(f"{FIRST}_sum", model="doubles") == pytest.approx(ms, abs=0.01)


def test_a_model_and_an_ensemble_count_first_responses_in_buckets_of_their_own(tmp_path: Path) -> None:
    buckets = """model_metrics { metric_control: [{
        metric_identifier: { family: "nv_inference_first_response_histogram_ms" }
        histogram_options: { buckets: [ -1, 0.25, 3, 60000, 120000 ] } }] }"""
    write_model(tmp_path, "adds", more=buckets)
    write_model(tmp_path, "repeats", REPEATS, more="model_transaction_policy { decoupled: true }")
    write_ensemble(tmp_path, "both", chain(["adds", "adds"]), more=buckets)
    write_ensemble(tmp_path, "stream", chain(["adds", "repeats"]))
    a = np.array([2, 5, 6], np.float32)
    with moonpool.Runtime(tmp_path, metrics=metrics_options(ON)) as runtime:
        for _ in range(4):
            runtime.infer("both", {"A": a})
        assert len(list(runtime.stream("stream", {"A": a}))) == 3
        metrics = ServerMetrics(registry_of(runtime))
        found = Scrape(metrics.text())
        metrics.close()
    for model, count in (("adds", 9), ("both", 4)):
        bounds = [found(f"{FIRST}_bucket", model=model, le=le) for le in ("-1", "0.25", "3", "120000")]
        assert bounds == sorted(bounds)
        assert (bounds[0], bounds[-1]) == (0, count)
        # The other histogram has its own bounds all the same.
        name = "moonpool_request_duration_seconds_bucket"
        assert found(name, model=model, le="60") == count
        assert len([key for key in found.values[name] if ("model", model) in key]) == 20
    assert found(f"{FIRST}_count", model="stream") == 1
    assert found(f"{FIRST}_count", model="repeats") == 1


def test_responses_are_counted_by_their_place(runtime: moonpool.Runtime) -> None:
    def count(place: str, kind: str) -> int:
        of_place = runtime.statistics("counts")["response_stats"]
        counted: int = of_place[place][kind]["count"] if place in of_place else 0
        return counted

    failed, ended = count("2", "fail"), count("3", "empty_response")
    with contextlib.suppress(ModelError):
        list(runtime.stream("counts", {"IN": np.array([2, 1, 0, 0], np.float32)}))
    # The flag comes behind the last response, and is counted last.
    wait_until(lambda: count("3", "empty_response") == ended + 1)
    of_place = runtime.statistics("counts")["response_stats"]

    assert list(of_place["0"]) == [
        "compute_infer", "compute_output", "success", "fail", "empty_response", "cancel",
    ]  # fmt: skip
    assert count("0", "success") == count("0", "compute_infer") >= 1
    assert of_place["0"]["success"]["ns"] > 0
    assert count("2", "fail") == failed + 1
    assert runtime.statistics("doubles")["response_stats"] == {}
    assert runtime.statistics("doubles")["memory_usage"] == []


def test_a_process_is_told_of_and_so_is_its_end(runtime: moonpool.Runtime, metrics: ServerMetrics) -> None:
    first = Scrape(metrics.text())
    (shown,) = runtime.instances("doubles")
    usage = usage_of(shown["pid"])
    assert usage is not None
    instance = {"model_instance": shown["name"]}

    start_s = first("moonpool_stub_start_time_seconds", **instance)
    assert start_s == pytest.approx(usage.started_s, abs=0.05)
    assert abs(start_s - os.stat(f"/proc/{shown['pid']}").st_mtime) < 60
    assert first("moonpool_stub_resident_memory_bytes", **instance) > 1 << 20
    used_s = first("moonpool_stub_cpu_seconds_total", **instance)

    def has_worked() -> bool:
        runtime.infer("doubles", {"IN": np.zeros((1, 4), np.float32)})
        return Scrape(metrics.text())("moonpool_stub_cpu_seconds_total", **instance) > used_s

    wait_until(has_worked, 60.0)
    assert first("moonpool_region_allocated_bytes", direction="request", **instance) >= 1 << 16
    assert first("moonpool_instances", model="doubles", state="READY") == 1
    assert first("moonpool_model_ready", model="doubles") == 1
    sandbox = {"level": "standard", "layers": ",".join(shown["sandbox"]["layers"])}
    assert first("moonpool_instance_sandbox_info", **instance, **sandbox) == 1
    restarts = first("moonpool_instance_restarts_total", **instance)
    recoveries = first("moonpool_recovery_seconds_count", model="doubles")

    with pytest.raises(moonpool.StubDied):
        runtime.infer("doubles", {"IN": np.full((1, 4), 99, np.float32)})
    wait_until(lambda: runtime.is_ready("doubles"), 60.0)
    second = Scrape(metrics.text())

    assert second("moonpool_instance_restarts_total", **instance) == restarts + 1
    assert second("moonpool_recovery_seconds_count", model="doubles") == recoveries + 1
    assert second("moonpool_recovery_seconds_sum", model="doubles") > 0
    assert second("moonpool_stub_start_time_seconds", **instance) > start_s


def test_memory_that_is_looked_at_is_in_use(runtime: moonpool.Runtime, metrics: ServerMetrics) -> None:
    future = runtime.submit("asks", ONE)
    future.result(60)
    found = Scrape(metrics.text())

    used = found("moonpool_region_used_bytes", model="asks")
    allocated = found("moonpool_region_allocated_bytes", model="asks", direction="request")
    assert 0 <= used <= allocated


def test_frontends_count_connections_and_answers(metrics: ServerMetrics) -> None:
    meter = metrics.frontends.http
    meter.connected()
    meter.connected()
    meter.disconnected()
    meter.answered(200)
    meter.answered(200)
    metrics.frontends.grpc.answered("INVALID_ARGUMENT")
    found = Scrape(metrics.text())

    assert found("moonpool_frontend_connections_total", protocol="http") == 2
    assert found("moonpool_frontend_open_connections", protocol="http") == 1
    assert found("moonpool_frontend_requests_total", protocol="http", status="200") == 2
    assert found("moonpool_frontend_requests_total", protocol="grpc", status="INVALID_ARGUMENT") == 1
    assert found("moonpool_frontend_open_connections", protocol="grpc") == 0


def test_the_process_and_the_machine_are_told_of(metrics: ServerMetrics) -> None:
    found = Scrape(metrics.text())

    assert found("process_resident_memory_bytes") > 1 << 20
    assert found.types["process_cpu_seconds_total"] == "counter"
    assert found("process_open_fds") > 3
    assert found("nv_cpu_memory_total_bytes") > found("nv_cpu_memory_used_bytes") > 0
    assert 0 <= found("nv_cpu_utilization") <= 1


def test_unwanted_metrics_are_missing() -> None:
    options = metrics_options(["counter_latencies=false"], allow_cpu=False, allow_gpu=False)
    with moonpool.Runtime(metrics=options) as runtime:
        runtime.load("m", Path(__file__).parents[2] / "models" / "square.py", config=SQUARE)
        metrics = ServerMetrics(registry_of(runtime))
        names = set(Scrape(metrics.text()).values)
        metrics.close()

    assert "nv_inference_count" in names
    assert not [name for name in names if "duration_us" in name or "summary" in name]
    assert not [name for name in names if "nv_cpu" in name or "first_response" in name]


SQUARE = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
}


@pytest.mark.promise("Metrics", "No metric of a model, and …")
def test_every_name_that_is_shown_is_reserved(runtime: moonpool.Runtime, metrics: ServerMetrics) -> None:
    runtime.infer("doubles", ONE)

    shown = {line.split()[2] for line in metrics.text().splitlines() if line.startswith("# TYPE ")}

    assert {"process_cpu_seconds_total", "moonpool_build_info", "nv_inference_count"} <= shown
    assert shown <= set(KINDS)
