"""BentoML: a worker process for each instance, behind one socket.

`python -m moonpool.benchmarks.hosts.on_bentoml START PATH PORT INSTANCES` serves the model of START at that path.
"""

from __future__ import annotations

import os
import sys
from typing import Any

NEEDS = ("bentoml==1.4.39",)
# How BentoML's processes, which import this file again, know the model.
_START, _PATH, _INSTANCES = "MOONPOOL_BENCH_START", "MOONPOOL_BENCH_PATH", "MOONPOOL_BENCH_COUNT"


def _service() -> Any:
    import bentoml
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from moonpool.benchmarks.hosts.hosted import ModelInHost

    models: list[ModelInHost] = []

    # An API of BentoML reads JSON or a file, so the body comes by an application that is mounted.
    async def infer(request: Request) -> Response:
        return Response(models[0].answer(await request.body()))

    class Hosted:
        def __init__(self) -> None:
            models.append(ModelInHost(os.environ[_START]))

    app = Starlette(routes=[Route(os.environ[_PATH], infer, methods=["POST"])])
    options = {"workers": int(os.environ[_INSTANCES]), "logging": {"access": {"enabled": False}}}
    served = bentoml.service(**options)(Hosted)
    return bentoml.asgi_app(app, path="/")(served)


def __getattr__(name: str) -> Any:
    """Make `service` when BentoML asks for it: moonpool itself imports this file without BentoML."""
    if name != "service":
        raise AttributeError(name)
    globals()["service"] = _service()
    return globals()["service"]


def main() -> None:
    """Serve until a signal."""
    start, path, port, instances = sys.argv[1:]
    os.environ[_START], os.environ[_PATH], os.environ[_INSTANCES] = start, path, instances
    os.environ.setdefault("BENTOML_DO_NOT_TRACK", "1")
    program = os.path.join(os.path.dirname(sys.executable), "bentoml")
    service = "moonpool.benchmarks.hosts.on_bentoml:service"
    os.execv(program, [program, "serve", service, "--host", "127.0.0.1", "--port", port])


if __name__ == "__main__":
    main()
