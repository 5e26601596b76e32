"""Callers in this process: threads or tasks that call a model again and again, and the times of their calls.

Theory of operation. `measure` starts one thread for each caller. All of them and the caller of `measure` meet at a
barrier, so that nobody calls before all threads exist. Each thread keeps its own times and adds them at its end, so
that callers share nothing while they measure. The event `stop` ends them: when the time is over, when one of them
fails, or when the user interrupts. If a thread cannot be started, the barrier is aborted, because the others would wait
at it for ever.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from moonpool import Model, MoonpoolError, OutOfThreads, Runtime
from moonpool.benchmarks.data import DataMix
from moonpool.benchmarks.generator.engine import COLUMNS, DUE, END, OUTCOME, SENT, SUCCEEDED
from moonpool.benchmarks.loads import Concurrency, Load
from moonpool.benchmarks.resources import ResourceMeter
from moonpool.benchmarks.result import digests_of_configuration
from moonpool.benchmarks.timeline import ServerTrace, TraceRecorder
from moonpool.benchmarks.windows import PARTS, Log, ModelLoad, Window, between, success_count
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.observe.another_instance import InstanceLoad as ModelsLoad
from moonpool.runtime.observe.another_instance import advice, decide, largest_batch
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.process.usage import Reading, reading, spare_cores, usage_of
from moonpool.runtime.schedule.callers import response_of, wait_for_response


class _Calls:
    """The times of calls: of those that were answered their beginnings and ends in turns, of others the error, too."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.failed: list[tuple[int, int, str]] = []

    def window(self, seconds: float) -> Window:
        """Make the window of all calls."""
        errors = Counter(text for _, _, text in self.failed)
        numbers = {text: number for number, text in enumerate(errors)}
        times = np.array(self.answered, np.int64).reshape(-1, 2)
        rows = np.zeros((len(times) + len(self.failed), len(COLUMNS)), np.int64)
        rows[: len(times), DUE], rows[: len(times), END] = times[:, 0], times[:, 1]
        rows[: len(times), OUTCOME] = SUCCEEDED
        for row, (begin_ns, end_ns, text) in zip(rows[len(times) :], self.failed, strict=True):
            row[DUE], row[END], row[OUTCOME] = begin_ns, end_ns, numbers[text]
        rows[:, SENT] = rows[:, DUE]
        return Window(seconds, times[:, 1] - times[:, 0], errors, log=Log(rows, list(errors)))


