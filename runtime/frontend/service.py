"""Everything that a server offers, in one object for all protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES, ITEMSIZE
from moonpool.runtime.errors import ModelError
from moonpool.runtime.frontend.log_control import LogControl
from moonpool.runtime.frontend.metadata import Metadata
from moonpool.runtime.frontend.overview import Overview
from moonpool.runtime.frontend.repository_control import RepositoryControl
from moonpool.runtime.frontend.server_metrics import ServerMetrics
from moonpool.runtime.frontend.shared_memory import SystemSharedMemory
from moonpool.runtime.frontend.tensors import WrongSize, shape_size, to_bytes
from moonpool.runtime.frontend.traces import Traces
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.runtime import Runtime

_UINT8 = np.dtype(np.uint8)
# What is smaller is copied in less time than it takes to tell a stub where it lies.
_WORTH_PLACING_BYTES = 64 << 10


class Service:
    """What the frontends serve. Its parts are thread-safe; none knows of a protocol."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        shared_memory: SystemSharedMemory | None = None,
        metadata: Metadata | None = None,
        repository: RepositoryControl | None = None,
        traces: Traces | None = None,
        logs: LogControl | None = None,
    ) -> None:
        """The runtime stays the caller's, who closes it after the last frontend."""
        self.runtime = runtime
        self.models = runtime.registry
        self.shared_memory = shared_memory or SystemSharedMemory()
        self.metadata = metadata or Metadata(runtime)
        self.repository = repository or RepositoryControl(runtime)
        self.traces = traces or Traces()
        self.logs = logs or LogControl(self.models.stubs.change_log)
        self.metrics = ServerMetrics(self.models)
        self.overview = Overview(self.models, self.repository.index)

    def metrics_text(self) -> str:
        """All metrics, as Prometheus reads them. Raises `RuntimeClosed`."""
        return self.metrics.text()

    def read_shared(
        self, model: Model, name: str, code: int, shape: Sequence[int], place: tuple[str, int, int]
    ) -> Input:
        """An input from a client's region: read once, into memory that the model's stubs see.

        `place` is region, offset, size in bytes. Raises `InvalidRequest`, `SharedMemoryError`, `OutOfMemory`.
        """
        region, offset, size_bytes = place
        self.shared_memory.check(region, offset, size_bytes)
        expected = shape_size(name, shape) * ITEMSIZE[code]
        if code != BYTES and expected != size_bytes:
            raise WrongSize(name, expected, size_bytes)
        backend = self.models.backends.of(model.config)
        raw: NDArray[Any]
        if size_bytes >= _WORTH_PLACING_BYTES and isinstance(backend, PythonBackend):
            raw = backend.memory_of(model).empty((size_bytes,), _UINT8, size_bytes)
        else:
            raw = np.empty(size_bytes, _UINT8)
        self.shared_memory.read(region, offset, raw)
        if code in (BYTES, BF16):
            return Wire(code, tuple(shape), raw)
        return raw.view(DTYPES[code]).reshape(shape)

    def write_shared(self, name: str, output: Wire, place: tuple[str, int, int]) -> int:
        """Write an output into a client's region; returns how many bytes it took.

        Raises as `read_shared`, and `ModelError` where it does not fit.
        """
        region, offset, size_bytes = place
        data = to_bytes(output)
        self.shared_memory.check(region, offset, size_bytes)
        if len(data) > size_bytes:
            raise ModelError(
                f"shared memory size specified with the request for output '{name}' ({size_bytes} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        self.shared_memory.write(region, offset, [data])
        return len(data)
