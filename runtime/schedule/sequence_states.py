"""The states of sequences: the runtime keeps them between the requests, and gives them to the model as inputs.

Theory of operation. A `State` has the values of all states of one sequence at one moment, and never changes. The queue
for sequences holds the last one of each sequence. A request gets it as inputs when its batch is formed, and notes it
(`InferenceRequest.states`). The response brings the next one: `accept` takes it out of the outputs, checks it and
copies it. Only `SequenceQueue.answered` and `ended` put it in the place of the last one, with the scheduler's lock
held, and only if the instance still has the request. So an instance that dies leaves the state as it was before the
request.

The values lie in memory of the runtime's own. A stub could change what lies in memory that it shares, also after its
answer was checked, and a state must survive its stub.

Bytes are counted before they are taken, and for as long as anything refers to a `State`: its sequence, or a request
that executes with it. One account (`Model.accounts`) counts for all versions of a model, those that are being replaced
among them, and the values at the start too. `accept` runs on the driver's thread or the reactor's, without the
scheduler's lock.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from moonpool.ipc.errors import BadTensor, MoonpoolError, OutOfMemory
from moonpool.ipc.messages import ORDINARY_MEMORY
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, ITEMSIZE, NAMES, check_bytes, code_of
from moonpool.runtime.errors import InvalidRequest, LoadFailed, ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig, SequenceState
from moonpool.runtime.model.config.options import USUAL_STATE_BYTES
from moonpool.runtime.model.request import Details, InferenceRequest, Response, StatesOfRequest, WireTensor
from moonpool.runtime.process.files import read_file
from moonpool.runtime.process.usage import MemoryAccount, MemoryCharge

# The folder of a model in which the files of its initial states lie.
FOLDER = "initial_state"
_MOST_BYTES = 1 << 31
# A string is its length and its bytes.
_LENGTH_BYTES = 4
# About what a value takes beside its bytes: objects, and its shape.
VALUE_BYTES = 512
_A = TypeVar("_A")


class State:
    """The values of all states of a sequence at one moment. Immutable."""

    __slots__ = ("_charge", "key", "values")

    def __init__(self, values: Sequence[WireTensor], charge: MemoryCharge | None = None) -> None:
        self.values = tuple(values)
        self._charge = charge
        # Requests whose states have equal keys can be joined in a batch.
        self.key: Hashable = tuple(value.shape for value in values)

    def blank(self) -> State:
        """Return zeros and empty strings in the same shapes."""
        return State([_zeros(value.datatype, value.shape) for value in self.values])


class RequestStates:
    """The states of a request that executes, or is about to, as `StatesOfRequest` says."""

    __slots__ = ("before", "hidden", "new")

    def __init__(self, before: State, hidden: frozenset[str]) -> None:
        self.before = before
        self.hidden = hidden
        self.new: State | None = None


class SequenceStates:
    """The states of one model version: the value at the start, and the way from a response to the next value."""

    def __init__(
        self, config: ModelConfig, initial: Sequence[WireTensor], limit_bytes: int, account: MemoryAccount
    ) -> None:
        """`initial` has a value for each state of the configuration.

        The limit is for all that `account` counts. Raises `OutOfMemory`.
        """
        self._model = config.name
        self._has_rows = config.max_batch_size > 0
        self._states = config.states
        # The model gives these although the caller does not ask for them.
        self._names = {state.output_name: i for i, state in enumerate(config.states)}
        outputs = [tensor.name for tensor in config.outputs]
        names = outputs + [name for name in self._names if name not in outputs]
        self._numbers = [names.index(name) for name in self._names]
        self._always_hidden = frozenset(name for name in self._names if name not in outputs)
        self.limit_bytes = limit_bytes
        self._account = account
        self.initial = State(initial, self._charge(sum(map(_size_of, initial))))

    @classmethod
    def of(cls, model: Model) -> SequenceStates | None:
        """Make those of a model, None if it has no states. Raises `LoadFailed`, `InvalidRequest`."""
        config = model.config
        if not config.states:
            return None
        limit_bytes = model.options.state_limit_bytes or USUAL_STATE_BYTES
        account = model.accounts.states
        initial: list[WireTensor] = []
        for state in config.states:
            used_bytes = account.used_bytes + sum(map(_size_of, initial))
            initial.append(_initial(state, model, max(0, limit_bytes - used_bytes)))
        try:
            return cls(config, initial, limit_bytes, account)
        except OutOfMemory as error:  # sequences have grown meanwhile
            raise LoadFailed(str(error)) from error

    @property
    def count(self) -> int:
        """The number of states that a sequence has."""
        return len(self._states)

    @property
    def used_bytes(self) -> int:
        """The size of the states of all sequences of the model, and of their values at the start, in all versions."""
        return self._account.used_bytes

    def begin(self, request: InferenceRequest, before: State) -> None:
        """Note the states that a request gets as inputs, and ask the model for the next ones. A second call changes
        them.
        """
        if request.states is None:
            request.states = RequestStates(before, self._prepare(request))
        else:  # it is executed once more
            request.states.before, request.states.new = before, None

    def _prepare(self, request: InferenceRequest) -> frozenset[str]:
        details = request.details or Details()
        hidden = self._always_hidden
        wanted = details.outputs
        if wanted is not None:
            asked = zip(self._names, self._numbers, strict=True)
            hidden = frozenset(name for name, number in asked if number not in wanted)
            wanted = [*wanted, *(each for each in self._numbers if each not in wanted)]
        # A state on a device would be gone with its process.
        request.details = details._replace(outputs=wanted, memory=ORDINARY_MEMORY, device=0)
        return hidden

    def accept(self, request: InferenceRequest, answer: _A) -> _A | MoonpoolError:
        """Take the next states out of a response. Returns what the caller gets: an error if one of them cannot be a
        state.

        A state of which the response has nothing stays as it is. Calling it again for what it returned changes nothing.
        """
        mine = request.states
        if mine is None or not isinstance(answer, Response):
            return answer
        outputs: dict[str, Any] = answer.outputs
        found = {name: outputs[name] for name in self._names if name in outputs}
        if found:
            refusal = self._take(mine, found)
            if refusal is not None:
                return refusal
            for name in mine.hidden:
                outputs.pop(name, None)
        return answer

    def _take(self, mine: StatesOfRequest, found: Mapping[str, Any]) -> MoonpoolError | None:
        values = list((mine.new or mine.before).values)
        sizes = list(map(_size_of, values))
        places = {self._names[name]: output for name, output in found.items()}
        try:
            for place, output in places.items():
                sizes[place] = self._checked(self._states[place], output)
            charge = self._charge(sum(sizes))
            # Only now, as there is room for it.
            for place, output in places.items():
                values[place] = self._copied(self._states[place], output)
            mine.new = State(values, charge)
        except (BadTensor, OutOfMemory) as error:
            return ModelError(str(error), error.code)
        except Exception as error:  # there is no memory, or a backend's object is not a tensor
            return ModelError(f"the states of model '{self._model}' cannot be kept: {error!r}")
        return None

    def _title(self, state: SequenceState) -> str:
        return f"state '{state.output_name}' of model '{self._model}'"

    def _checked(self, state: SequenceState, output: Any) -> int:
        """Return the memory that an output will take as the next value of a state.

        Raises `BadTensor` if it cannot be that.
        """
        datatype = output.datatype if isinstance(output, WireTensor) else code_of(output.dtype)
        title = self._title(state)
        if datatype != CODES[state.datatype]:
            has = NAMES[datatype]
            raise BadTensor(f"{title} has the data-type {has}, and must be {state.datatype}")
        shape = tuple(output.shape)
        wanted = (1, *state.dims) if self._has_rows else state.dims
        if len(shape) != len(wanted) or any(want not in (-1, have) for want, have in zip(wanted, shape, strict=True)):
            raise BadTensor(f"{title} has the shape {list(shape)}, and must have {list(wanted)}")
        if isinstance(output, WireTensor):
            return _size_of(output)
        if datatype == BYTES:
            return VALUE_BYTES + int(output.size) * _LENGTH_BYTES + sum(map(len, output.flat))
        return VALUE_BYTES + int(output.nbytes)

    def _copied(self, state: SequenceState, output: Any) -> WireTensor:
        """Return a copy of an output that was checked. Raises `BadTensor`."""
        datatype, shape, raw = WireTensor.of(output)
        shape = tuple(shape)
        if datatype == BYTES:
            raw = np.array(raw).reshape(-1).view(np.uint8)
            # The copy is checked: the model may still write into what it was made of.
            check_bytes(raw, shape, self._title(state))  # type: ignore[arg-type]
        else:
            flat = np.array(raw, order="C").reshape(-1)
            raw = flat.view(DTYPES[datatype]).reshape(shape)
        return WireTensor(datatype, shape, raw)

    def _charge(self, size_bytes: int) -> MemoryCharge:
        charge = self._account.charge(size_bytes, self.limit_bytes)
        if charge is None:
            raise OutOfMemory(
                f"the states of all sequences of model '{self._model}', in all its versions, would take "
                f"{self._account.used_bytes + size_bytes} bytes, and MOONPOOL_STATE_LIMIT_BYTES allows "
                f"{self.limit_bytes}"
            )
        return charge


def _zeros(datatype: int, shape: tuple[int, ...]) -> WireTensor:
    if datatype == BYTES:
        return WireTensor(datatype, shape, np.zeros(prod(shape) * _LENGTH_BYTES, np.uint8))
    return WireTensor(datatype, shape, np.zeros(shape, DTYPES[datatype]))


def _size_of(value: WireTensor) -> int:
    return VALUE_BYTES + value.raw.nbytes


def _check_initial(state: SequenceState, size_bytes: int, most_bytes: int) -> None:
    if size_bytes > most_bytes:
        raise LoadFailed(
            f"the initial value of state '{state.input_name}' takes {size_bytes} bytes, and MOONPOOL_STATE_LIMIT_BYTES "
            f"leaves {most_bytes} for it"
        )


def _initial(state: SequenceState, model: Model, most_bytes: int) -> WireTensor:
    """Return the value of a state at the start of a sequence, which may take so much memory. Raises `LoadFailed`,
    `InvalidRequest`.
    """
    code = CODES[state.datatype]
    has_rows = model.config.max_batch_size > 0
    shape = (1, *state.initial_dims) if has_rows else state.initial_dims
    # Before anything is allocated.
    least_bytes = prod(shape) * (ITEMSIZE.get(code) or _LENGTH_BYTES)
    _check_initial(state, VALUE_BYTES + least_bytes, most_bytes)
    if not state.file:
        return _zeros(code, shape)
    folder = model.source.model_directory
    path = folder / FOLDER / state.file
    try:
        # The runtime reads it, which may read more than the model may. So no link may lead out of the model's folder.
        data = read_file(path, min(_MOST_BYTES, most_bytes), [folder])
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            why = f"{why}, and MOONPOOL_STATE_LIMIT_BYTES leaves no more for it"
        raise LoadFailed(f"failed to open text file for read {path}: {why}") from error
    if code == BYTES:
        raw = np.frombuffer(data, np.uint8)
        try:
            check_bytes(raw, shape, f"initial_state of state '{state.input_name}'")  # type: ignore[arg-type]
        except BadTensor as error:
            raise InvalidRequest(str(error)) from error
        return WireTensor(code, shape, raw)
    size_bytes = prod(shape) * ITEMSIZE[code]
    if len(data) < size_bytes:
        raise InvalidRequest(
            f"initial_state setting expects {size_bytes} bytes, but the data provided from {state.file} only has "
            f"{len(data)} bytes."
        )
    values = np.frombuffer(data[:size_bytes], DTYPES[code]).reshape(shape)
    return WireTensor(code, shape, values)
