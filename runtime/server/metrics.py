"""All metrics of a server: models, instances, protocols, the process and the machine.

Theory of operation. The protocols count connections and answers on the thread of their event loop alone, so a `Meter`
needs no lock for them: only that thread writes, and readers copy. Requests in a stream of gRPC end on any thread, so
`ClientRequests` has a lock. With front ends, the clients are theirs: they
report what they have counted, and the lock of `FrontendMetrics` guards the sums, as the reactor adds to them while a scrape
reads them. Connections of a front end that has died end with it, so open connections are kept for each front end and
forgotten with it. Totals stay.

A request for inference that a front end passes on is counted by this process, which reads it: a front end does not see
the single requests of a stream. So the meters of this process are added to the sums of the front ends for
`ClientRequests`, and for nothing else.
"""

from __future__ import annotations

import json
import math
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric, ProcessCollector

from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.observe.distributions import BucketCounts, bucket_samples
from moonpool.runtime.observe.exposition import ExposedFamily, Sample, expose
from moonpool.runtime.observe.machine import GpuMetrics, MachineMetrics
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS
from moonpool.runtime.server.openai.meter import OpenAIMeter
from moonpool.runtime.version import VERSION

# What a model with a KV cache counts, as the backend of TensorRT-LLM does, and the label with the kind of count.
_KV_BLOCKS, _KV_BLOCK_TYPE = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"