def measure(call: Callable[[], object], concurrency: int, seconds: float) -> Window:
    """Call from `concurrency` threads for `seconds`. Count the errors of moonpool, and raise any other error."""
    calls = _Calls()
    barrier = threading.Barrier(concurrency + 1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        mine = _Calls()
        try:
            barrier.wait()
            while not stop.is_set():
                begin_ns = time.perf_counter_ns()
                try:
                    call()
                except MoonpoolError as error:
                    mine.failed.append((begin_ns, time.perf_counter_ns(), str(error)))
                else:
                    mine.answered.extend((begin_ns, time.perf_counter_ns()))
        except BaseException as error:
            failures.append(error)
            stop.set()
        calls.answered.extend(mine.answered)
        calls.failed.extend(mine.failed)

    threads = [threading.Thread(target=work, name=f"moonpool-bench-caller-{number}") for number in range(concurrency)]
    started: list[threading.Thread] = []
    begin_s = time.perf_counter()
    try:
        for thread in threads:
            start_thread(thread)
            started.append(thread)
        barrier.wait()
        begin_s = time.perf_counter()
        stop.wait(seconds)
    except BaseException as error:
        barrier.abort()
        if not isinstance(error, OutOfThreads):
            raise
        raise MoonpoolError(
            f"this machine has no room for {concurrency} threads of callers: {error.__cause__}"
        ) from error
    finally:
        stop.set()
        for thread in started:
            thread.join()
    taken_s = time.perf_counter() - begin_s
    if failures:
        raise failures[0]
    return calls.window(taken_s)


async def measure_async(call: Callable[[], Awaitable[object]], concurrency: int, seconds: float) -> Window:
    """Measure like `measure`, with tasks of one event loop instead of threads."""
    # Commands without an event loop import this file, too.
    import asyncio

    calls = _Calls()
    begin_s = time.perf_counter()

    async def work() -> None:
        while time.perf_counter() - begin_s < seconds:
            begin_ns = time.perf_counter_ns()
            try:
                await call()
            except MoonpoolError as error:
                calls.failed.append((begin_ns, time.perf_counter_ns(), str(error)))
            else:
                calls.answered.extend((begin_ns, time.perf_counter_ns()))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return calls.window(time.perf_counter() - begin_s)


class InProcess:
    """A model in this process's runtime, called from threads or from tasks of an event loop."""

    def __init__(
        self,
        runtime: Runtime,
        model: str,
        mix: DataMix,
        *,
        is_async: bool,
        timeout_s: float,
        sandbox: str | None = None,
    ) -> None:
        """`sandbox` is a level to name it by, if several are measured."""
        self.where = f"in process, {'asyncio' if is_async else 'threads'}"
        if sandbox is not None:
            self.where += f", sandbox {sandbox}"
        self._runtime = runtime
        self._model = model
        self._requests = [data.arrays() for data in mix.requests]
        # Callers take the next one each; one step of the cycle is atomic.
        self._inputs = itertools.cycle([self._requests[number] for number in mix.order])
        self._mix = mix
        # Notes the times of each request in the runtime, if they are wanted.
        self._recorder: TraceRecorder | None = None
        self._meter: ResourceMeter | None = None
        self._is_async = is_async
        self._timeout_s = timeout_s

    def measure_resources(self, metrics_url: str | None) -> None:
        """Measure what this process, with its callers, and its instances use in each window. Raises `NoMetrics`."""
        self._meter = ResourceMeter(lambda: [os.getpid()], metrics_url)

    @property
    def model(self) -> Model:
        """The model as it is loaded, with its whole configuration."""
        return self._runtime._models.find(self._model).model

    def instance_pids(self) -> list[int]:
        """Return the processes of the instances that are ready. From any thread."""
        return [
            each["pid"]
            for each in self._runtime.instances(self._model)
            if each["pid"] is not None and each["state"] == "READY"
        ]

    def answered(self) -> int:
        """Return how many requests the model has answered so far. From any thread."""
        return success_count(self._runtime.statistics(self._model))

    def check(self) -> None:
        """Send the first request and those with an expected answer once. Raises `WrongAnswer` and what `infer`
        raises.
        """
        for number, data in enumerate(self._mix.requests):
            if data.expected or number == 0:
                outputs = self._runtime.infer(self._model, data.arrays(), timeout_s=self._timeout_s)
                data.check(outputs, f"request {number}")

    def window(self, load: Load, seconds: float) -> Window:
        if not isinstance(load, Concurrency):
            raise ValueError("callers in this process cannot send requests at a rate")
        if self._meter is not None:
            self._meter.begin()
        before = self._runtime.statistics(self._model)
        used, machine = self._used_s(), _machine()
        if self._is_async:
            import asyncio

            found = asyncio.run(measure_async(self._acall, load.callers, seconds))
        else:
            found = measure(self.call, load.callers, seconds)
        found.split = between(before, self._runtime.statistics(self._model))
        found.model = self._model_load(used, machine)
        found.resources = None if self._meter is None else self._meter.end()
        return found

    def _used_s(self) -> dict[int, float]:
        """Return the processor time of each instance so far, by its process number."""
        pids = [each["pid"] for each in self._runtime.instances(self._model)]
        found = {pid: usage_of(pid) for pid in pids if pid is not None}
        return {pid: usage.cpu_s for pid, usage in found.items() if usage is not None}

    def _model_load(self, before: Mapping[int, float], machine: Reading | None) -> ModelLoad | None:
        after, now = self._used_s(), _machine()
        if machine is None or now is None or not after or after.keys() != before.keys():
            return None
        cpus = self._runtime._models.find(self._model).model.options.cpus
        used_s = sum(after[pid] - before[pid] for pid in after)
        spare_s = spare_cores(machine, now, cpus) * (now.at_s - machine.at_s)
        return ModelLoad(len(after), used_s, spare_s)

    def advice(self, whole: Window) -> dict[str, object] | None:
        config = self._runtime.config(self._model)
        model, split = whole.model, whole.split
        if model is None or split is None or config.sequence_batching is not None:
            return None
        batch = largest_batch(config.max_batch_size, has_batching=config.dynamic_batching is not None)
        instances = self._runtime._models.find(self._model).supervisor.records
        compute_us = sum(split.mean_us(part) for part in PARTS if part != "queue")
        load = ModelsLoad(
            model.instances,
            cores=model.used_s / whole.seconds / model.instances,
            # Requests of a batch share its time, so batches are counted.
            executing=compute_us * split.executions / 1e6 / whole.seconds / model.instances,
            waiting=split.sums_ns["queue"] / 1e9 / whole.seconds / batch,
            spare_cores=model.spare_s / whole.seconds,
            is_on_gpu=any(record.instance.kind == "GPU" for record in instances),
        )
        reason = decide(load)
        return None if reason is None else advice(reason, load, config.instance_groups, batch)

    def configuration_fields(self) -> dict[str, str]:
        return digests_of_configuration(self._runtime.config(self._model).raw)

    def begin_traces(self) -> None:
        """Trace each request from now on."""
        self._recorder = TraceRecorder()

    def traces(self) -> list[ServerTrace]:
        """Return the traces of the requests since `begin_traces`."""
        return [] if self._recorder is None else list(self._recorder.traces)

    def _traced(self) -> tuple[HostedModel, InferenceRequest]:
        """Return the next request with its trace, and its model."""
        hosted = self._runtime._models.find(self._model)
        request = hosted.signature.request(next(self._inputs))
        if self._recorder is not None:
            request.trace = self._recorder.make(hosted.model)
        return hosted, request

    def call(self) -> object:
        """Send one request and wait for its answer."""
        if self._recorder is not None:
            hosted, request = self._traced()
            return wait_for_response(hosted.scheduler, request, self._timeout_s)
        return self._runtime.infer(self._model, next(self._inputs), timeout_s=self._timeout_s)

    def ask(self, kind: int) -> object:
        """Send the request of that number and wait for its answer. From any thread."""
        return self._runtime.infer(self._model, self._requests[kind], timeout_s=self._timeout_s)

    async def _acall(self) -> object:
        if self._recorder is not None:
            from moonpool.runtime.schedule.event_loop import wait_for_outcome

            hosted, request = self._traced()
            return response_of(await wait_for_outcome(hosted.scheduler, request, self._timeout_s))
        return await self._runtime.ainfer(self._model, next(self._inputs), timeout_s=self._timeout_s)


def _machine() -> Reading | None:
    """Read how long the processors were idle until now; None if the kernel does not say."""
    try:
        return reading()
    except (OSError, ValueError, LookupError):
        return None
