"""The page on monitoring and the dashboard agree with the metrics of a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import hosted_in, registry_of
from tests.server.observability.models import write

import moonpool
from moonpool.runtime.observe import machine
from moonpool.runtime.observe.metrics_options import metrics_options
from moonpool.runtime.server.metrics import ServerMetrics

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "moonpool.json"
ON = ["summary_latencies=true", "histogram_latencies=true"]
# The lines of histograms and summaries have these endings.
SUFFIX = r"_(?:bucket|sum|count)$"

pytestmark = [
    pytest.mark.skipif(not DOCS.is_dir(), reason="the documents are not in the wheel"),
    pytest.mark.promise("Watching a server", "The dashboard and the alerts use only metrics that exist."),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the text of all metrics, without those of GPUs."""
    folder = write(tmp_path_factory.mktemp("models"))
    options = metrics_options(ON)
    with moonpool.Runtime(folder, metrics=options, response_cache_bytes=1 << 20) as runtime:
        runtime.infer("doubles", {"IN": np.ones((1, 4), np.float32)})
        # Only contained models have some of the metrics.
        strict = {"MOONPOOL_SANDBOX": {"string_value": "strict"}}
        runtime.load("contained", folder / "doubles", config={"parameters": strict})
        cached = {"response_cache": {"enable": True}}
        runtime.load("cached", folder / "doubles", config=cached)
        # Only models that may sleep have some, and those whose memory is limited.
        idle = {"MOONPOOL_IDLE_S": "3600", "MOONPOOL_INSTANCES": "1..2"}
        runtime.load("idle", folder / "doubles", options=idle)
        found = hosted_in(runtime, "idle").residence
        assert found is not None
        found.is_measured = True
        metrics = ServerMetrics(registry_of(runtime))
        metrics.frontends.http.answered(200)
        # Only models that a client of OpenAI's API has asked have some.
        metrics.openai.of("doubles")
        yield metrics.text()
        metrics.close()


def shown(text: str) -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of each family."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in types}
    for name, braced in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        family = name if name in types else re.sub(SUFFIX, "", name)
        labels[family] |= set(re.findall(r'(\w+)="', braced))
    return {name: (kind, labels[name]) for name, kind in types.items()}


def documented() -> dict[str, tuple[str, set[str]]]:
    page = (DOCS / "MONITORING.md").read_text(encoding="utf-8")
    found = {}
    for further, table in re.findall(r"^\| metric \| type \| (further )?labels .+\n((?:\|.*\n)+)", page, re.MULTILINE):
        common = {"model", "version"} if further else set()
        for name, kind, own in re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*)\| \S.*\|$", table, re.MULTILINE):
            found[name] = (kind, {*own.strip().split(", "), *common} - {"", "none"})
    return found


def queries(thing: Any) -> list[str]:
    """Return all queries of a dashboard."""
    if isinstance(thing, list):
        return [query for each in thing for query in queries(each)]
    if not isinstance(thing, dict):
        return []
    own = [thing[key] for key in ("expr", "definition") if isinstance(thing.get(key), str)]
    return own + [query for each in thing.values() for query in queries(each)]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:nv|moonpool|process)_\w+", query))


@pytest.mark.promise("Watching a server", "Metrics can be read by Prometheus, …")
def test_every_metric_is_in_the_page_as_it_is(text: str) -> None:
    page = documented()
    gpus = {name: page.pop(name) for name in machine.GPU_NAMES}

    assert page == shown(text)
    assert {labels for _, kinds in gpus.values() for labels in kinds} == {"gpu_uuid"}


def test_every_query_of_the_dashboard_and_the_alerts_asks_for_what_there_is(text: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = queries(dashboard)
    page = (DOCS / "MONITORING.md").read_text(encoding="utf-8")
    alerts = page.partition("### Alerts")[2].partition("## ")[0]
    there = set(shown(text)) | set(machine.GPU_NAMES)

    assert len(asked) > 30
    for query in [*asked, *alerts.splitlines()]:
        for name in names_in(query):
            assert name in there or re.sub(SUFFIX, "", name) in there, f"{name} in {query}"


def test_every_label_that_the_dashboard_asks_for_is_there(text: str) -> None:
    # Prometheus adds the first two.
    labels = {"job", "instance", "gpu_uuid"}.union(*(of for _, of in shown(text).values()))

    for query in queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))):
        selected = set(re.findall(r'(\w+)=~?"', query))
        grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
        assert selected | grouped <= labels, query


def test_the_panels_of_the_dashboard_have_room() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.promise("Watching a server", "Metrics can be read by Prometheus, …")
def test_prometheus_own_tool_has_nothing_to_say_against_them(text: str, tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed here")
    page = (DOCS / "MONITORING.md").read_text(encoding="utf-8")
    for name in ("moonpool-alerts.yml", "prometheus.yml"):
        (block,) = re.findall(rf"```yaml\n# {name}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(block)
    for arguments in (["check", "rules", "moonpool-alerts.yml"], ["check", "config", "prometheus.yml"]):
        subprocess.run([tool, *arguments], cwd=tmp_path, check=True, capture_output=True)
    checked = subprocess.run([tool, "check", "metrics"], input=text, text=True, check=False, capture_output=True)
    # It objects to Triton's counters without "_total" and to Triton's units.
    said = [line for line in checked.stderr.splitlines() if not line.startswith("nv_")]
    assert said == []
    assert "error while" not in checked.stderr
