"""Ray Serve: a replica for each instance, behind its HTTP proxy.

`python -m moonpool.benchmarks.hosts.on_ray START PATH PORT INSTANCES` serves the model of START at that path.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

NEEDS = ("ray[serve]==2.60.0",)
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers give way to all other processes, unlike those of the hosts that it is compared with.
    "RAY_worker_niceness": "0",
    # On a busy machine its proxy takes longer to start than Ray's five seconds, after which it is killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


def main() -> None:
    """Serve until a signal."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    start, path, port, instances = sys.argv[1:]

    class Hosted:
        def __init__(self) -> None:
            from moonpool.benchmarks.hosts.hosted import ModelInHost

            self._model = ModelInHost(start)

        async def __call__(self, request: Any) -> Any:
            return Response(self._model.answer(await request.body()))

    Hosted.__call__.__annotations__ = {"request": Request}
    # Ray places replicas by the processors that it believes in, and each of them wants one.
    ray.init(num_cpus=int(instances) + 2, include_dashboard=False, log_to_driver=False)
    quiet = {"enable_access_log": False}
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, logging_config=quiet)
    deployment = serve.deployment(Hosted, num_replicas=int(instances), max_ongoing_requests=100, logging_config=quiet)
    serve.run(deployment.bind(), route_prefix=path)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
