"""Runs the warm-up samples of a model in an instance, before that instance is ready.

Theory of operation. A warm-up runs on the thread that starts the instance, which has the instance at that moment: the
scheduler does not know it yet. So the batches go to the backend directly, no
other request can share them, and nothing is counted. Responses apart from a batch come on the reactor's thread through
`ModelInstance.respond`; `route` sends those of warm-up requests here. A request of this file has a `_Caller` as its
waiter, and no other request has one.

An instance may die in its warm-up, or the load may be given up, which ends its process. The answer to a batch then
becomes readable and raises. A response that would come later never does, so `_Caller.wait` looks every moment whether
the instance broke.

The data of a sample is made when the sample is sent, and dropped when the stub has its copy, which lies in memory that
counts for the model. One sample of a model has data at a time (`_making`), whatever the number of its samples and
instances: they are the configuration's, and the memory is the runtime's. The load checks all samples without their
data, except for files, and the size of all together.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.port import RequestTensor, Shapes
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, ITEMSIZE
from moonpool.runtime.errors import BackendError, InvalidRequest, LoadFailed
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model, ModelInstance, Pending
from moonpool.runtime.model.config.warmup import WarmupInput, WarmupSample
from moonpool.runtime.model.request import LATER, Answer, InferenceRequest, Outcome, Waiter, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.process.files import read_file
from moonpool.runtime.schedule.sequence_states import SequenceStates

_log = RuntimeLog("moonpool")
# The folder of a model in which the files of its samples lie.
FOLDER = "warmup"
_MOST_BYTES = 1 << 31
# The interval in which a wait for a response looks if the instance has ended.
_NOTICE_S = 0.1
_LENGTH_BYTES = 4

# The elements of random data that are made at once.
_PIECE = 1 << 18

Respond = Callable[[InferenceRequest, Outcome | None, int], None]
# Makes the data of an input from its datatype, the numbers of its elements and bytes, and random numbers.
Fill = Callable[[int, int, int, np.random.Generator], NDArray[np.uint8]]


class Warmup:
    """The samples of one model version. Any thread may call any method."""

    def __init__(self, model: Model, signature: Signature, states: SequenceStates | None) -> None:
        """Check all samples. `states` are those of the model's queue.

        Raises `InvalidRequest` for data that does not fit, `LoadFailed` for a missing file, or too much data.
        """
        self._model = model
        self._signature = signature
        sequences = model.config.sequence_batching
        controls = [] if sequences is None else [each.name for each in sequences.controls]
        self._states = states
        controls += [state.input_name for state in model.config.states]
        # The control inputs of sequences and their states, with their places behind the inputs that callers give.
        self._controls = {name: len(model.config.inputs) + i for i, name in enumerate(controls)}
        self._samples = model.config.warmup
        self._making = threading.Lock()
        total_bytes = 0
        for sample in self._samples:
            data = self._data(sample, _zeros, total_bytes)
            self._request(data)
            total_bytes += sum(tensor.raw.nbytes for tensor in data.values())
            # Before the next one is made.
            del data

    def route(self, respond: Respond) -> Respond:
        """Return the function that gets all responses of an instance, and passes those of callers to `respond`."""
        if not self._samples:
            return respond

        def routed(request: InferenceRequest, outcome: Outcome | None, flags: int) -> None:
            if type(request.waiter) is _Caller:
                request.waiter.take(outcome, flags)
            else:
                respond(request, outcome, flags)

        return routed

    def run(self, instance: ModelInstance, deadline: float | None) -> None:
        """Execute all samples in an instance that is initialized. Blocks.

        Raises `LoadFailed` for errors that the model answers with. If the instance broke, or the deadline has passed,
        it is not healthy any more.
        """
        for sample in self._samples:
            # Batches that come one after the other reach all objects of a process in turn.
            for iteration in range(1, sample.count * self._model.options.instances_per_process + 1):
                _log.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    self._model.name,
                    instance.name,
                    sample.name,
                    iteration,
                )
                try:
                    errors = _too_many(instance, sample) or self._execute(instance, sample, deadline)
                except (InvalidRequest, LoadFailed):  # a file has changed since the load
                    raise
                except Exception as error:
                    raise _failure(sample, [_broken(instance, error)]) from error
                if errors:
                    raise _failure(sample, errors) from errors[0]

    def _execute(self, instance: ModelInstance, sample: WarmupSample, deadline: float | None) -> list[BaseException]:
        """Execute one batch, wait for all responses, and return the errors among them. Raises what broke the
        instance.
        """
        if deadline is not None and time.monotonic() > deadline:
            raise _TooLong
        is_apart = isinstance(instance.backend, PythonBackend)
        # Others may block, or read their requests until they have answered.
        with self._making if is_apart else contextlib.nullcontext():
            data = self._data(sample, _random)
            # Strings are counted once, not for each request of the batch.
            first = self._request(data)
            requests = [first, *(_again(first) for _ in range(1, sample.batch_size))]
            try:
                result = instance.backend.model_instance_execute(instance, requests)
            except (PeerGone, RemoteProtocolError):
                raise
            except Exception as error:
                return [error]
            if is_apart:
                # The stub has its copy.
                del data
                for request in requests:
                    request.arrays = []
        return _errors_of(result, instance, requests, deadline)

    # Data

    def _data(self, sample: WarmupSample, fill: Fill, others_bytes: int = 0) -> dict[str, WireTensor]:
        """Make the data of a sample. Raises `LoadFailed` if it is too much together with that of others."""
        # The same data each time: a model that fails with it fails again.
        random = np.random.default_rng(0)
        data, total_bytes = {}, others_bytes
        most_bytes = self._model.options.region_limit_bytes
        for given in sample.inputs:
            data[given.name] = tensor = self._tensor(given, random, fill)
            total_bytes += tensor.raw.nbytes
            if most_bytes is not None and total_bytes > most_bytes:
                raise LoadFailed(
                    f"the warmup samples of model '{self._model.name}' up to '{sample.name}' take {total_bytes} bytes "
                    f"or more, and MOONPOOL_REGION_LIMIT_BYTES allows {most_bytes}"
                )
        return data

    def _tensor(self, given: WarmupInput, random: np.random.Generator, fill: Fill) -> WireTensor:
        is_batched = self._model.config.max_batch_size > 0
        shape = (1, *given.dims) if is_batched else given.dims
        code, elements = CODES.get(given.datatype, 0), int(np.prod(given.dims, dtype=np.int64))
        size_bytes = elements * (ITEMSIZE.get(code, 0) or _LENGTH_BYTES)
        if given.source == "input_data_file":
            return WireTensor(code, shape, self._file(given, code, size_bytes))
        if given.source == "zero_data" or code == BYTES:
            return WireTensor(code, shape, np.zeros(size_bytes, np.uint8))
        return WireTensor(code, shape, fill(code, elements, size_bytes, random))

    def _file(self, given: WarmupInput, code: int, size_bytes: int) -> NDArray[np.uint8]:
        folder = self._model.source.model_directory
        path = folder / FOLDER / given.file
        try:
            # The runtime reads it, which may read more than the model may. So no link may lead out of the model's
            # folder.
            limit_bytes = self._model.options.region_limit_bytes or _MOST_BYTES
            data = read_file(path, min(_MOST_BYTES, limit_bytes), [folder])
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise LoadFailed(f"failed to open text file for read {path}: {why}") from error
        if code != BYTES and len(data) < size_bytes:
            raise InvalidRequest(
                f"warmup setting expects {size_bytes} bytes, but the data provided from {given.file} only has "
                f"{len(data)} bytes"
            )
        return np.frombuffer(data if code == BYTES else data[:size_bytes], np.uint8)

    def _request(self, data: dict[str, WireTensor]) -> InferenceRequest:
        """Make one request of a sample. Raises `InvalidRequest`."""
        usual = {name: tensor for name, tensor in data.items() if name not in self._controls}
        request = self._signature.request(usual)
        if self._states is not None:
            # The model gets the values that a sequence has at its start, unless the sample gives others.
            names = [state.input_name for state in self._model.config.states]
            data = {**dict(zip(names, self._states.initial.values, strict=True)), **data}
        if len(usual) < len(data):
            self._add_controls(request, data)
        request.waiter = _Caller()
        return request

    def _add_controls(self, request: InferenceRequest, data: dict[str, WireTensor]) -> None:
        """Add control inputs and states. In other requests, the queue for sequences adds them."""
        shapes = request.shapes
        tensors, arrays = list(shapes.tensors), list(request.arrays)
        for name, place in self._controls.items():
            if name in data:
                tensor = data[name]
                size_bytes = tensor.raw.nbytes
                tensors.append(RequestTensor(place, tensor.datatype, list(tensor.shape), size_bytes))
                arrays.append(tensor.raw)
        request.arrays = arrays
        request.shapes = Shapes(tensors, shapes.batch_size, shapes.signature, is_shared=False)


def _again(request: InferenceRequest) -> InferenceRequest:
    """Return another request with the same data."""
    again = InferenceRequest(list(request.arrays), request.shapes, request.details)
    again.waiter = _Caller()
    return again


def _zeros(_: int, __: int, size_bytes: int, ___: np.random.Generator) -> NDArray[np.uint8]:
    """Stand in for random data while a sample is checked. The kernel gives pages of zeros nobody reads no memory."""
    return np.zeros(size_bytes, np.uint8)


def _random(code: int, elements: int, size_bytes: int, random: np.random.Generator) -> NDArray[np.uint8]:
    dtype, made = DTYPES[code], np.empty(size_bytes, np.uint8)
    values = made.view(np.uint8 if dtype.kind == "b" else dtype)
    # In pieces, as the numbers that they are made of are larger.
    for start in range(0, elements, _PIECE):
        part = values[start : start + _PIECE]
        if dtype.kind == "b":
            part[:] = random.integers(0, 2, len(part), np.uint8)
        elif dtype.kind in "fV":  # numbers, where random bytes would also be NaN and infinities
            part[:] = random.random(len(part)).astype(dtype)
        else:
            part[:] = np.frombuffer(random.bytes(part.nbytes), dtype)
    return made


class _Caller(Waiter):
    """Waits for the responses of one warm-up request that come apart from its batch."""

    __slots__ = ("_error", "_is_over")
    takes_many = True

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_over = threading.Event()

    def take(self, outcome: Outcome | None, flags: int) -> None:
        """Take a response, the flag that no more come, or both. On the reactor's thread."""
        if isinstance(outcome, BaseException) and self._error is None:
            self._error = outcome
        if flags:
            self._is_over.set()

    def wait(self, instance: ModelInstance, deadline: float | None) -> BaseException | None:
        """Wait for the last response. Returns an error among the responses. Raises what broke the instance."""
        while not self._is_over.wait(_NOTICE_S):
            if instance.broken is not None:
                raise instance.broken
            if deadline is not None and time.monotonic() > deadline:
                raise _TooLong
        return self._error


