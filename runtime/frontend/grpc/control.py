"""What is asked of the server and its models but inference: health, metadata, repository, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as kserve

from moonpool.runtime.frontend.grpc import health

if TYPE_CHECKING:
    from moonpool.runtime.frontend.service import Service


class Health:
    """Who is alive and ready. Thread-safe, as all here."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.is_draining = False

    def server_live(self, _: Any) -> Any:
        return kserve.ServerLiveResponse(live=True)

    def server_ready(self, _: Any) -> Any:
        return kserve.ServerReadyResponse(ready=self._is_ready())

    def model_ready(self, request: Any) -> Any:
        version = int(request.version) if request.version else None
        is_ready = self._service.runtime.is_ready(request.name, version)
        return kserve.ModelReadyResponse(ready=is_ready)

    def check(self, _: Any) -> Any:
        """Of `grpc.health.v1`."""
        status = health.SERVING if self._is_ready() else health.NOT_SERVING
        return health.HealthCheckResponse(status=status)

    def _is_ready(self) -> bool:
        return not self.is_draining
