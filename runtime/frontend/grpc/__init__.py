"""The KServe v2 protocol over gRPC.

Importing this loads gRPC's library for a server: the thread that polls it reads the sockets of clients itself. Otherwise
threads of the library do, and wake that one four times for each request. What has loaded the library
before decides, and whoever has set the variable; models do not see it.
"""

from __future__ import annotations

import os

_EXPERIMENTS = "GRPC_EXPERIMENTS"

if _EXPERIMENTS not in os.environ:
    os.environ[_EXPERIMENTS] = "-event_engine_listener"
    try:
        import grpc  # noqa: F401
        from grpc._cython import cygrpc

        # It reads the variable when it is first asked for something.
        cygrpc.CompletionQueue().shutdown()
    finally:
        del os.environ[_EXPERIMENTS]