class ClientRequests:
    """Counts the requests for inference that clients have asked, each of them once, whatever its model asked further.

    Thread-safe.

    Durations are nanoseconds, from the time when a request was received until its response was sent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        # Of those that succeeded.
        self._durations = BucketCounts(DURATION_BOUNDS_NS)

    def ended(self, received_ns: int, *, has_failed: bool) -> None:
        """Count a request that was received at that time of `time.monotonic_ns`.

        One that its client gave up has failed.
        """
        taken_ns = time.monotonic_ns() - received_ns
        with self._lock:
            if has_failed:
                self._failures += 1
            else:
                self._durations.add(taken_ns)

    def counts(self) -> ClientCounts:
        """Return the counts until now."""
        with self._lock:
            by_duration = list(self._durations.counts)
            return ClientCounts(self._failures, self._durations.total, by_duration)


class ClientCounts(NamedTuple):
    """Counts of `ClientRequests`, until some time or between two times."""

    failures: int
    success_ns: int
    by_duration: list[int]
    """The requests that succeeded, in the buckets of `DURATION_BOUNDS_NS`."""

    @property
    def successes(self) -> int:
        """The number of requests that succeeded."""
        return sum(self.by_duration)

    def plus(self, other: ClientCounts) -> ClientCounts:
        """Return the sum of two counts."""
        return self._with(operator.add, other)

    def minus(self, other: ClientCounts) -> ClientCounts:
        """Return what was counted since the other."""
        return self._with(operator.sub, other)

    def _with(self, of: Callable[[int, int], int], other: ClientCounts) -> ClientCounts:
        return ClientCounts(
            of(self.failures, other.failures),
            of(self.success_ns, other.success_ns),
            [of(*pair) for pair in zip(self.by_duration, other.by_duration, strict=True)],
        )


NO_REQUESTS = ClientCounts(0, 0, [0] * (len(DURATION_BOUNDS_NS) + 1))


class Meter:
    """The counts of one protocol. One thread counts, except in `clients`, and any thread may read."""

    def __init__(self) -> None:
        self.clients = ClientRequests()
        self._answers: defaultdict[str | int, int] = defaultdict(int)
        self._opened = self._closed = 0
        self.has_connections = False
        """If connections are counted. gRPC's own library does not tell them, and no figure is better than a wrong 0."""

    def connected(self) -> None:
        """Count a connection that was opened."""
        self._opened += 1

    def disconnected(self) -> None:
        """Count the end of a connection."""
        self._closed += 1

    def answered(self, status: str | int) -> None:
        """Count a request that has ended, by HTTP status or by the name of a gRPC code."""
        self._answers[status] += 1

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return all connections until now, those that are open, and the answers by status."""
        answers = {str(status): count for status, count in self._answers.copy().items()}
        return self._opened, self._opened - self._closed, answers


class Traffic(NamedTuple):
    """The counts of a protocol since the last report."""

    protocol: str
    opened: int
    closed: int
    answers: list[tuple[str, int]]
    # The requests for inference, as in `ClientCounts`.
    failures: int
    success_ns: int
    by_duration: list[int]


class FrontendMetrics:
    """The meters of all protocols. They exist from the start, so that the rate before the first request is 0."""

    def __init__(self) -> None:
        self.http = Meter()
        self.grpc = Meter()
        self.http.has_connections = True
        self._told: dict[str, tuple[int, int, dict[str, int]]] = {}
        self._told_requests = dict.fromkeys(("http", "grpc"), NO_REQUESTS)
        # With front ends: their totals by protocol, and the open connections of each one that lives.
        self._lock = threading.Lock()
        self._elsewhere: dict[str, tuple[int, dict[str, int]]] | None = None
        self._open: dict[object, dict[str, int]] = {}
        self._requests_elsewhere = dict.fromkeys(("http", "grpc"), NO_REQUESTS)

    # In a front end

    def take(self) -> list[Traffic]:
        """Return the counts since the last call. For one thread."""
        came = []
        for protocol, meter in (("http", self.http), ("grpc", self.grpc)):
            before = self._told.get(protocol, (0, 0, {}))
            now = self._told[protocol] = meter.counts()
            opened, closed = now[0] - before[0], now[0] - now[1] - (before[0] - before[1])
            answers = [(s, n - before[2].get(s, 0)) for s, n in now[2].items()]
            answers = [(status, count) for status, count in answers if count]
            requests = meter.clients.counts()
            ended = requests.minus(self._told_requests[protocol])
            self._told_requests[protocol] = requests
            if opened or closed or answers or ended != NO_REQUESTS:
                came.append(Traffic(protocol, opened, closed, answers, *ended))
        return came

    # In a main process with front ends

    def count_elsewhere(self) -> None:
        """Expose the counts of front ends from now on, as all requests here come from them."""
        with self._lock:
            self._elsewhere = {"http": (0, {}), "grpc": (0, {})}

    def add(self, source: object, traffic: Traffic) -> None:
        """Add the counts that a front end has reported."""
        with self._lock:
            if self._elsewhere is None or traffic.protocol not in self._elsewhere:
                return
            opened, answers = self._elsewhere[traffic.protocol]
            for status, count in traffic.answers:
                answers[status] = answers.get(status, 0) + count
            self._elsewhere[traffic.protocol] = opened + traffic.opened, answers
            ended = ClientCounts(traffic.failures, traffic.success_ns, traffic.by_duration)
            before = self._requests_elsewhere[traffic.protocol]
            self._requests_elsewhere[traffic.protocol] = before.plus(ended)
            its_open = self._open.setdefault(source, {})
            was_open = its_open.get(traffic.protocol, 0)
            its_open[traffic.protocol] = max(0, was_open + traffic.opened - traffic.closed)

    def forget(self, source: object) -> None:
        """Drop the open connections of a front end that has ended."""
        with self._lock:
            self._open.pop(source, None)

    def _counts(self) -> Iterator[tuple[str, int, int, dict[str, int]]]:
        with self._lock:
            if self._elsewhere is not None:
                for protocol, (opened, answers) in self._elsewhere.items():
                    is_open = sum(each.get(protocol, 0) for each in self._open.values())
                    yield protocol, opened, is_open, dict(answers)
                return
        for protocol, meter in (("http", self.http), ("grpc", self.grpc)):
            yield protocol, *meter.counts()

    def requests(self, *protocols: str) -> ClientCounts:
        """Return the requests for inference of all clients over these protocols, or over all of them."""
        with self._lock:
            elsewhere = dict(self._requests_elsewhere)
        total = NO_REQUESTS
        for protocol in protocols or elsewhere:
            meter: Meter = getattr(self, protocol)
            total = total.plus(elsewhere[protocol]).plus(meter.clients.counts())
        return total

    def families(self) -> list[ExposedFamily]:
        """Return the present figures."""
        return [*self._connections(), *self._requests()]

    def _requests(self) -> Iterator[ExposedFamily]:
        ended, durations = [], []
        for protocol in ("http", "grpc"):
            labels = (("protocol", protocol),)
            counts = self.requests(protocol)
            for outcome, count in (("failure", counts.failures), ("success", counts.successes)):
                ended.append(Sample("", (("outcome", outcome), *labels), count))
            durations += bucket_samples(
                DURATION_BOUNDS_NS, counts.by_duration, counts.success_ns, labels, 10**9
            )
        yield ExposedFamily(
            "moonpool_frontend_inference_requests_total",
            "Finished requests for inference of clients; what models and ensembles ask each other is not counted",
            "counter",
            ended,
        )
        yield ExposedFamily(
            "moonpool_frontend_inference_duration_seconds",
            "Time from a client's request for inference to the response, if it succeeded",
            "histogram",
            durations,
        )

    def _connections(self) -> list[ExposedFamily]:
        ever, present, answers = [], [], []
        for protocol, opened, is_open, by_status in self._counts():
            labels = (("protocol", protocol),)
            # The front ends have the same libraries as this process.
            if getattr(self, protocol).has_connections:
                ever.append(Sample("", labels, opened))
                present.append(Sample("", labels, is_open))
            for status, count in sorted(by_status.items()):
                answers.append(Sample("", (*labels, ("status", status)), count))
        return [
            ExposedFamily(
                "moonpool_frontend_connections_total",
                "Connections opened by clients",
                "counter",
                ever,
            ),
            ExposedFamily(
                "moonpool_frontend_open_connections", "Open connections", "gauge", present
            ),
            ExposedFamily(
                "moonpool_frontend_requests_total",
                "Finished requests of any kind, by HTTP status or gRPC code",
                "counter",
                answers,
            ),
        ]


class ServerMetrics:
    """All metrics as one text. Any thread may call any method. `close` releases the GPUs."""

    def __init__(self, models: ModelRegistry) -> None:
        """The registry's `metrics_options` say which metrics of the machine are exposed."""
        options = models.metrics_options
        self._models = models
        # The protocols count here.
        self.frontends = FrontendMetrics()
        self.openai = OpenAIMeter()
        self._machine = MachineMetrics(options.interval_s) if options.allow_cpu else None
        self._gpus = GpuMetrics() if options.allow_gpu else None
        self._process = ProcessCollector(registry=None)

    def text(self) -> str:
        """Return the text for Prometheus. Takes some milliseconds, and waits until the runtime has read its stubs' counts.

        Raises `RuntimeClosed`.
        """
        build = ExposedFamily(
            "moonpool_build_info",
            "1; the label is the version of the server",
            "gauge",
            [Sample("", (("version", VERSION),), 1)],
        )
        return expose(
            [
                *self._models.metric_families(),
                *(self._machine.families() if self._machine is not None else ()),
                *(self._gpus.families() if self._gpus is not None else ()),
                *self.frontends.families(),
                *self.openai.families(self._models.names()),
                build,
                *_converted(self._process.collect()),
            ]
        )

    def endpoint_load(self, form: str) -> str | None:
        """Return the load of the models' KV caches in ORCA's form `json` or `text`, as Triton's servers give it to load balancers.

        None for any other form, and unless the models have made the three metrics that it is computed of.
        """
        blocks: dict[str, float] = {}
        for family in self._models.stubs.metrics.families():
            if family.name == _KV_BLOCKS:
                for sample in family.samples:
                    blocks[dict(sample.labels).get(_KV_BLOCK_TYPE, "")] = sample.value
        used, most, tokens = (blocks.get(name, -1.0) for name in ("used", "max", "tokens_per"))
        if not all(0 <= each < math.inf for each in (used, most, tokens)):
            return None
        utilization, capacity = used / most if most else 0.0, int(most * tokens)
        if form == "json":
            named = {"kv_cache_utilization": utilization, "max_token_capacity": capacity}
            return f"JSON {json.dumps({'named_metrics': named}, separators=(',', ':'))}"
        if form == "text":
            return (
                f"TEXT named_metrics.kv_cache_utilization={utilization:.6f}, "
                f"named_metrics.max_token_capacity={capacity}"
            )
        return None

    def close(self) -> None:
        """Release the GPUs. No method may be called after this."""
        if self._gpus is not None:
            self._gpus.close()


def _converted(metrics: Iterable[Metric]) -> list[ExposedFamily]:
    """Return families of the library in our form. There, each sample has the whole name."""
    families = []
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        samples = [
            Sample("", tuple(sample.labels.items()), sample.value)
            for sample in metric.samples
            if sample.name == name
        ]
        families.append(ExposedFamily(name, metric.documentation, metric.type, samples))
    return families
