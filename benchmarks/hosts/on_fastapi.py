"""FastAPI with uvicorn: the model in the server's own processes, one for each instance, as people begin.

`python -m moonpool.benchmarks.hosts.on_fastapi START PATH PORT INSTANCES` serves the model of START at that path.

Theory of operation. FastAPI runs a plain function on a pool of threads. An instance executes one request at a time, so
`executing` is held around the model.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

NEEDS = ("fastapi==0.163.2", "httptools>=0.6", "uvicorn==0.54.0", "uvloop>=0.21")
# How the processes of the server, which import this file again, know the model.
_START, _PATH = "MOONPOOL_BENCH_START", "MOONPOOL_BENCH_PATH"


def make_app() -> Any:
    """Make the application of one process."""
    import fastapi

    from moonpool.benchmarks.hosts.hosted import ModelInHost

    model = ModelInHost(os.environ[_START])
    executing = threading.Lock()
    app = fastapi.FastAPI()

    def infer(body: bytes = fastapi.Body(media_type="application/octet-stream")) -> Any:
        with executing:
            return fastapi.Response(model.answer(body))

    # The annotations are texts, which FastAPI looks up where no local name is.
    infer.__annotations__ = {"body": bytes}
    app.post(os.environ[_PATH])(infer)
    return app


def main() -> None:
    """Serve until a signal."""
    import uvicorn

    start, path, port, instances = sys.argv[1:]
    os.environ[_START], os.environ[_PATH] = start, path
    uvicorn.run(
        "moonpool.benchmarks.hosts.on_fastapi:make_app",
        factory=True,
        host="127.0.0.1",
        port=int(port),
        workers=int(instances),
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
