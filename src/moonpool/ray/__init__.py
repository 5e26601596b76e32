"""Models of a repository as a Ray Serve application: replicas on many machines, each with moonpool's processes inside.

    from ray import serve
    import moonpool.ray

    serve.start(grpc_options={"port": 9000, "grpc_servicer_functions": ["moonpool.ray.add_servicer"]})
    serve.run(moonpool.ray.application("models/", sandbox="strict"), name="models")

    handle = moonpool.ray.get("models", "scale")
    outputs = await handle.infer({"X": x})

Clients of KServe v2 use Serve's ports for HTTP and gRPC. Needs the extra `ray`. docs/RAY.md explains how to run it.
"""

from typing import Any

from moonpool.ray.autoscaling import queue_policy
from moonpool.ray.options import Options
from moonpool.runtime.process.extras import how_to_install

try:
    from ray import serve as _  # noqa: F401 - the part of Ray that may be missing
except ImportError as _error:
    _why = f"moonpool.ray needs Ray Serve: {_error}. Install it with: {how_to_install('ray')}"

    def __getattr__(name: str) -> Any:
        """Raise an error that says what to install."""
        if name in __all__:
            raise ImportError(_why)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    from moonpool.ray.application import application, build
    from moonpool.ray.handle import ModelHandle, ReplicaDied, get
    from moonpool.ray.ingress import add_servicer
    from moonpool.ray.routing import SequenceRouter

# In the order in which a program meets them.
__all__ = [  # noqa: RUF022
    "application",
    "build",
    "Options",
    "get",
    "ModelHandle",
    "ReplicaDied",
    "add_servicer",
    "queue_policy",
    "SequenceRouter",
]
