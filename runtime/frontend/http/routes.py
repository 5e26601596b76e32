"""What goes where: requests for inference on the straight way, all else to the application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.exchange import Exchange, Headers
    from moonpool.runtime.frontend.http.head import Head

TEXT: Headers = ((b"Content-Type", b"text/plain"),)


class Service(Protocol):
    """What the front end needs of a server."""

    def metrics_text(self) -> str:
        """All metrics, as Prometheus reads them."""


class Routes:
    """The handler of the port for HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def handle(self, exchange: Exchange) -> None:
        """Answer, or see that somebody does."""
        if exchange.head.target.partition(b"?")[0] == b"/v2/health/live":
            exchange.respond(200, TEXT)
        else:
            exchange.fail(404, "Not Found", TEXT)

    def refuse(self, head: Head) -> tuple[int, str] | None:  # noqa: ARG002 - all are welcome
        """None of the requests is refused before its body has come."""
        return None

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - no wish
        """Anywhere."""
        return None


class MetricsRoutes(Routes):
    """The handler of the port for metrics."""

    def handle(self, exchange: Exchange) -> None:
        """Answer."""
        if exchange.head.target.partition(b"?")[0] != b"/metrics":
            exchange.fail(404, "Not Found", TEXT)
        elif exchange.head.method != "GET":
            exchange.fail(405, "Method Not Allowed", TEXT)
        else:
            content = ((b"Content-Type", b"text/plain; charset=utf-8"),)
            exchange.respond(200, content, (self._service.metrics_text().encode(),))
