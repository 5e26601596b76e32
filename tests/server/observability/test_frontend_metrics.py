"""Connections and answers of a server whose front ends have the clients."""

from __future__ import annotations

import pytest

from moonpool.runtime.server.metrics import FrontendMetrics

pytestmark = pytest.mark.promise("Watching a server", "Connections and answers of all front …")


def shown(metrics: FrontendMetrics) -> dict[tuple[str, ...], float]:
    """Return values by name, protocol and status."""
    return {
        (
            family.name.removeprefix("moonpool_frontend_"),
            *(value for _, value in sample.labels),
        ): sample.value
        for family in metrics.families()
        for sample in family.samples
    }


def test_counts_of_another_process_are_shown_once() -> None:
    here, there = FrontendMetrics(), FrontendMetrics()
    here.count_elsewhere()
    for _ in range(3):
        there.http.connected()
        there.http.answered(200)
    there.http.disconnected()
    there.grpc.answered("OK")
    for _ in range(2):
        for traffic in there.take():
            here.add("a", traffic)

    answers = {key: value for key, value in shown(here).items() if "inference" not in key[0]}
    assert answers == {
        ("connections_total", "http"): 3,
        ("open_connections", "http"): 2,
        ("requests_total", "http", "200"): 3,
        ("requests_total", "grpc", "OK"): 1,
    }
    there.http.answered(500)
    assert [traffic.answers for traffic in there.take()] == [[("500", 1)]]


def test_connections_end_with_the_process_that_has_them() -> None:
    here, there = FrontendMetrics(), FrontendMetrics()
    here.count_elsewhere()
    there.http.connected()
    for source in ("a", "b"):
        there = FrontendMetrics()
        there.http.connected()
        (traffic,) = there.take()
        here.add(source, traffic)

    assert shown(here)["open_connections", "http"] == 2
    here.forget("a")
    assert shown(here)["open_connections", "http"] == 1
    assert shown(here)["connections_total", "http"] == 2


def test_connections_of_grpc_are_shown_where_they_are_counted() -> None:
    metrics = FrontendMetrics()
    metrics.grpc.connected()

    assert ("open_connections", "grpc") not in shown(metrics)
    metrics.grpc.has_connections = True
    assert shown(metrics)["open_connections", "grpc"] == 1


def test_forwarded_requests_are_not_counted_twice() -> None:
    metrics = FrontendMetrics()
    metrics.http.answered(200)

    assert shown(metrics)["requests_total", "http", "200"] == 1
    metrics.count_elsewhere()
    assert ("requests_total", "http", "200") not in shown(metrics)
