"""All metrics of a server as one text: models, instances, frontends, the process, the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from moonpool.runtime.exposition import Family, Sample, expose
from moonpool.runtime.frontend.frontend_metrics import FrontendMetrics
from moonpool.runtime.gpu_metrics import GpuMetrics
from moonpool.runtime.machine_metrics import MachineMetrics
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from moonpool.runtime.model_registry import ModelRegistry

# That of the text form that Prometheus reads.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Any thread may call any method. `close` lets go of the GPUs."""

    def __init__(self, models: ModelRegistry) -> None:
        """What is told of the machine is said in the registry's `metrics_options`."""
        options = models.metrics_options
        self._models = models
        # The frontends count in it.
        self.frontends = FrontendMetrics()
        self._machine = MachineMetrics(options.interval_s) if options.allow_cpu else None
        self._gpus = GpuMetrics() if options.allow_gpu else None
        self._process = ProcessCollector(registry=None)

    def text(self) -> str:
        """For Prometheus. Takes some milliseconds, and waits for the runtime to hear its stubs.

        Raises `RuntimeClosed`.
        """
        build = Family(
            "moonpool_build_info",
            "1, with the version of the server",
            "gauge",
            [Sample("", (("version", VERSION),), 1)],
        )
        return expose(
            [
                *self._models.metric_families(),
                *(self._machine.families() if self._machine is not None else ()),
                *(self._gpus.families() if self._gpus is not None else ()),
                *self.frontends.families(),
                build,
                *_converted(self._process.collect()),
            ]
        )

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._gpus is not None:
            self._gpus.close()


def _converted(metrics: Iterable[Metric]) -> list[Family]:
    """Families of the library, each of whose samples has the whole name."""
    families = []
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        samples = [
            Sample("", tuple(sample.labels.items()), sample.value)
            for sample in metric.samples
            if sample.name == name
        ]
        families.append(Family(name, metric.documentation, metric.type, samples))
    return families