def _too_many(instance: ModelInstance, sample: WarmupSample) -> list[BaseException]:
    """Return an error for each request of a batch that is larger than any that the model takes."""
    most, size = instance.model.config.max_batch_size, sample.batch_size
    if not most or size <= most:
        return []
    what = f"batch size {size} for '{instance.name}', max allowed is {most}"
    return [InvalidRequest(what) for _ in range(size)]


def _errors_of(
    result: Any, instance: ModelInstance, requests: Sequence[InferenceRequest], deadline: float | None
) -> list[BaseException]:
    """Wait for all responses, and return the errors among them. Raises what broke the instance."""
    answers = result if isinstance(result, list) else _answers(result, requests, deadline)
    if len(answers) != len(requests):
        return [BackendError(f"{len(answers)} responses to {len(requests)} requests")]
    errors: list[BaseException] = []
    for request, answer in zip(requests, answers, strict=True):
        outcome: Answer | None = answer
        if answer is LATER and isinstance(request.waiter, _Caller):
            outcome = request.waiter.wait(instance, deadline)
        # A request that is to be scheduled again has warmed up its step.
        if isinstance(outcome, BaseException):
            errors.append(outcome)
    return errors


def _answers(pending: Pending, requests: Sequence[InferenceRequest], deadline: float | None) -> list[Answer]:
    if deadline is not None:
        poll = select.poll()
        poll.register(pending.fileno(), select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 0.999):
            raise _TooLong
    pending.wait()
    return pending.finish(requests)


class _TooLong(Exception):
    """The instance was not warmed up in time."""


def _broken(instance: ModelInstance, error: Exception) -> BaseException:
    """Return the reason for which an instance broke. Ends one that took too long."""
    instance.is_healthy = False
    if isinstance(error, _TooLong):
        limit_s = instance.model.options.load_timeout_s
        what = f"'{instance.name}' took longer than {limit_s:g} s to start and to warm up (MOONPOOL_LOAD_TIMEOUT_S)"
        error = LoadFailed(what, stage="warmup")
        instance.backend.abort(instance, error)
    return instance.backend.explain(instance, error)


def _failure(sample: WarmupSample, errors: Sequence[BaseException]) -> LoadFailed:
    begin = f"failed to run warmup sample '{sample.name}': "
    failure = LoadFailed(begin + "".join(f"{error}; " for error in errors), stage="warmup")
    failure.code = "INVALID_ARG"
    failure.is_confined = any(getattr(error, "is_confined", True) for error in errors)
    public = [getattr(error, "public_message", None) for error in errors]
    if any(public):
        texts = [known or str(error) for known, error in zip(public, errors, strict=True)]
        failure.public_message = begin + "".join(f"{text}; " for text in texts)
    return failure
