"""The errors of moonpool. Every one derives from `MoonpoolError` and is also a name of `moonpool`.

Each carries one of Triton's codes in `.code`:

    try:
        outputs = runtime.infer("scale", {"X": x}, timeout_s=1.0)
    except moonpool.InvalidRequest as error:    # the caller's mistake: names, datatypes, shapes
        ...
    except moonpool.ModelError as error:        # the model's answer to this request
        ...
    except moonpool.MoonpoolError as error:     # anything else: error.code, str(error)
        ...
"""

from moonpool.ipc.errors import MoonpoolError, OutOfMemory
from moonpool.runtime.errors import (
    BadEnvironment,
    ExecuteTimedOut,
    InvalidRequest,
    LoadFailed,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    OutOfThreads,
    QueueFull,
    QueueTimeout,
    RequestTimedOut,
    RuntimeClosed,
    SequenceLost,
    StubDied,
)
from moonpool.runtime.model.config.model import ConfigError
from moonpool.runtime.repository.repository import RepositoryError

# From a load to the end, in the order in which a program meets them.
__all__ = [  # noqa: RUF022
    "MoonpoolError",
    "RepositoryError",
    "ConfigError",
    "BadEnvironment",
    "LoadFailed",
    "ModelNotFound",
    "ModelUnavailable",
    "InvalidRequest",
    "OutOfMemory",
    "OutOfThreads",
    "QueueFull",
    "QueueTimeout",
    "RequestTimedOut",
    "ExecuteTimedOut",
    "ModelError",
    "StubDied",
    "SequenceLost",
    "RuntimeClosed",
]
