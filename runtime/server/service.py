"""Everything that a server offers, in one object for all protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import Lease, lease_of
from moonpool.ipc.policy import is_contained
from moonpool.ipc.tensors import BF16, BYTES, DTYPES, ITEMSIZE
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.request import InferenceRequest, WireTensor
from moonpool.runtime.process.usage import MemoryAccount, MemoryCharge, part_of_memory
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.capture import Capture
from moonpool.runtime.server.inference.tensors import Input, WrongSize, shape_size, to_bytes
from moonpool.runtime.server.log import LogControl
from moonpool.runtime.server.metadata import Metadata
from moonpool.runtime.server.metrics import ServerMetrics
from moonpool.runtime.server.page.overview import Overview
from moonpool.runtime.server.repository_control import RepositoryControl
from moonpool.runtime.server.shared_memory import LEAST_LENT_BYTES, SystemSharedMemory
from moonpool.runtime.server.tracing.traces import Traces
from moonpool.runtime.stubs.regions import CallerMemory, is_clients, overlap

Place = tuple[str, int, int]
_UINT8 = np.dtype(np.uint8)
# For all inputs that are there at a time. Clients may name any number of bytes, as a file of theirs may be a hole.
_MOST_COPIED_BYTES = part_of_memory(4, 64 << 30)


class _Room(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of a copy."""


class _Copy(np.ndarray[Any, np.dtype[np.uint8]]):
    """A copy of a client's memory. It counts for as long as something is a view of it.

    A view refers to what its base is a view of, if that is of the view's own class. So there is another class between
    this one and plain arrays: their views refer to this one, which has the charge.
    """

    charge: MemoryCharge

    @classmethod
    def in_room(cls, room: NDArray[Any], charge: MemoryCharge) -> NDArray[Any]:
        """Return a plain array in this memory, which counts."""
        copy = room.view(_Room).view(cls)
        copy.charge = charge
        return copy.view(np.ndarray)


class SharedInput(Protocol):
    """An input as its protocol describes it."""

    @property
    def code(self) -> int:
        """The code of its datatype."""

    @property
    def place(self) -> Place | None:
        """Region, offset and size in bytes, if it lies in memory of a client."""


