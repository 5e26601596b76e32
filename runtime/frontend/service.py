"""Everything that a server offers, in one object for all protocols."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import lease_of
from moonpool.ipc.policy import is_contained
from moonpool.ipc.tensors import BF16, BYTES, DTYPES, ITEMSIZE
from moonpool.runtime.client_region import is_clients, overlap
from moonpool.runtime.errors import ModelError
from moonpool.runtime.frontend.log_control import LogControl
from moonpool.runtime.frontend.metadata import Metadata
from moonpool.runtime.frontend.overview import Overview
from moonpool.runtime.frontend.repository_control import RepositoryControl
from moonpool.runtime.frontend.server_metrics import ServerMetrics
from moonpool.runtime.frontend.shared_memory import LEAST_LENT_BYTES, SystemSharedMemory
from moonpool.runtime.frontend.tensors import WrongSize, shape_size, to_bytes
from moonpool.runtime.frontend.traces import Traces
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.runtime import Runtime

Place = tuple[str, int, int]
_UINT8 = np.dtype(np.uint8)


class SharedInput(Protocol):
    """An input of a request as its protocol describes it."""

    @property
    def code(self) -> int:
        """Of its datatype."""

    @property
    def place(self) -> Place | None:
        """Region, offset and size in bytes, where it lies in memory of a client."""


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

    def may_lend(self, model: Model) -> bool:
        """Whether the model's stubs are given clients' memory as it is."""
        return (
            isinstance(self.models.backends.of(model.config), PythonBackend)
            # Only a model that could open an object of the server's user by itself.
            and not is_contained(model.options.sandbox)
            # Mappings would count as its own memory, however large the client's region is.
            and model.options.memory_limit_bytes is None
            # These keep their requests, and would have to copy what they keep.
            and not model.config.decoupled
            and model.lends_clients_memory
            # A trace may be of tensors.
            and not self.traces.is_on
        )

    def read_bytes(self, model: Model, inputs: Iterable[SharedInput]) -> int:
        """How many bytes of inputs in clients' memory `read_shared` would copy."""
        places = [(each.code, each.place) for each in inputs if each.place is not None]
        may_lend = self.may_lend(model)
        return sum(
            place[2]
            for code, place in places
            if code == BYTES or not (may_lend and self.shared_memory.can_lend(*place))
        )

    def lend(
        self, model: Model, shape: tuple[int, ...], dtype: np.dtype[Any], place: Place
    ) -> NDArray[Any] | None:
        """An input in a client's region that `read_shared` would lend, and that was checked; None for any other.

        Raises as `read_shared`.
        """
        lease = self.shared_memory.lease(*place) if self.may_lend(model) else None
        return None if lease is None else np.ndarray(shape, dtype, lease)

    def read_shared(
        self, model: Model, name: str, code: int, shape: Sequence[int], place: Place
    ) -> Input:
        """An input from a client's region: lent as it is, or read once, into memory that the model's stubs see.

        `place` is region, offset, size in bytes. Raises `InvalidRequest`, `SharedMemoryError`, `OutOfMemory`.
        """
        region, offset, size_bytes = place
        self.shared_memory.check(region, offset, size_bytes)
        expected = shape_size(name, shape) * ITEMSIZE[code]
        if code != BYTES and expected != size_bytes:
            raise WrongSize(name, expected, size_bytes)
        # Strings are counted here.
        lease = self.shared_memory.lease(*place) if code != BYTES and self.may_lend(model) else None
        if lease is None:
            raw = self._room_for(model, size_bytes)
            self.shared_memory.read(region, offset, raw)
        else:
            raw = np.ndarray((size_bytes,), np.uint8, lease)
        if code in (BYTES, BF16):
            return Wire(code, tuple(shape), raw)
        return raw.view(DTYPES[code]).reshape(shape)

    def _room_for(self, model: Model, size_bytes: int) -> NDArray[Any]:
        backend = self.models.backends.of(model.config)
        if size_bytes >= LEAST_LENT_BYTES and isinstance(backend, PythonBackend):
            with suppress(OutOfMemory):  # then it is copied once more
                return backend.memory_of(model).empty((size_bytes,), _UINT8, size_bytes)
        return np.empty(size_bytes, _UINT8)

    def lend_targets(
        self, model: Model, request: InferenceRequest, places: Mapping[str, Place]
    ) -> None:
        """Let the stub write outputs where the client wants them, if it may. Raises as `read_shared`."""
        self.shared_memory.check_enabled()
        if not self.may_lend(model):
            return
        targets = {}
        inputs = [lease for array in request.arrays if (lease := lease_of(array)) is not None]
        for number, tensor in enumerate(model.config.outputs):
            if tensor.name in places:
                target = self.shared_memory.lease(*places[tensor.name])
                # An output is not to be written over what it is made of.
                if target is not None and not any(overlap(each, target) for each in inputs):
                    targets[number] = target
        if targets:
            request.targets = targets
            request.has_views = True

    def write_shared(self, name: str, output: Wire, place: Place) -> int:
        """Write an output into a client's region, if it is not there; returns how many bytes it took.

        Raises as `read_shared`, and `ModelError` where it does not fit.
        """
        region, offset, size_bytes = place
        data = to_bytes(output)
        if is_clients(output.raw):
            return len(data)
        self.shared_memory.check(region, offset, size_bytes)
        if len(data) > size_bytes:
            raise ModelError(
                f"shared memory size specified with the request for output '{name}' ({size_bytes} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        self.shared_memory.write(region, offset, [data])
        return len(data)
