"""The errors of moonpool. Every one derives from `MoonpoolError` and is also a name of `moonpool`.

Each carries one of Triton's codes in `.code`:

    try:
        outputs = runtime.infer("scale", {"X": x}, timeout_s=1.0)
    except moonpool.InvalidRequest as error:    # the caller's mistake: names, datatypes, shapes
        ...
    except moonpool.ModelError as error:        # the model's answer to this request
        ...
    except moonpool.MoonpoolError as error:     # anything else
        log.error("%s", error)                  # may have paths of this machine, and lines of a model's code
        answer(error.http_status, error.public_text())  # what clients of a server get

`.fault` says who can do something about it: `caller` (the request or the call is wrong), `model` (its code raised,
ended, took too long or does not load), `setup` (files, configurations, environments, grants, devices), `load` (no room
or no time at the moment: try later), `backend` (a backend broke its contract) or `moonpool` (a bug). docs/EMBEDDING.md
has tables of codes and faults.
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
    SandboxError,
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
    "SandboxError",
    "SequenceLost",
    "RuntimeClosed",
]
