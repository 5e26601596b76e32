"""The overview of a server: models, instances, rates, errors, and the last minutes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import hosted_in, registry_of
from tests.server.page.models import write
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.cli.top import _table
from moonpool.runtime.process.usage import usage_of
from moonpool.runtime.server.meter import ClientRequests
from moonpool.runtime.server.openai.meter import ModelCounts, OpenAIMeter
from moonpool.runtime.server.page.history import SAMPLES, History
from moonpool.runtime.server.page.overview import Overview

pytestmark = pytest.mark.promise(
    "The overview",
    "The overview has every model version with its state and reason, its instances with "
    "process and memory, rates and durations of the last seconds, and the last three "
    "minutes second by second.",
)

ROW = {name: np.ones((1, 4), np.float32) for name in ("INPUT0", "INPUT1")}


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(write(tmp_path, "add_sub", "fails")) as runtime:
        yield runtime


@pytest.fixture
def overview(runtime: moonpool.Runtime) -> Iterator[Overview]:
    index = [
        {"name": "add_sub", "version": "1", "state": "READY"},
        {"name": "other", "version": "10", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "other", "version": "9", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "never"},
    ]
    overview = Overview(registry_of(runtime), lambda: index, ClientRequests().counts, OpenAIMeter().pieces)
    yield overview
    overview.close()


@pytest.fixture
def clients() -> ClientRequests:
    return ClientRequests()


@pytest.fixture
def history(runtime: moonpool.Runtime, clients: ClientRequests) -> History:
    """Make an overview whose samples only the test takes."""
    return History(registry_of(runtime), clients.counts, OpenAIMeter().pieces)


def test_models_are_told_with_their_instances_and_the_repository_s_others(
    runtime: moonpool.Runtime, overview: Overview
) -> None:
    def used_s() -> float:
        runtime.infer("add_sub", ROW)
        usage = usage_of(runtime.instances("add_sub")[0]["pid"])
        return 0.0 if usage is None else usage.cpu_s

    wait_until(used_s, 60.0)  # a fork has used no time that the kernel would count
    shown = overview.snapshot()

    names = [(model["name"], model["version"], model["state"]) for model in shown["models"]]
    assert names == [
        ("add_sub", "1", "READY"),
        ("fails", "1", "READY"),
        ("never", "", "UNAVAILABLE"),
        ("other", "9", "UNAVAILABLE"),
        ("other", "10", "UNAVAILABLE"),
    ]
    (instance,) = shown["models"][0]["instances"]
    assert instance["state"] == "READY"
    assert instance["restarts"] == 0
    assert instance["rss_bytes"] > 1 << 20
    assert instance["cpu_s"] > 0
    os.kill(instance["pid"], 0)
    assert shown["models"][3]["reason"] == "unloaded"
    assert shown["server"]["pid"] == os.getpid()


@pytest.mark.promise("OpenAI", "The page and `moonpool top` show the time to the first piece, and pieces a second.")
def test_pieces_are_told_of_models_that_have_some(runtime: moonpool.Runtime) -> None:
    counts = ModelCounts()
    told = {"add_sub": counts.pieces}
    history = History(
        registry_of(runtime), ClientRequests().counts, lambda name: told[name]() if name in told else None
    )
    history.sample()
    counts.first.add(2_000_000)
    counts.gaps.add(1000, 9)
    history.sample()

    some, none = history.recent("add_sub:1"), history.recent("fails:1")
    assert (some["first_piece_us"], some["pieces_per_s"] > 0) == (2000, True)
    assert (none["first_piece_us"], none["pieces_per_s"]) == (None, None)
    model = {"name": "a", "version": "1", "state": "READY", "reason": "", "queued": 0, "failure": 0, "instances": []}
    lines = _table([{**model, "recent": some}, {**model, "recent": none}], 80, instances=False)
    assert [line.text.partition("pieces/s")[2] for line in lines if "pieces/s" in line.text] == [
        ", the first after 2 ms"
    ]
    # A model that was loaded anew begins at none.
    told["add_sub"] = ModelCounts().pieces
    history.sample()
    assert history.recent("add_sub:1")["pieces_per_s"] == 0


@pytest.mark.promise(
    "Seeing sandboxes",
    "The confinement of each instance is in its repr, in `Runtime.instances`, in the overview, "
    "on the page and in `moonpool top`: level, layers, user, the layers that were left out, and "
    "the grants.",
)
def test_how_each_instance_is_confined_is_told(runtime: moonpool.Runtime, overview: Overview) -> None:
    (instance,) = overview.snapshot()["models"][0]["instances"]

    assert instance["sandbox"]["level"] == "standard"
    assert "no_new_privs" in instance["sandbox"]["layers"]
    (shown,) = runtime.instances("add_sub")
    assert shown["sandbox"] == instance["sandbox"]
    (record,) = hosted_in(runtime, "add_sub").supervisor.records
    assert "sandbox standard (dies_with_runtime, " in repr(record.instance)


def test_requests_and_errors_are_counted(runtime: moonpool.Runtime, overview: Overview) -> None:
    runtime.infer("add_sub", ROW)
    with pytest.raises(moonpool.ModelError):
        runtime.infer("fails", {"X": np.zeros(4, np.float32)})

    def told() -> list[tuple[int, int]]:
        return [(each["success"], each["failure"]) for each in overview.snapshot()["models"][:2]]

    wait_until(lambda: told() == [(1, 0), (0, 1)])
    wait_until(lambda: [error["model"] for error in overview.snapshot()["errors"]] == ["fails"])


def test_it_is_json(overview: Overview) -> None:
    shown = overview.snapshot(0)

    assert json.loads(json.dumps(shown)) == shown


def test_samples_are_taken_by_themselves(runtime: moonpool.Runtime, overview: Overview) -> None:
    def history() -> dict[str, Any]:
        history: dict[str, Any] = overview.snapshot(0)["history"]
        return history

    # The first look begins the sampling; an earlier request is in no sample.
    assert history()["taken"] >= 1
    runtime.infer("add_sub", ROW)

    assert wait_until(lambda: sum(history()["series"]["add_sub:1"]["requests"])) == 1


def test_a_sample_has_what_came_since_the_last(
    runtime: moonpool.Runtime, history: History, clients: ClientRequests
) -> None:
    clients.ended(time.monotonic_ns(), has_failed=False)  # before anybody looked
    history.sample()
    begin = history.since(0)["taken"]
    for count in (2, 0):
        for _ in range(count):
            runtime.infer("add_sub", ROW)
        if count:
            clients.ended(time.monotonic_ns() - 5_000_000, has_failed=False)
            clients.ended(time.monotonic_ns(), has_failed=True)
        history.sample()
    shown = history.since(begin)

    assert shown["series"]["add_sub:1"]["requests"] == [2, 0]
    assert shown["series"][""]["requests"] == [2, 0]
    assert shown["series"][""]["failures"] == [1, 0]
    assert shown["series"][""]["latency_us"][0] >= 5000
    recent = history.recent_of_clients()
    assert recent["failures_per_s"] == pytest.approx(recent["requests_per_s"] / 2, abs=0.01)
    assert recent["half_within_us"] == recent["p99_within_us"] >= recent["latency_us"]
    assert shown["series"]["fails:1"]["requests"] == [0, 0]
    latency, nothing = shown["series"]["add_sub:1"]["latency_us"]
    assert latency > 0
    assert nothing is None


def test_present_durations_are_those_of_the_last_seconds(runtime: moonpool.Runtime, history: History) -> None:
    history.sample()
    runtime.infer("add_sub", ROW)
    history.sample()
    recent = history.recent("add_sub:1")

    parts = [recent[f"{part}_us"] for part in ("queue", "input", "infer", "output")]
    assert sum(parts) == pytest.approx(recent["latency_us"], abs=1.0)
    assert recent["requests_per_s"] > 0
    assert recent["failures_per_s"] == 0
    assert recent["half_within_us"] == recent["p99_within_us"] >= recent["latency_us"]
    assert history.recent("fails:1")["latency_us"] is None
    assert history.recent("never:1")["requests_per_s"] == 0


def test_a_model_that_is_loaded_again_starts_anew(runtime: moonpool.Runtime, history: History) -> None:
    for _ in range(3):
        runtime.infer("add_sub", ROW)
    history.sample()
    runtime.unload("add_sub")
    history.sample()
    assert "add_sub:1" not in history.since(0)["series"]
    runtime.load("add_sub")
    runtime.infer("add_sub", ROW)
    history.sample()

    assert history.since(0)["series"]["add_sub:1"]["requests"] == [1]


def test_only_so_many_samples_are_kept(history: History) -> None:
    taken = history.since(0)["taken"]
    for _ in range(SAMPLES + 7):
        history.sample()

    assert len(history.since(0)["series"][""]["requests"]) == SAMPLES
    assert len(history.since(taken + SAMPLES)["series"][""]["requests"]) == 7
    # The number comes from an earlier server.
    assert len(history.since(1 << 40)["series"][""]["requests"]) == SAMPLES


def test_a_process_that_is_gone_uses_nothing() -> None:
    used = usage_of(os.getpid())

    assert used is not None
    assert used.rss_bytes > 1 << 20
    assert usage_of(2**22 + 1) is None
