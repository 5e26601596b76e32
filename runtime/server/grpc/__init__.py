"""The KServe v2 protocol over gRPC.

Importing this loads gRPC's library so that the thread which polls it reads the sockets of clients itself. By default threads of the
library read them, and wake the polling thread four times for each request. If the library was loaded before, or the variable is
set already, that decides. Models do not see the variable.
"""

from __future__ import annotations

import os

_EXPERIMENTS = "GRPC_EXPERIMENTS"

if _EXPERIMENTS not in os.environ:
    os.environ[_EXPERIMENTS] = "-event_engine_listener"
    try:
        import grpc  # noqa: F401
        from grpc._cython import cygrpc

        # The library reads the variable when it is first used.
        cygrpc.CompletionQueue().shutdown()
    finally:
        del os.environ[_EXPERIMENTS]
