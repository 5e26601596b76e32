"""The state of a server at this moment, as one dict, which the page and `moonpool top` show.

Theory of operation. Many clients may look at once, and a look reads /proc for every stub. So `_lock` is held while the
dict is made. Requests that come meanwhile, or up to `_FRESH_S` later, get the same one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moonpool.runtime.ensemble.drawing import drawn, shown_steps
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.model.config.ensembles import EnsembleScheduling
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.openai.conventions import endpoints_of
from moonpool.runtime.process.usage import usage_of
from moonpool.runtime.server.meter import ClientCounts
from moonpool.runtime.server.page.history import History, Pieces
from moonpool.runtime.version import VERSION

Index = Callable[[], Sequence[Mapping[str, str]]]
# Nobody needs figures that are newer than this.
_FRESH_S = 0.25


class Overview:
    """Models, instances, rates and errors. Any thread may call any method."""

    def __init__(
        self, models: ModelRegistry, index: Index, clients: Callable[[], ClientCounts], pieces: Pieces
    ) -> None:
        """`index` returns the repository index, which has entries for models that are not loaded, too.

        `clients` returns the counts of the requests of all clients until now, `pieces` those of the pieces of a model.
        """
        self._models = models
        self._index = index
        self._history = History(models, clients, pieces)
        self._clients = clients
        self._started_ns = time.time_ns()
        self._begin_s = time.monotonic()
        self._lock = threading.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None
        # The addresses of the server by protocol. The server fills them in when it has opened its ports.
        self.addresses: dict[str, str] = {}
        # If the port of the page serves OpenAI's API.
        self.has_openai = False

    def start(self) -> None:
        """Begin to take samples, until `close` or the end of the runtime. Otherwise the first look begins."""
        self._history.start()

    def snapshot(self, since: int | None = None) -> dict[str, Any]:
        """Return the whole state; with `since`, also `history`: the samples after that many.

        Counts and durations are totals since a version was loaded, `recent` covers the last seconds. Those of a model
        are of all requests that it executed, those under `clients` of what clients asked of the server, each request
        once. `History.since` describes the form of `history`.
        """
        self.start()
        shown = dict(self._fresh())
        if since is not None:
            shown["history"] = self._history.since(since)
        return shown

    def _fresh(self) -> dict[str, Any]:
        with self._lock:
            now_s = time.monotonic()
            if self._last is None or now_s - self._last[0] > _FRESH_S:
                self._last = now_s, self._take()
            return self._last[1]

    def _take(self) -> dict[str, Any]:
        return {
            "at_ms": time.time_ns() // 1_000_000,
            "server": {
                "name": "moonpool",
                "version": VERSION,
                "pid": os.getpid(),
                "started_ms": self._started_ns // 1_000_000,
                "uptime_s": round(time.monotonic() - self._begin_s, 1),
                "addresses": dict(self.addresses),
            },
            "clients": self._of_clients(),
            "models": self._versions(),
            "errors": [vars(error) for error in self._models.errors.latest()],
        }

    def _of_clients(self) -> dict[str, Any]:
        counts = self._clients()
        return {"success": counts.successes, "failure": counts.failures, "recent": self._history.recent_of_clients()}

    def _versions(self) -> list[dict[str, Any]]:
        """List the versions that are served, and the models of the repository that are not."""
        served = {(h.model.name, str(h.model.version)): h for h in self._models.served()}
        rows = [self._version(hosted) for hosted in served.values()]
        for entry in self._index():
            key = entry["name"], entry.get("version", "")
            if key not in served:
                rows.append(
                    {
                        "name": key[0],
                        "version": key[1],
                        "state": entry.get("state", "UNAVAILABLE"),
                        "reason": entry.get("reason", ""),
                        "instances": [],
                    }
                )
        return sorted(rows, key=lambda row: (row["name"], len(row["version"]), row["version"]))

    def _version(self, hosted: HostedModel) -> dict[str, Any]:
        model, scheduler = hosted.model, hosted.scheduler
        statistics = scheduler.statistics
        return {
            "name": model.name,
            "version": str(model.version),
            "state": _state(hosted),
            "reason": hosted.why_not_serving() or hosted.sleeps_because,
            "scaling": "" if hosted.residence is None else hosted.residence.scaling,
            "backend": model.config.backend,
            "max_batch_size": model.config.max_batch_size,
            "is_decoupled": model.config.decoupled,
            "endpoints": self._endpoints(hosted),
            "sandbox": model.options.sandbox,
            "instances": [_instance(record) for record in hosted.supervisor.records],
            "steps": [] if model.config.ensemble is None else _steps(model.config.ensemble),
            "queued": scheduler.queued,
            "executing": scheduler.executing,
            "success": statistics.success_count,
            "failure": statistics.fail_count,
            "executions": statistics.execution_count,
            "inferences": statistics.inference_count,
            "last_inference_ms": statistics.last_inference_ms,
            "recent": self._history.recent(str(hosted)),
            "advice": self._history.advice(str(hosted)),
        }

    def _endpoints(self, hosted: HostedModel) -> list[str]:
        """List the methods of OpenAI's API that clients may ask for."""
        if not self.has_openai:
            return []
        found = endpoints_of(hosted.model)
        return sorted([*found.texts, *(["embed"] if found.embedding is not None else [])])

    def close(self) -> None:
        """End the sampling. The samples until now can still be read."""
        self._history.close()


def _state(hosted: HostedModel) -> str:
    """Return the state of a version. One that is ready to be asked and has no instances shows that it is asleep, or why
    it is not.
    """
    residence = hosted.residence
    if residence is None or not residence.is_asleep or hosted.machine.state is not ModelState.READY:
        return str(hosted.machine.state)
    return str(residence.state)


def _steps(ensemble: EnsembleScheduling) -> list[dict[str, Any]]:
    lines = drawn(ensemble)
    return [
        {**step._asdict(), "version": "" if step.version is None else str(step.version), "line": line}
        for step, line in zip(shown_steps(ensemble), lines, strict=True)
    ]


def _instance(record: InstanceRecord) -> dict[str, Any]:
    instance, machine = record.instance, record.machine
    process = getattr(instance.state, "process", None)
    pid = process.pid if process is not None and process.is_running else None
    usage = usage_of(pid) if pid is not None else None
    denials, name = instance.model.denials, instance.name
    return {
        "name": name,
        "state": str(machine.state),
        "because": machine.because,
        "kind": instance.kind,
        "device_id": instance.device_id,
        "restarts": record.restarts,
        "pid": pid,
        "sandbox": instance.confinement.as_dict() if instance.confinement is not None else None,
        "denials": {
            "counts": {kind: count for kind, count in denials.counts(name).items() if count},
            "latest": [vars(each) for each in denials.latest(name)],
        },
        "rss_bytes": usage.rss_bytes if usage is not None else None,
        "cpu_s": usage.cpu_s if usage is not None else None,
    }
