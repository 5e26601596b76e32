"""One call of a model to another: its request, the tensors that go in and come out, and its state while it is open.

Theory of operation. `Fetching` starts a daemon thread for each call whose inputs lie on a device and have to be copied
to ordinary memory. The copy waits for the stub's work on the device, and a stub may let it wait for ever. So there are
at most `_MOST_FETCHED` of these threads for a stub; further calls get an error. The rest of this file starts no thread
and holds no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moonpool.ipc.errors import CODES, BadTensor, MoonpoolError, RemoteProtocolError
from moonpool.ipc.memory import ALIGNMENT
from moonpool.ipc.messages import ANY_MEMORY, DEVICE_MEMORY
from moonpool.ipc.tensors import BYTES, DTYPES, check_tensor
from moonpool.runtime.errors import BackendError, InvalidRequest, ModelError, ModelUnavailable, OutOfThreads
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.budgets import LONGEST_ERROR
from moonpool.runtime.model.details import check_finite
from moonpool.runtime.model.request import Details, InferenceRequest, Outcome, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.stubs.borrowed_blocks import BorrowedBlocks, lend_or_copy
from moonpool.runtime.stubs.link import Link

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease


class Callee(Protocol):
    """A model version that takes requests."""

    model: Model
    signature: Signature
    scheduler: Scheduler


class Callees(Protocol):
    """The other models of the runtime, as one model may use them. Any thread may call any method; only `load` waits."""

    def find(self, name: str, version: int | None = None) -> Callee:
        """Return a model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`, `NotGranted`."""

    def check_may_load(self, name: str) -> None:
        """Raise the `MoonpoolError` of `load` if the model may not load `name`, whatever the configuration is."""

    def load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load or reload a model, and return when it is ready. Raises `MoonpoolError` in Triton's words."""

    def begin_unload(self, name: str, *, with_members: bool = False) -> None:
        """Unload a model in the background, if it is an ensemble `with_members`. A model that is not loaded is no
        error.
        """

    def ask_ready(self, name: str, version: str, answer: Callable[[bool], object]) -> None:
        """Call `answer` once, on any thread, with True if a request to this model could run now."""


class ModelCall:
    """A request that a model made: a `Waiter`, whose head says what each method is for."""

    __slots__ = ("_answer", "batch", "is_cancelled", "model", "number", "request", "scheduler", "takes_many")
    may_block = interruptible = may_be_told_again = False

    def __init__(
        self,
        number: int,
        model: str,
        answer: Callable[[ModelCall, Outcome | None, bool], None],
        takes_many: bool,
        batch: int,
    ) -> None:
        """`number` is the stub's for this call, `batch` that of the batch that the model executes, 0 for none.

        `answer` gets each outcome, and whether it is the last.
        """
        self.batch = batch
        self.number = number
        self.model = model
        self.takes_many = takes_many
        self._answer = answer
        self.is_cancelled = False
        # None before it is submitted, and once it has its last response. Any thread may resolve a call at any time.
        self.request: InferenceRequest | None = None
        self.scheduler: Scheduler | None = None

    def gather(self, scheduler: Scheduler, request: InferenceRequest) -> bool:  # noqa: ARG002
        return False

    def appoint(self, execution: object) -> bool:  # noqa: ARG002
        return False

    def respond(self, outcome: Outcome) -> None:
        """Send a response that is not the last."""
        self._answer(self, outcome, False)

    def resolve(self, outcome: Outcome | None) -> None:
        """Send the last response, None if no more comes."""
        request, self.request = self.request, None  # they refer to each other
        if request is not None:
            # Drops the views of the stub's own memory, so that REPLY gives it back.
            request.arrays = []
            if request.trace is not None:
                request.trace.end()
        self._answer(self, outcome, True)

    def cancel(self) -> None:
        """Let the other model know, once, that it may stop. Its responses are still wanted."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        scheduler, request = self.scheduler, self.request
        if scheduler is not None and request is not None:
            scheduler.tell_cancelled(request)

    def leave(self) -> None:
        """Give up the request, since nobody waits for its responses any more."""
        scheduler, request = self.scheduler, self.request
        if scheduler is not None and request is not None:
            scheduler.leave(request)


_log = RuntimeLog("moonpool")
# Calls of one model whose inputs are being copied from a device.
_MOST_FETCHED = 64
# The details of a call that leaves them out, as most do.
_NO_DETAILS = ("", 0, 0, None, None, ANY_MEMORY, 0)


def make_call_request(hosted: Callee, fields: list[Any], inputs: Mapping[str, Any], asker: Link) -> InferenceRequest:
    """Make the request of an INFER to this model. Raises `InvalidRequest`, `ModelError`."""
    _, _, model, _, decoupled, timeout_us, _, _, _, outputs, given = fields
    if hosted.model.config.decoupled and not decoupled:
        raise ModelError(
            f"Model {model} is using the decoupled. The current BLS request call doesn't support "
            "models using the decoupled transaction policy. Please use 'decoupled=True' argument "
            "to the 'exec' or 'async_exec' calls for decoupled models.'",
            "UNSUPPORTED",
        )
    details = None
    if given is not None or timeout_us:
        request_id, correlation_id, flags, parameters, trace, memory, device = given or _NO_DETAILS
        if memory == DEVICE_MEMORY:
            memory, device = _device_of(asker, device)
        check_finite(parameters or {})
        details = Details(request_id, correlation_id, flags, timeout_us, 0, parameters, None, trace, memory, device)
    # As in Triton, a request that names no output gets all.
    request = hosted.signature.request(inputs, outputs or None, details)
    request.wants_wire = True
    return request


def _device_of(asker: Link, number: int) -> tuple[int, int]:
    """Return the memory and the device that a model wishes outputs in. A device that it does not see means any
    memory.
    """
    if asker.may_have_lanes:
        try:
            return DEVICE_MEMORY, asker.open_lanes().gpu_of(number)
        except RemoteProtocolError:
            pass
    return ANY_MEMORY, 0


class Fetching:
    """Copies inputs of calls from devices to ordinary memory, on threads, since the stub's work on them may take any
    time.
    """

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(
        self, signature: Signature, inputs: Mapping[str, Any], go_on: Callable[[dict[str, Any] | MoonpoolError], None]
    ) -> None:
        """Call `go_on` with the inputs, or with the error: on a thread, or at once if there are too many threads."""

        def fetch() -> None:
            try:
                fetched: dict[str, Any] | MoonpoolError = {
                    name: signature.fetched(value) for name, value in inputs.items()
                }
            except MoonpoolError as error:
                fetched = error
            except Exception as error:  # the stub waits for an answer in any case
                _log.exception("inputs of a call were not copied")
                fetched = BackendError(f"the inputs cannot be copied from their device: {error!r}")
            self._running.discard(threading.current_thread())
            go_on(fetched)

        if len(self._running) >= _MOST_FETCHED:
            go_on(ModelUnavailable(f"{_MOST_FETCHED} requests of this model wait for its GPU already"))
            return
        thread = threading.Thread(target=fetch, name="moonpool-fetch", daemon=True)
        self._running.add(thread)
        try:
            start_thread(thread)
        except OutOfThreads as error:
            self._running.discard(thread)
            go_on(error)


def wire_error(error: BaseException, most: int = LONGEST_ERROR, *, is_for_contained: bool) -> list[object]:
    """Describe an error for a model, which may be contained: its code and at most `most` characters of text."""
    code = getattr(error, "code", "INTERNAL")
    # The model gets no more than a client would: it may be foreign, too.
    message = public_text(error, is_for_contained=is_for_contained)[:most]
    message = message.encode("utf-8", "replace").decode()
    return [CODES.index(code) if code in CODES else CODES.index("INTERNAL"), message]


def read_inputs(rows: Sequence[list[Any]], leases: Sequence[Any]) -> dict[str, Any]:
    """Make the inputs of a call, by name: views of these leases, some of which may be of devices.

    Raises `RemoteProtocolError` for a tensor that does not lie in its lease, `InvalidRequest` for a name that is given
    twice.
    """
    if len(leases) > len(rows):
        raise RemoteProtocolError(f"{len(leases)} blocks for {len(rows)} inputs")
    inputs: dict[str, Any] = {}
    for name, datatype, shape, block, offset, size_bytes in rows:
        if block >= len(leases) or offset + size_bytes > leases[block].size:
            raise RemoteProtocolError(f"input {name!r:.80} does not lie in its block")
        if name in inputs:
            raise InvalidRequest(f"input '{name}' is given twice")
        try:
            check_tensor(datatype, shape, size_bytes)
        except BadTensor as bad:
            raise RemoteProtocolError(f"input {name!r:.80} {bad}") from None
        dims = tuple(shape)
        if not isinstance(leases[block], np.ndarray):
            inputs[name] = _on_device(name, datatype, dims, leases[block], offset)
            continue
        if datatype >= BYTES:
            raw = leases[block][offset : offset + size_bytes]
            inputs[name] = WireTensor(datatype, dims, raw)
            continue
        if not size_bytes:
            inputs[name] = np.empty(dims, DTYPES[datatype])
        else:
            inputs[name] = np.ndarray(dims, DTYPES[datatype], leases[block], offset)
    return inputs


def _on_device(name: str, datatype: int, shape: tuple[int, ...], lease: DeviceLease, offset: int) -> DeviceArray:
    from moonpool.ipc.cuda.array import DeviceArray

    if datatype == BYTES:
        raise RemoteProtocolError(f"input {name!r:.80} is BYTES and lies on a device")
    return DeviceArray.over(lease, offset, datatype, shape)


def write_outputs(
    outputs: Mapping[str, Any], borrowed_blocks: BorrowedBlocks, blocks: list[list[int]], rows: list[list[Any]]
) -> None:
    """Lend outputs to a stub until it gives them back, and add their blocks to `blocks` and their descriptions to
    `rows`.

    Large ones stay in place if the stub may see their memory. The others are copied into one block, and those on
    devices into one each. Raises `OutOfMemory`, `CudaError`; what was lent until then is in `blocks`.
    """
    copied: list[tuple[list[Any], Any]] = []
    total_bytes = 0
    for name, output in outputs.items():
        if not isinstance(output, (WireTensor, np.ndarray)):
            block_of, offset = lend_or_copy(output, borrowed_blocks, keep=True)
            shape = list(output.shape)
            rows.append([name, output.datatype, shape, len(blocks), offset, output.nbytes])
            blocks.append(block_of)
            continue
        datatype, dims, array = WireTensor.of(output)
        shape = list(dims)
        lent = borrowed_blocks.lend(array, keep=True)
        if lent is None:
            row: list[Any] = [name, datatype, shape, 0, total_bytes, array.nbytes]
            copied.append((row, array))
            total_bytes += (array.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        else:
            row = [name, datatype, shape, len(blocks), lent[1], array.nbytes]
            blocks.append(lent[0])
        rows.append(row)
    if not copied:
        return
    block = borrowed_blocks.allocate(total_bytes, keep=True)
    region, start = block.region, block.offset
    for row, array in copied:
        row[3] = len(blocks)
        region.write(start + row[4], array)
    blocks.append([region.id, start, total_bytes])
