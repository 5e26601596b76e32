"""All metrics of a server: models, instances, protocols, the process and the machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator

from prometheus_client import Metric, ProcessCollector

from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.observe.distributions import bucket_samples
from moonpool.runtime.observe.exposition import ExposedFamily, Sample, expose
from moonpool.runtime.observe.machine import GpuMetrics, MachineMetrics
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS
from moonpool.runtime.server.meter import ClientCounts, Meter
from moonpool.runtime.server.openai.meter import OpenAIMeter
from moonpool.runtime.version import VERSION

# What a model with a KV cache counts, as the backend of TensorRT-LLM does, and the label with the kind of count.
_KV_BLOCKS, _KV_BLOCK_TYPE = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"


class FrontendMetrics:
    """The meters of all protocols. They exist from the start, so that the rate before the first request is 0."""

    def __init__(self) -> None:
        self.http = Meter()
        self.grpc = Meter()

    def _meters(self) -> tuple[tuple[str, Meter], ...]:
        return ("http", self.http), ("grpc", self.grpc)

    def requests(self) -> ClientCounts:
        """Return the requests for inference of all clients."""
        return self.http.clients.counts().plus(self.grpc.clients.counts())

    def families(self) -> list[ExposedFamily]:
        """Return the present figures."""
        return [*self._connections(), *self._requests()]

    def _requests(self) -> Iterator[ExposedFamily]:
        ended, durations = [], []
        for protocol, meter in self._meters():
            labels = (("protocol", protocol),)
            counts = meter.clients.counts()
            for outcome, count in (("failure", counts.failures), ("success", counts.successes)):
                ended.append(Sample("", (("outcome", outcome), *labels), count))
            durations += bucket_samples(DURATION_BOUNDS_NS, counts.by_duration, counts.success_ns, labels, 10**9)
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
        for protocol, meter in self._meters():
            labels = (("protocol", protocol),)
            opened, is_open, by_status = meter.counts()
            ever.append(Sample("", labels, opened))
            present.append(Sample("", labels, is_open))
            for status, count in sorted(by_status.items()):
                answers.append(Sample("", (*labels, ("status", status)), count))
        return [
            ExposedFamily("moonpool_frontend_connections_total", "Connections opened by clients", "counter", ever),
            ExposedFamily("moonpool_frontend_open_connections", "Open connections", "gauge", present),
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
        """Return the text for Prometheus. Takes some milliseconds, and waits until the runtime has read its stubs'
        counts.

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
        """Return the load of the models' KV caches in ORCA's form `json` or `text`, as Triton's servers give it to load
        balancers.

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
            Sample("", tuple(sample.labels.items()), sample.value) for sample in metric.samples if sample.name == name
        ]
        families.append(ExposedFamily(name, metric.documentation, metric.type, samples))
    return families
