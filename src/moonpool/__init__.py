"""Models served from sealed processes, over shared memory.

    # scale.py
    from moonpool import Batch, Float32

    class Scale:
        def __call__(self, X: Float32[Batch, 3]) -> Float32[Batch, 3]:
            return X * 2

    # a program beside it
    with moonpool.Runtime() as runtime:
        runtime.load("scale", "scale.py", instances=2)
        print(runtime.infer("scale", {"X": np.ones((2, 3), np.float32)})["OUTPUT0"])

`Runtime("models/")` loads a Triton model repository. A `Runtime` also has `ainfer`, `submit`, `stream`, `empty`
and `metrics`. The hints (`Batch`, `Float32`, …) say what a model takes and returns. For errors, see
`help(moonpool.errors)`. To test models, import `moonpool.testing`. A backend is a `moonpool.Backend`.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING

from moonpool.runtime.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    # With `as`, type checkers and editors offer a name. A type checker knows no types such as `Float32[Batch, 3]`. It
    # reads them as `Annotated[Batch, 3]`: an array, with a note that it ignores. It follows an import of `Annotated`
    # under another name, but no assignment.
    from typing import (
        Annotated as Bool,
        Annotated as Bytes,
        Annotated as Float16,
        Annotated as Float32,
        Annotated as Float64,
        Annotated as Int8,
        Annotated as Int16,
        Annotated as Int32,
        Annotated as Int64,
        Annotated as UInt8,
        Annotated as UInt16,
        Annotated as UInt32,
        Annotated as UInt64,
        Any,
        TypeAlias,
    )

    from numpy.typing import NDArray

    from moonpool import errors as errors
    from moonpool.errors import (
        BadEnvironment as BadEnvironment,
        ConfigError as ConfigError,
        ExecuteTimedOut as ExecuteTimedOut,
        InvalidRequest as InvalidRequest,
        LoadFailed as LoadFailed,
        ModelError as ModelError,
        ModelNotFound as ModelNotFound,
        ModelUnavailable as ModelUnavailable,
        MoonpoolError,
        OutOfMemory as OutOfMemory,
        OutOfThreads as OutOfThreads,
        QueueFull as QueueFull,
        QueueTimeout as QueueTimeout,
        RepositoryError as RepositoryError,
        RequestTimedOut as RequestTimedOut,
        RuntimeClosed as RuntimeClosed,
        SandboxError as SandboxError,
        SequenceLost as SequenceLost,
        StubDied as StubDied,
    )
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.runtime.hosting.progress import Progress
    from moonpool.runtime.model.backend import Backend as Backend, Model as Model, ModelInstance as ModelInstance
    from moonpool.runtime.model.request import Response, ResponseAllocator as ResponseAllocator
    from moonpool.runtime.process.sigterm import exit_on_sigterm
    from moonpool.runtime.residency.policy import Resident as Resident
    from moonpool.runtime.runtime import Runtime
    from moonpool.runtime.sandboxes.sandbox import (
        RunError as RunError,
        RunResult as RunResult,
        RunStream as RunStream,
        Sandbox,
        arun,
        run,
    )
    from moonpool.runtime.schedule.stream import ResponseStream
    from moonpool.stub.native.hints import Outputs, Ragged, TensorType

    Batch: TypeAlias = NDArray[Any]
else:
    # The names by the modules that have them. A program that only names types, or an error, does not wait for the
    # runtime, and one that imports this long before its first load waits then.
    _NAMES = {
        "errors": (
            "BadEnvironment",
            "ConfigError",
            "ExecuteTimedOut",
            "InvalidRequest",
            "LoadFailed",
            "ModelError",
            "ModelNotFound",
            "ModelUnavailable",
            "MoonpoolError",
            "OutOfMemory",
            "OutOfThreads",
            "QueueFull",
            "QueueTimeout",
            "RepositoryError",
            "RequestTimedOut",
            "RuntimeClosed",
            "SandboxError",
            "SequenceLost",
            "StubDied",
        ),
        "ipc.cuda.array": ("DeviceArray",),
        "runtime.hosting.progress": ("Progress",),
        "runtime.model.backend": ("Backend", "Model", "ModelInstance"),
        "runtime.model.request": ("Response", "ResponseAllocator"),
        "runtime.process.sigterm": ("exit_on_sigterm",),
        "runtime.residency.policy": ("Resident",),
        "runtime.runtime": ("Runtime",),
        "runtime.sandboxes.sandbox": ("RunError", "RunResult", "RunStream", "Sandbox", "arun", "run"),
        "runtime.schedule.stream": ("ResponseStream",),
        "stub.native.hints": (
            "Batch",
            "Bool",
            "Bytes",
            "Float16",
            "Float32",
            "Float64",
            "Int8",
            "Int16",
            "Int32",
            "Int64",
            "Outputs",
            "Ragged",
            "TensorType",
            "UInt8",
            "UInt16",
            "UInt32",
            "UInt64",
        ),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import the module that has a name when a program first asks for it."""
        if name == "errors":
            return importlib.import_module("moonpool.errors")
        if name not in _MODULES:
            _suggest(name)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"moonpool.{_MODULES[name]}"), name)
        # The next access does not come here.
        globals()[name] = found
        return found

    def _suggest(name: str) -> None:
        """Raise ImportError for `from moonpool import Flot32`, as Python itself does from 3.12 on, with the name that
        was meant.
        """
        if sys.version_info >= (3, 12) or sys._getframe(2).f_code.co_name != "_handle_fromlist":
            return
        from moonpool.runtime.model.config.schema import suggestion

        meant = suggestion(name, __dir__())
        if meant and importlib.util.find_spec(f"moonpool.{name}") is None:
            what = f"cannot import name {name!r} from {__name__!r}{meant}"
            raise ImportError(what, name=__name__, path=__file__)

    def __dir__() -> list[str]:
        """List the names that are not imported yet, too, except the one that few programs need."""
        return sorted({*globals(), *_MODULES, "errors"} - {"DeviceArray"})


# What is stable, as docs/API.md lists it, in the order in which a program meets it. The other errors are names of this
# module, too; `moonpool.errors` lists them.
__all__ = [  # noqa: RUF022
    "Runtime",
    "run",
    "arun",
    "Sandbox",
    "RunResult",
    "RunStream",
    "RunError",
    "Batch",
    "Ragged",
    "Float32",
    "Float64",
    "Float16",
    "Int64",
    "Int32",
    "Int16",
    "Int8",
    "UInt64",
    "UInt32",
    "UInt16",
    "UInt8",
    "Bool",
    "Bytes",
    "Outputs",
    "TensorType",
    "Response",
    "ResponseStream",
    "Progress",
    "Resident",
    "exit_on_sigterm",
    "DeviceArray",
    "Backend",
    "Model",
    "ModelInstance",
    "ResponseAllocator",
    "MoonpoolError",
]
