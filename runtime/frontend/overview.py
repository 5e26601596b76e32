"""What goes on in a server at this moment, as one dict for whoever shows it to a person."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from moonpool.runtime.frontend.history import History
from moonpool.runtime.usage import usage_of
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.model_registry import ModelRegistry
    from moonpool.runtime.seat import Seat

    Index = Callable[[], Sequence[Mapping[str, str]]]

# Many may look at the same time; none of them needs it newer than this.
_FRESH_S = 0.25


class Overview:
    """Models, instances, rates and errors. Any thread may call any method."""

    def __init__(self, models: ModelRegistry, index: Index) -> None:
        """`index` gives the entries of the repository index, also of what is not loaded."""
        self._models = models
        self._index = index
        self._history = History(models)
        self._started_ns = time.time_ns()
        self._begin_s = time.monotonic()
        self._lock = threading.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None
        # Where the server listens, by protocol; for whoever opens the ports to fill in.
        self.addresses: dict[str, str] = {}

    def start(self) -> None:
        """Take samples from now on, until `close` or the end of the runtime; else the first look begins it."""
        self._history.start()

    def snapshot(self, since: int | None = None) -> dict[str, Any]:
        """All that there is to show; with `since`, the samples after the first so many as `history`.

        Counts and durations are totals since a version was loaded, `recent` is of the last seconds. What
        `history` looks like is said at `History.since`.
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
            "models": self._versions(),
            "errors": [vars(error) for error in self._models.errors.latest()],
        }

    def _versions(self) -> list[dict[str, Any]]:
        """What is served, and what the repository has beside it."""
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
            "state": str(hosted.machine.state),
            "reason": hosted.why_not_serving() or "",
            "backend": model.config.backend,
            "max_batch_size": model.config.max_batch_size,
            "is_decoupled": model.config.decoupled,
            "sandbox": model.options.sandbox,
            "instances": [_instance(seat) for seat in hosted.supervisor.seats],
            "queued": scheduler.queued,
            "executing": scheduler.executing,
            "success": statistics.success_count,
            "failure": statistics.fail_count,
            "executions": statistics.execution_count,
            "inferences": statistics.inference_count,
            "last_inference_ms": statistics.last_inference_ms,
            "recent": self._history.recent(str(hosted)),
        }

    def close(self) -> None:
        """End the sampling; what was seen can be asked for still."""
        self._history.close()


def _instance(seat: Seat) -> dict[str, Any]:
    instance, machine = seat.instance, seat.machine
    process = getattr(instance.state, "process", None)
    pid = process.pid if process is not None and process.is_running else None
    usage = usage_of(pid) if pid is not None else None
    return {
        "name": instance.name,
        "state": str(machine.state),
        "because": machine.because,
        "kind": instance.kind,
        "device_id": instance.device_id,
        "restarts": seat.restarts,
        "pid": pid,
        "sandbox": instance.confinement.as_dict() if instance.confinement is not None else None,
        "rss_bytes": usage.rss_bytes if usage is not None else None,
        "cpu_s": usage.cpu_s if usage is not None else None,
    }
