"""Redirects of paths that people and tools try first on the HTTP port: `/docs` and `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from moonpool.runtime.frontend.restriction import place_of_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from moonpool.runtime.frontend.http.options import HttpOptions

_ANYWHERE = ("0.0.0.0", "::", "")


def routes(options: HttpOptions, ports: Mapping[str, int]) -> list[Route]:
    """Make the routes. `ports` may get the port "metrics" later."""

    async def docs(_: Request) -> Response:
        # Relative, as a proxy may have put the server under a path of its own.
        return _elsewhere("./", "The page of this server is at its root, /.")

    async def metrics(request: Request) -> Response:
        if "metrics" not in ports:
            return Response("This server serves no metrics: see --allow-metrics.\n", 404)
        # By the name that the client used for this port, unless the one for metrics listens at another address.
        place = place_of_host(request.headers.get("host", "")) or "localhost"
        if options.metrics_address not in (*_ANYWHERE, options.address):
            place = _bracketed(options.metrics_address)
        url = f"http://{place}:{ports['metrics']}/metrics"
        return _elsewhere(url, f"The metrics of this server are at {url}.")

    return [Route("/docs", docs, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]


def _elsewhere(location: str, text: str) -> Response:
    return Response(f"{text}\n", 307, {"Location": location}, media_type="text/plain")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
