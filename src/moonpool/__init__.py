"""Models served from sealed processes, over shared memory.

`Runtime` is the way in. Every error that it raises derives from `MoonpoolError` and carries one of Triton's
codes in `.code`. The hints (`Float32`, `Batch`, `Outputs`, ...) are for models; see
`docs/NATIVE_MODELS.md`.
"""

from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError, OutOfMemory
from moonpool.runtime.allocator import ResponseAllocator
from moonpool.runtime.backend import Backend, Model, ModelInstance
from moonpool.runtime.batcher import QueueFull, QueueTimeout
from moonpool.runtime.config import ConfigError
from moonpool.runtime.environment_error import BadEnvironment
from moonpool.runtime.errors import (
    ExecuteTimedOut,
    InvalidRequest,
    LoadFailed,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    RequestTimedOut,
    RuntimeClosed,
    SequenceLost,
    StubDied,
)
from moonpool.runtime.progress import Progress
from moonpool.runtime.repository import RepositoryError
from moonpool.runtime.request import Response
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.sigterm import exit_on_sigterm
from moonpool.runtime.stream import ResponseStream
from moonpool.runtime.version import VERSION

# The hints are what `moonpool.stub.hints` puts into this module, here as in a stub.
from moonpool.stub.hints import *  # noqa: F403

__version__ = VERSION

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray
else:

    def __getattr__(name: str) -> object:
        """What is about devices is not loaded before somebody asks for it."""
        if name == "DeviceArray":
            from moonpool.ipc.cuda.array import DeviceArray

            return DeviceArray
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "BadEnvironment",
    "ConfigError",
    "DeviceArray",
    "ExecuteTimedOut",
    "InvalidRequest",
    "LoadFailed",
    "Model",
    "ModelError",
    "ModelInstance",
    "ModelNotFound",
    "ModelUnavailable",
    "MoonpoolError",
    "OutOfMemory",
    "Progress",
    "QueueFull",
    "QueueTimeout",
    "RepositoryError",
    "RequestTimedOut",
    "Response",
    "ResponseAllocator",
    "ResponseStream",
    "Runtime",
    "RuntimeClosed",
    "SequenceLost",
    "StubDied",
    "exit_on_sigterm",
]
