"""The overview as text is complete, no wider than the terminal, and has nothing that a terminal obeys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.ensemble_repositories import chain, write_ensemble, write_model
from tests.inside import registry_of
from tests.server.page.models import write

import moonpool
from moonpool.runtime.cli.top import overview_lines
from moonpool.runtime.server.meter import ClientRequests
from moonpool.runtime.server.openai.meter import OpenAIMeter
from moonpool.runtime.server.page.overview import Overview

pytestmark = pytest.mark.promise("The overview", "`moonpool top` keeps a terminal up …")

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return the overview of a server with an error, an ensemble, and models that are not loaded."""
    repository = write(tmp_path_factory.mktemp("models"), "add_sub", "fails")
    write_model(repository, "plus_one")
    write_ensemble(repository, "pipeline", chain(["plus_one", "plus_one"]))
    index = [
        {"name": "idle", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such\nfile"},
    ]
    with moonpool.Runtime(repository) as runtime:
        with pytest.raises(moonpool.ModelError):
            runtime.infer("fails", {"X": np.zeros(4, np.float32)})
        clients = ClientRequests()
        clients.ended(time.monotonic_ns(), has_failed=True)
        overview = Overview(registry_of(runtime), lambda: index, clients.counts, OpenAIMeter().pieces)
        yield overview.snapshot()
        overview.close()


def texts(shown: dict[str, Any], width: int = 80, *, instances: bool = True) -> list[str]:
    return [line.text for line in overview_lines(shown, URL, width, instances=instances)]


def test_models_instances_and_errors_are_there(shown: dict[str, Any]) -> None:
    lines = texts(shown, 160)

    assert lines[0].startswith(f"moonpool {moonpool.__version__} at {URL}, up ")
    assert lines[1].startswith("4 of 6 versions ready, 3 processes with ")
    assert lines[2] == "clients: 0 requests/s, 1 failed"
    (add_sub,) = [line.split() for line in lines if line.startswith("add_sub:1")]
    assert add_sub[1:3] == ["READY", "1/1"]
    assert any(line.startswith("  add_sub_0  READY  pid ") for line in lines)
    assert "  no such" in lines
    assert "unloaded" not in "".join(lines)
    assert "fails (1 request): Failed to process" in lines[-1]


def test_the_rates_of_models_are_not_summed(shown: dict[str, Any]) -> None:
    models = [
        {**model, "recent": {**model["recent"], "requests_per_s": 31.0}}
        for model in shown["models"]
        if "recent" in model
    ]
    recent = {**shown["clients"]["recent"], "requests_per_s": 12.0, "latency_us": 1500.0}
    clients = {**shown["clients"], "recent": recent}
    lines = texts({**shown, "models": models, "clients": clients}, 160)

    assert lines[2] == "clients: 12 requests/s, mean latency 1.5 ms, 1 failed"


def test_an_ensemble_has_its_steps_and_no_counts_of_instances(shown: dict[str, Any]) -> None:
    lines = texts(shown, 160)
    (at,) = [n for n, line in enumerate(lines) if line.startswith("pipeline:1")]

    assert lines[at].split() == ["pipeline:1", "READY", "0", "-", "0", "0"]
    assert lines[at + 1].split()[:2] == ["1", "plus_one"]
    assert lines[at + 2].split()[:4] == ["1", "→", "2", "plus_one"]
    assert not any("plus_one  [" in line for line in texts(shown, 160, instances=False))


@pytest.mark.promise("Seeing sandboxes", "The confinement of each instance …")
def test_a_sandbox_that_is_not_the_usual_one_has_lines_of_its_own(shown: dict[str, Any]) -> None:
    instance = shown["models"][0]["instances"][0]
    sandbox = {
        "level": "strict",
        "layers": ["limits", "landlock:7"],
        "left_out": ["namespaces: the kernel refused it"],
        "granted": ["read /data"],
        "user": 60600,
    }
    model = {**shown["models"][0], "instances": [{**instance, "sandbox": sandbox}]}
    lines = texts({**shown, "models": [model]}, 160)

    assert "    sandbox strict: limits, landlock:7; user 60600; granted: read /data" in lines
    assert "    left out: namespaces: the kernel refused it" in lines
    assert not any("sandbox" in line for line in texts(shown))


def test_instances_can_be_left_out(shown: dict[str, Any]) -> None:
    assert not any("add_sub_0" in line for line in texts(shown, instances=False))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(shown: dict[str, Any], width: int) -> None:
    assert max(map(len, texts(shown, width))) <= width


def test_eighty_columns_hold_every_column(shown: dict[str, Any]) -> None:
    (title,) = [line for line in texts(shown, 80) if line.startswith("MODEL")]

    assert title.split()[1:] == ["STATE", "INST", "REQ/S", "LATENCY", "QUEUE", "FAILED", "RST", "MEMORY"]


def test_control_characters_are_escaped(shown: dict[str, Any]) -> None:
    hostile = {
        **shown,
        "errors": [{**shown["errors"][0], "text": "\x1b[2J\x07gone\tis \x9b1m"}],
        "models": [{**shown["models"][0], "name": "a\x1b[31m"}],
    }
    text = "\n".join(texts(hostile, 200))

    assert "\\x1b[2J\\x07gone is \\x9b1m" in text
    assert not {character for character in text if ord(character) < 32} - {"\n"}


def test_a_server_without_models_says_so(shown: dict[str, Any]) -> None:
    lines = texts({**shown, "models": [], "errors": []})

    assert "no model is loaded, and the repository has none" in lines
    assert lines[-1] == "no errors since the server started"
