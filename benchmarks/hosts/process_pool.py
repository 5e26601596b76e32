"""concurrent.futures.ProcessPoolExecutor: the standard library's way to host a model in other processes, called from
threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from moonpool import MoonpoolError
from moonpool.benchmarks.callers import measure
from moonpool.benchmarks.data import DataMix
from moonpool.benchmarks.hosts.hosted import Arrays, ModelInHost
from moonpool.benchmarks.loads import Concurrency, Load
from moonpool.benchmarks.resources import ResourceMeter
from moonpool.benchmarks.windows import Window
from moonpool.runtime.process.usage import with_descendants


class PoolFailed(MoonpoolError):
    """A process of the pool could not load the model, or has ended."""

    code = "UNAVAILABLE"


class _Worker:
    """The model of a process of the pool."""

    model: ModelInHost | None = None


def begin(start_file: str) -> None:
    """Load the model in a process of the pool."""
    _Worker.model = ModelInHost(start_file)


def infer(arrays: Arrays) -> Mapping[str, Any]:
    """Execute one request in a process of the pool."""
    if _Worker.model is None:
        raise PoolFailed("the pool's process has no model")
    return _Worker.model.infer(arrays)


class ProcessPool:
    """A model in a pool of processes, as a subject of measurements. `close` ends them."""

    where = "processpool, in process"

    def __init__(self, start_file: str, mix: DataMix, instances: int, timeout_s: float) -> None:
        """Start the processes, and send the first request. Raises `PoolFailed`."""
        # Few commands need it, and it takes long to import.
        import multiprocessing
        import os
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        self._broken: type[Exception] = BrokenProcessPool
        self._timeout_s = timeout_s
        self._arrays = mix.requests[0].arrays()
        self._meter: ResourceMeter | None = None
        self._own_pid = os.getpid()
        # Never fork: this process has threads.
        spawned = multiprocessing.get_context("spawn")
        self._pool: Executor = ProcessPoolExecutor(instances, spawned, begin, (start_file,))
        try:
            self.call()
        except BaseException:
            self.close()
            raise

    def call(self) -> object:
        """Send one request and wait for its answer."""
        try:
            return self._pool.submit(infer, self._arrays).result(self._timeout_s)
        except (self._broken, TimeoutError) as error:
            raise PoolFailed(f"the pool does not answer: {error!r}") from error

    def window(self, load: Load, seconds: float) -> Window:
        if not isinstance(load, Concurrency):
            raise ValueError("callers in this process cannot send requests at a rate")
        if self._meter is not None:
            self._meter.begin()
        found = measure(self.call, load.callers, seconds)
        found.resources = None if self._meter is None else self._meter.end()
        return found

    def advice(self, whole: Window) -> None:
        """Return None, since a pool has no advice."""

    def measure_resources(self, metrics_url: str | None) -> None:
        """Measure what this process, with its callers, and the pool use in each window. Raises `NoMetrics`."""
        self._meter = ResourceMeter(lambda: [self._own_pid], metrics_url)

    def instance_pids(self) -> list[int]:
        """Return the processes that this one has started."""
        return with_descendants([self._own_pid])[1:]

    def answered(self) -> None:
        """Return None, since a pool does not count."""

    def configuration_fields(self) -> None:
        """Return None, since a pool has no configuration."""

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)
