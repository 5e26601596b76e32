"""What the protocols of a front end need of a server, for the requests that are not passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.frontend.service import Service
from moonpool.runtime.frontend.shared_memory import SystemSharedMemory
from moonpool.runtime.frontend.traces import Traces

if TYPE_CHECKING:
    from moonpool.runtime.frontend.frontend_metrics import FrontendMetrics
    from moonpool.runtime.frontend.pool.guest_models import GuestModels


class _Metrics:
    """What the protocols count in."""

    def __init__(self, frontends: FrontendMetrics) -> None:
        self.frontends = frontends


class FrontService(Service):
    """Models, and nothing else: all else is the main process's."""

    def __init__(self, models: GuestModels) -> None:
        self.models = models  # type: ignore[assignment]
        # Clients register memory with the main process; requests that name it are passed on.
        self.shared_memory = SystemSharedMemory()
        self.traces = Traces()
        self.metrics = _Metrics(models.traffic)  # type: ignore[assignment]