class Service:
    """The parts of a server. All of them are thread-safe, and none knows a protocol."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        shared_memory: SystemSharedMemory | None = None,
        metadata: Metadata | None = None,
        repository: RepositoryControl | None = None,
        traces: Traces | None = None,
        logs: LogControl | None = None,
        capture: Capture | None = None,
    ) -> None:
        """The caller closes the runtime, after the last protocol has ended."""
        self.runtime = runtime
        self.models = runtime._models
        # Inputs that were copied out of the memory of clients.
        self._copies = MemoryAccount()
        self.shared_memory = shared_memory or SystemSharedMemory()
        self.metadata = metadata or Metadata(runtime)
        self.repository = repository or RepositoryControl(runtime)
        self.traces = traces or Traces()
        # None if no requests are captured.
        self.capture = capture
        self.logs = logs or LogControl(self.models.stubs.change_log)
        self.metrics = ServerMetrics(self.models)
        self.overview = Overview(
            self.models, self.repository.index, self.metrics.frontends.requests, self.metrics.openai.pieces
        )

    def may_lend(self, model: Model) -> bool:
        """Return whether stubs of the model may map the memory of clients."""
        return (
            isinstance(self.models.backends.of(model.config), PythonBackend)
            # A model that is not contained could open objects of this user by itself.
            and not is_contained(model.options.sandbox)
            # The mappings would count towards its limit, however large the client's region is.
            and model.options.memory_limit_bytes is None
            # A decoupled model keeps its requests, and would have to copy their inputs.
            and not model.config.decoupled
            and model.lends_clients_memory
            # A trace or a capture may record tensors, which this process cannot see then.
            and not self.traces.is_on
            and self.capture is None
        )

    def lender(self, model: Model) -> Callable[[str, int, int], Lease | None] | None:
        """Return what lends places in the memory of clients to stubs of the model; None if they may not map it."""
        return self.shared_memory.lease if self.may_lend(model) else None

    def read_bytes(self, model: Model, inputs: Iterable[SharedInput]) -> int:
        """Return the number of bytes in clients' memory that `read_shared` would copy for these inputs."""
        places = [(each.code, each.place) for each in inputs if each.place is not None]
        may_lend = self.may_lend(model)
        return sum(
            place[2]
            for code, place in places
            if code == BYTES or not (may_lend and self.shared_memory.can_lend(*place))
        )

    def read_shared(self, model: Model, name: str, code: int, shape: Sequence[int], place: Place) -> Input:
        """Return an input from a client's region: lent to the stub, or copied once into memory that the model's stubs
        see.

        `place` is region, offset and size in bytes. Raises `InvalidRequest`, `SharedMemoryError`, `OutOfMemory`.
        """
        region, offset, size_bytes = place
        self.shared_memory.check(region, offset, size_bytes)
        expected = shape_size(name, shape) * ITEMSIZE[code]
        if code != BYTES and expected != size_bytes:
            raise WrongSize(name, expected, size_bytes)
        # Strings must be counted here, so they are always copied.
        lease = self.shared_memory.lease(*place) if code != BYTES and self.may_lend(model) else None
        if lease is None:
            if size_bytes > _MOST_COPIED_BYTES:
                raise InvalidRequest(
                    f"input '{name}' has {size_bytes} bytes in shared memory region '{region}', and at most "
                    f"{_MOST_COPIED_BYTES} bytes are copied for a model that may not read that memory itself"
                )
            charge = self._copies.charge(size_bytes, _MOST_COPIED_BYTES)
            if charge is None:
                raise OutOfMemory(
                    f"input '{name}' has {size_bytes} bytes in shared memory region '{region}', and with those of "
                    f"other requests at most {_MOST_COPIED_BYTES} bytes are copied at a time for models that may not "
                    "read that memory themselves: ask again later"
                )
            raw = _Copy.in_room(self._room_for(model, size_bytes), charge)
            self.shared_memory.read(region, offset, raw)
        else:
            raw = np.ndarray((size_bytes,), np.uint8, lease)
        if code in (BYTES, BF16):
            return WireTensor(code, tuple(shape), raw)
        return raw.view(DTYPES[code]).reshape(shape)

    def caller_memory(self, model: Model) -> CallerMemory | None:
        """Return the memory in which callers of a model write in place, if its backend has such."""
        backend = self.models.backends.of(model.config)
        return backend.memory_of(model) if isinstance(backend, PythonBackend) else None

    def placed(self, model: Model, values: Input) -> Input:
        """Return a large tensor in memory that the model's stubs see, so that nobody copies it later. On any thread.

        Raises `Closed`.
        """
        raw = values.raw if isinstance(values, WireTensor) else values.reshape(-1).view(np.uint8)
        if raw.nbytes < LEAST_LENT_BYTES:
            return values
        room = self._room_for(model, raw.nbytes)
        if lease_of(room) is None:
            return values
        room[:] = raw
        if isinstance(values, WireTensor):
            return values._replace(raw=room)
        return room.view(values.dtype).reshape(values.shape)

    def _room_for(self, model: Model, size_bytes: int) -> NDArray[Any]:
        memory = self.caller_memory(model)
        if size_bytes >= LEAST_LENT_BYTES and memory is not None:
            with suppress(OutOfMemory):  # then it is copied a second time, into the request region
                return memory.empty((size_bytes,), _UINT8, size_bytes)
        return np.empty(size_bytes, _UINT8)

    def lend_targets(self, model: Model, request: InferenceRequest, places: Mapping[str, Place]) -> None:
        """Let the stub write outputs straight into the client's regions, if it may map them. Raises as
        `read_shared`.
        """
        self.shared_memory.check_enabled()
        lend = self.lender(model)
        if lend is None:
            return
        targets = {}
        for number, output in enumerate(model.config.outputs):
            place = places.get(output.name)
            target = None if place is None else lend(*place)
            # The model may still read an input when it writes an output, so the two must not overlap.
            if target is not None and not any(overlap(array, target) for array in request.arrays):
                targets[number] = target
        if targets:
            request.targets = targets
            request.has_views = True

    def write_shared(self, name: str, output: WireTensor, place: Place) -> int:
        """Write an output into a client's region, unless the stub has done so. Return its size in bytes.

        Raises as `read_shared`, and `ModelError` if it does not fit.
        """
        if is_clients(output.raw):
            return output.raw.nbytes
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
