"""Tests moonpool's own models with arrays on a device: as arguments, in batches, and as results."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake, fake, fake_library
from tests.stub.devices.device_peer import Peer, floats, foreign, peer

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub import pb_utils
from moonpool.stub.native.model import NativeAdapter
from moonpool.stub.pb_utils.device_tensor import DeviceTensor
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.testing.outputs import copied

__all__ = ["fake", "fake_library", "peer"]


def adapter(model: Any, *, dims: list[int], output: list[int] | None = None) -> NativeAdapter:
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": dims}
    made = {"name": "y", "data_type": "TYPE_FP32", "dims": output or dims}
    config = {"name": "m", "max_batch_size": 8, "input": [tensor], "output": [made]}
    return NativeAdapter(model, config)


class Passes:
    """Returns its arguments, and records them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, x):  # type: ignore[no-untyped-def] # a hint would be moonpool's
        self.seen.append(x)
        return x


def request(array: Any) -> InferenceRequest:
    is_numpy = isinstance(array, np.ndarray)
    tensor = Tensor("x", array) if is_numpy else DeviceTensor.over("x", array)
    return InferenceRequest.from_wire(NO_DETAILS, (), [tensor])


def in_one_block(*rows: list[float]) -> list[DeviceArray]:
    """Make arrays of one row each, back to back."""
    values = np.array(rows, np.float32)
    place = pb_utils.empty(values.shape, np.float32, device=0)
    place.lease.region.write(place.lease.offset, values)  # type: ignore[union-attr]
    size = values[0].nbytes
    return [place.part(i * size, (1, *values.shape[1:])) for i in range(len(rows))]


def results(responses: Any) -> list[Any]:
    return [copied(each.output_tensors()[0]).tolist() for each in responses]


@pytest.mark.promise(
    "Device memory in a model",
    "moonpool's own models get and return arrays on a device; rows of a batch that lie together "
    "there are joined and cut without a copy.",
)
@pytest.mark.usefixtures("peer")
def test_a_model_gets_an_array_on_the_device_and_may_return_it() -> None:
    passes = Passes()
    responses = adapter(passes, dims=[2]).execute([request(foreign(floats(1, 2).reshape(1, 2)))])
    assert isinstance(passes.seen[0], DeviceArray)
    assert not responses[0].output_tensors()[0].is_cpu()
    assert results(responses) == [[[1, 2]]]


@pytest.mark.promise("Device memory in a model", "moonpool's own models get and return …")
@pytest.mark.usefixtures("peer")
def test_rows_that_lie_together_on_a_device_are_joined_and_cut_without_a_copy(fake: Fake) -> None:
    parts = in_one_block([1, 2], [3, 4], [5, 6])
    before = fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")
    model = adapter(lambda x: x, dims=[2])
    responses = model.execute([request(part) for part in parts])
    assert (fake.calls("cuMemcpyAsync"), fake.calls("cuMemcpyDtoDAsync_v2")) == before
    assert results(responses) == [[[1, 2]], [[3, 4]], [[5, 6]]]


@pytest.mark.promise("Device memory in a model", "moonpool's own models get and return …")
@pytest.mark.usefixtures("peer")
def test_rows_that_lie_apart_on_a_device_are_joined_there() -> None:
    passes = Passes()
    model = adapter(passes, dims=[2])
    arrays = [foreign(floats(i, i).reshape(1, 2)) for i in range(3)]
    assert results(model.execute([request(array) for array in arrays])) == [[[0, 0]], [[1, 1]], [[2, 2]]]
    assert [array.shape for array in passes.seen] == [(3, 2)]


@pytest.mark.usefixtures("peer")
def test_requests_in_different_memories_are_called_for_apart() -> None:
    passes = Passes()
    model = adapter(passes, dims=[2])
    row = floats(1, 2).reshape(1, 2)
    assert results(model.execute([request(row), request(foreign(row))])) == [[[1, 2]], [[1, 2]]]
    assert [type(array) for array in passes.seen] == [np.ndarray, DeviceArray]


@pytest.mark.usefixtures("peer")
def test_outputs_on_a_device_are_compared_with_the_configuration() -> None:
    model = adapter(lambda x: foreign(floats(1, 2, 3).reshape(1, 3)), dims=[2])  # noqa: ARG005
    with pytest.raises(InvalidReturn, match=re.escape("of shape [1, 3]")):
        model.execute([request(floats(1, 2).reshape(1, 2))])


def test_a_device_that_is_not_there_is_told(peer: Peer) -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 9)

    model = adapter(lambda x: Elsewhere(), dims=[2])  # noqa: ARG005
    with pytest.raises(InvalidReturn, match="device 9 cannot be used"):
        model.execute([request(floats(1, 2).reshape(1, 2))])
    assert peer.heard == []
