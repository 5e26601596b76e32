"""Decides how many replicas a deployment has, by the time that requests wait in their queues.

Replicas report a pressure: the time that requests have waited lately, over the time that they may wait. The number of
requests would say little, since a batch of 64 requests takes a model about as long as one. The policy is pure: Ray
gives it what the replicas reported, waits until its decision has lasted (`upscale_delay_s`, `downscale_delay_s`), and
keeps the bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.residency.autoscaling import QueueWatch

PRESSURE, BUSY = "moonpool_pressure", "moonpool_busy"
# The most by which one decision multiplies the replicas.
_GROWTH = 2.0
# Below this part of the target, and if the others stay this busy at most, a replica goes.
_LOW, _MOST_BUSY = 0.5, 0.7


def queue_policy(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas to have. For `AutoscalingPolicy(policy_function="moonpool.ray:queue_policy")`.

    `ctx` is Ray's `AutoscalingContext`.
    """
    metrics: Mapping[str, Mapping[Any, float]] = ctx.aggregated_metrics or {}
    return decide(
        ctx.target_num_replicas,
        list(metrics.get(PRESSURE, {}).values()),
        list(metrics.get(BUSY, {}).values()),
        float(ctx.total_queued_requests or 0),
        float(ctx.total_num_requests or 0),
    ), {}


def decide(replicas: int, pressures: Iterable[float], busy: Iterable[float], queued: float, requests: float) -> int:
    """Return the number of replicas after `replicas`.

    `pressures` and `busy` have one number for each replica that has reported: the time that requests wait, over the
    target, and the part of its instances that execute. `queued` requests wait for a replica that takes them; `requests`
    are all that have not ended.
    """
    if not replicas:
        return 1 if requests > 0 else 0
    pressure, share = _mean(pressures), _mean(busy)
    # Requests that no replica takes wait for longer than any queue of a replica can show.
    growth = max(pressure, 1.0 + queued / max(1.0, requests - queued) if queued else 0.0)
    if growth > 1.0:
        return math.ceil(replicas * min(growth, _GROWTH))
    if replicas == 1:
        return 1 if requests > 0 or share > 0 else 0
    if pressure < _LOW and share * replicas / (replicas - 1) <= _MOST_BUSY:
        return replicas - 1
    return replicas


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


class LoadSampler:
    """Makes the report of one replica. For one thread."""

    def __init__(self, target_ms: float) -> None:
        self._target_ms = target_ms
        # By name and version of the model.
        self._watches: dict[str, QueueWatch] = {}

    def sample(self, models: Iterable[HostedModel]) -> dict[str, float]:
        """Return the pressure of the model that is worst off, and the part of all instances that execute."""
        now_s = time.monotonic()
        wait_ms = busy = instances = 0.0
        watches: dict[str, QueueWatch] = {}
        for hosted in models:
            key = str(hosted)
            watch = watches[key] = self._watches.get(key) or QueueWatch()
            wait_ms = max(wait_ms, watch.wait_ms(hosted.queue_counts(now_s)))
            busy += hosted.scheduler.executing
            instances += len(hosted.supervisor.records)
        self._watches = watches
        return {PRESSURE: wait_ms / self._target_ms, BUSY: busy / max(1.0, instances)}
