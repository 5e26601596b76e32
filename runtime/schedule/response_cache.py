"""Keeps the responses of models whose configuration allows that, and answers equal requests with them.

Theory of operation. `CachingScheduler` looks for a response before it takes a request in. If there is one, the caller
has it at once, and no instance is woken. Otherwise the request goes its way, and `_resolve`, which sees every outcome
once, keeps the response before its caller gets it. So a caller that asks again finds it. Two equal requests at the same
time are both executed.

*What is equal.* The key is a digest of 256 bits over all that a model can read of a request and that may change its
answer: names, datatypes, shapes and bytes of the inputs, the requested outputs, the parameters, and the place in a
sequence. Nobody can find two requests with one digest. A key belongs to one load of one version (`owner`), so another
model, or the same one after a reload, finds nothing of it. An ensemble gets another number when one of its models is
replaced (`forget_responses`): what its requests that began before that bring is dropped, whichever model answered them.
Each part of what is hashed is preceded by what says where it ends.

*Memory of others.* Inputs may lie in memory that somebody else can write to: a client, a model that asks, another
thread. It could change between the digest and the moment at which the model reads it, and then the answer to one
request would be kept for another one. So such inputs are copied first, and digest and model see the copy.

*What is not kept.* Errors; responses that lie on a device, or in memory that the caller gave for them; and those of
traced requests, whose traces show an execution. `ResponseCache` has one lock, held for a look into the table, and taken
inside of the scheduler's and never outside. A response is copied without it. An owner that has left (`leave`) can
neither find nor keep anything: its last outcomes may come later.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import DEVICE_MEMORY
from moonpool.ipc.tensors import BYTES, DTYPES, decode_bytes
from moonpool.runtime.arguments import OF_RUNTIME
from moonpool.runtime.errors import own
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.request import Details, InferenceRequest, Outcome, Parameter, Response, WireTensor
from moonpool.runtime.observe.statistics import CacheCounts
from moonpool.runtime.schedule.lane import Execution, Pair
from moonpool.runtime.schedule.scheduler import Scheduler

_log = RuntimeLog("moonpool")
_NO_DETAILS = Details()
# About what an entry takes beside its tensors and parameters, and each of these beside its bytes and texts: objects,
# and places in tables.
_ENTRY_BYTES, _TENSOR_BYTES, _PARAMETER_BYTES = 1024, 512, 128
# A number of a shape.
_NUMBER_BYTES = 32

Key = tuple[int, bytes]


class CachedResponse(NamedTuple):
    """A response, in memory that nobody writes to."""

    outputs: dict[str, WireTensor]
    parameters: dict[str, Parameter]

    @classmethod
    def of(cls, response: Response, most_bytes: int) -> CachedResponse | None:
        """Copy a response. None if it does not lie in ordinary memory, or has more bytes."""
        outputs: dict[str, WireTensor] = {}
        for name, output in response.outputs.items():
            if not isinstance(output, (np.ndarray, WireTensor)):
                return None
            datatype, shape, raw = WireTensor.of(output)
            most_bytes -= raw.nbytes
            if most_bytes < 0:
                return None
            copy = np.array(_bytes_of(raw))
            copy.flags.writeable = False
            outputs[name] = WireTensor(datatype, tuple(shape), copy)
        return cls(outputs, dict(response.parameters))

    @property
    def size_bytes(self) -> int:
        """The memory that it takes, about."""
        tensors = sum(
            _text_bytes(name) + _NUMBER_BYTES * len(tensor.shape) + tensor.raw.nbytes + _TENSOR_BYTES
            for name, tensor in self.outputs.items()
        )
        parameters = sum(
            _text_bytes(name) + _text_bytes(value) + _PARAMETER_BYTES for name, value in self.parameters.items()
        )
        return _ENTRY_BYTES + tensors + parameters

    def answer(self, request: InferenceRequest) -> Response:
        """Make the response to a request. A caller who may write to the outputs gets copies."""
        outputs: dict[str, Any] = dict(self.outputs)
        if not request.wants_wire:
            outputs = {name: _array(tensor) for name, tensor in self.outputs.items()}
        return Response(outputs, dict(self.parameters), request.request_id)


def _text_bytes(value: Parameter) -> int:
    """Return the memory of a text, or of another value. A model chooses it, and may choose characters that take four
    bytes each.
    """
    if not isinstance(value, str) or value.isascii():
        return sys.getsizeof(value)
    # CPython keeps its UTF-8 beside it, once somebody has asked for that.
    return sys.getsizeof(value) + 4 * len(value)


def _array(tensor: WireTensor) -> Any:
    if tensor.datatype == BYTES:
        return decode_bytes(tensor.raw.data, tensor.shape)
    return tensor.raw.copy().view(DTYPES[tensor.datatype]).reshape(tensor.shape)


def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array as an array, without a copy if they lie in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class ResponseCache:
    """Responses by key, in so many bytes at most: those that nobody has asked for the longest go first. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        # Responses that went because others needed their room.
        self.evictions = 0
        self._entries: OrderedDict[Key, tuple[CachedResponse, int]] = OrderedDict()
        self._owners: set[int] = set()
        self._numbers = count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def join(self) -> int:
        """Return a number for another owner of entries."""
        with self._lock:
            owner = next(self._numbers)
            self._owners.add(owner)
            return owner

    def leave(self, owner: int) -> None:
        """Drop the entries of an owner, also those that come later."""
        with self._lock:
            self._owners.discard(owner)
            for key in [each for each in self._entries if each[0] == owner]:
                self._drop(key)

    def find(self, key: Key) -> CachedResponse | None:
        """Return the response with a key, which is the last one to go now."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def keep(self, key: Key, response: CachedResponse) -> None:
        """Keep a response, unless it is larger than the cache, or its owner has left."""
        size_bytes = response.size_bytes
        with self._lock:
            if size_bytes > self.size_bytes or key[0] not in self._owners:
                return
            if key in self._entries:
                self._drop(key)
            while self.used_bytes + size_bytes > self.size_bytes:
                self._drop(next(iter(self._entries)))
                self.evictions += 1
            self._entries[key] = response, size_bytes
            self.used_bytes += size_bytes

    def _drop(self, key: Key) -> None:
        _, size_bytes = self._entries.pop(key)
        self.used_bytes -= size_bytes


def cache_of(size_bytes: int | None) -> ResponseCache | None:
    """Make a cache of this size, None for none. Raises ValueError."""
    if size_bytes is None:
        return None
    return ResponseCache(OF_RUNTIME.whole("response_cache_bytes", size_bytes, 1))


def may_be_cached(request: InferenceRequest) -> bool:
    """Return True if the response to a request may be kept, or come from the cache."""
    details = request.details
    return (
        request.trace is None
        and request.allocator is None
        and not request.targets
        and (details is None or details.memory != DEVICE_MEMORY)
        and all(isinstance(array, np.ndarray) for array in request.arrays)
    )


def digest_of(request: InferenceRequest) -> bytes:
    """Return the digest of all that may change the answer to a request, whose inputs nobody else can write to."""
    # Processors have instructions for it, with which it takes half the time of others.
    digest = hashlib.sha256()
    for part in _parts_of(request):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts_of(request: InferenceRequest) -> Iterator[Any]:
    # Details that are all at their defaults say the same as none.
    details = request.details or _NO_DETAILS
    parameters: Mapping[str, Parameter] = details.parameters or {}
    facts = sorted(parameters.items()), details.outputs, details.correlation_id, details.flags
    # The type of a value shows in its text: 1, 1.0, True and "1" differ.
    yield repr(facts).encode()
    for tensor, array in zip(request.shapes.tensors, request.arrays, strict=True):
        yield repr((tensor.number, tensor.datatype, list(tensor.shape))).encode()
        yield memoryview(_bytes_of(array))


class CachingScheduler(Scheduler):
    """A scheduler that answers requests from a cache where it can. Any thread may call any method.

    It may stand before any other kind of scheduler, as the first base of a class of both.
    """

    def __init__(self, cache: ResponseCache, *arguments: Any) -> None:
        """Take entries of `cache`, until `leave_cache`. The other arguments are those of `Scheduler`."""
        super().__init__(*arguments)
        # Responses that are kept are on their way to callers.
        self._is_plain = self.is_atomic = False
        self._cache = cache
        # Known once the model is loaded.
        self._owner: int | None = None
        self._counts = self.statistics.cache = CacheCounts()
        # Requests whose response is to be kept, with the key and the duration of the look for it.
        self._missed: dict[InferenceRequest, tuple[Key, int]] = {}

    def open(self) -> None:
        if self._owner is None:
            self._owner = self._cache.join()
        super().open()

    def leave_cache(self) -> None:
        """Drop the entries of this model version, also those that come later."""
        with self._lock:
            owner, self._owner = self._owner, None
            if owner is not None:
                self._cache.leave(owner)

    def forget_responses(self) -> None:
        """Drop the entries until now, also of requests that were looked for until now and have no response yet."""
        with self._lock:
            owner = self._owner
            if owner is not None:
                self._owner = self._cache.join()
                self._cache.leave(owner)

    def submit(self, request: InferenceRequest) -> Execution | None:
        """Answer a request from the cache, or take it in as `Scheduler.submit`."""
        began_ns = time.monotonic_ns()
        found = self._found(request, began_ns)
        if found is not None:
            self._answer(request, found, began_ns)
            return None
        try:
            return super().submit(request)
        except BaseException:
            self._missed.pop(request, None)
            raise

    def submit_all(self, requests: Sequence[InferenceRequest]) -> None:
        """Answer requests that came together from the cache, or take them in as `Scheduler.submit_all`."""
        missed = []
        for request in requests:
            began_ns = time.monotonic_ns()
            found = None if request.left else self._found(request, began_ns)
            if found is None:
                missed.append(request)
                continue
            try:
                self._answer(request, found, began_ns)
            except MoonpoolError as error:
                self._hand_out([(request, error)])
        super().submit_all(missed)

    def _found(self, request: InferenceRequest, began_ns: int) -> CachedResponse | None:
        """Look for a response. If there is none, note that the one to come is to be kept."""
        owner = self._owner
        if owner is None or not may_be_cached(request):
            return None
        # What is hashed must be what is executed. Others may write into the memory of a view meanwhile, but not into
        # bytes.
        if any(each.base is not None and type(each.base) is not bytes for each in request.arrays):
            request.arrays = [np.array(array) for array in request.arrays]
            request.has_views = False
        key = owner, digest_of(request)
        found = self._cache.find(key)
        if found is None:
            self._missed[request] = key, time.monotonic_ns() - began_ns
        return found

    def _answer(self, request: InferenceRequest, found: CachedResponse, began_ns: int) -> None:
        response = found.answer(request)
        with self._lock:
            # A response that is kept needs no instance, so the model sleeps on.
            if self._refusal is not None and not self.is_asleep:
                raise own(self._refusal)
            taken_ns = time.monotonic_ns() - began_ns
            self.statistics.record_hit(time.time_ns() // 1_000_000, taken_ns)
        request.queued_ns = began_ns
        request.waiter.resolve(response)

    def _hand_out(self, pairs: Iterable[Pair]) -> None:
        self._departures.leave(pairs, self._resolve)

    def _resolve(self, request: InferenceRequest, outcome: Outcome | None) -> None:
        missed = self._missed.pop(request, None)
        if missed is not None and isinstance(outcome, Response):
            try:
                self._keep(*missed, outcome)
            except Exception:  # the caller must get its response whatever is wrong with it
                _log.exception("a response of model '%s' cannot be kept", self.name)
        if not request.left:
            request.waiter.resolve(outcome)

    def _keep(self, key: Key, looked_ns: int, response: Response) -> None:
        began_ns = time.monotonic_ns()
        kept = CachedResponse.of(response, self._cache.size_bytes)
        if kept is not None:
            self._cache.keep(key, kept)
        with self._lock:
            self._counts.add_miss(looked_ns + time.monotonic_ns() - began_ns)
