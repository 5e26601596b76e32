"""LitServe: a worker process for each instance, behind its HTTP server.

`python -m moonpool.benchmarks.hosts.on_litserve START PATH PORT INSTANCES` serves the model of START at that path.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

NEEDS = ("litserve==0.2.19",)
# The workers find the class under this name, not in the program that was started.
_MODULE = "moonpool.benchmarks.hosts.on_litserve"


def _api_class() -> type:
    import litserve
    from fastapi import Body, Response

    from moonpool.benchmarks.hosts.hosted import ModelInHost

    class Api(litserve.LitAPI):  # type: ignore[misc]
        def __init__(self, start: str, **options: Any) -> None:
            super().__init__(**options)
            self._start = start

        def setup(self, device: str) -> None:
            del device
            self._model = ModelInHost(self._start)

        def decode_request(self, request: Any) -> bytes:
            body: bytes = request
            return body

        def predict(self, body: bytes) -> bytes:
            return self._model.answer(body)

        def encode_response(self, output: bytes) -> Any:
            return Response(output)

    # LitServe gives the annotation to FastAPI. It reads JSON unless that is of bytes, and annotations in this file are
    # texts.
    raw = Annotated[bytes, Body(media_type="application/octet-stream")]
    Api.decode_request.__annotations__ = {"request": raw}
    Api.__module__, Api.__qualname__ = _MODULE, "Api"
    return Api


def __getattr__(name: str) -> Any:
    """Make `Api` when it is asked for: moonpool itself imports this file without LitServe."""
    if name != "Api":
        raise AttributeError(name)
    globals()[name] = _api_class()
    return globals()[name]


def main() -> None:
    """Serve until a signal."""
    import litserve

    start, path, port, instances = sys.argv[1:]
    api = importlib.import_module(_MODULE).Api(start, api_path=path)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(instances))
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
