"""A runtime with a device, in this process and in its stubs: on the fake driver, and where there is one on the card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import MODELS
from tests.gpu.cards import Fake, card, fake, fake_library
from tests.inside import hosted_in

import moonpool
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.runtime.model import gpus
from moonpool.runtime.stubs.allotment import next_number

__all__ = ["card", "fake", "fake_library"]

MODEL = MODELS / "on_device.py"


def on_host(array: DeviceArray | NDArray[Any]) -> NDArray[Any]:
    """The values, wherever they lie."""
    return array.to_host() if isinstance(array, DeviceArray) else array


class Host:
    """Loads the model of these tests under any name, and sends it requests."""

    def __init__(self) -> None:
        self.runtime = moonpool.Runtime()

    def load(self, name: str = "m", *, kind: str = "GPU", count: int = 1, batch: int = 0, **options: str) -> None:
        """Under this name. `options` are parameters without their prefix; `batch` rows are waited for."""
        parameters = {f"MOONPOOL_{key}": value for key, value in options.items()}
        force = parameters.pop("MOONPOOL_FORCE_CPU", "no")
        parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] = force
        parameters.setdefault("MOONPOOL_GPU_AS_NUMPY", "copy")
        # These variables set how the fake driver behaves in the stubs.
        parameters["MOONPOOL_ENVIRONMENT"] = "FAKE_*"
        x = {"data_type": "TYPE_FP32", "dims": [-1]}
        batching = {"preferred_batch_size": [batch], "max_queue_delay_microseconds": 30_000_000}
        config = {
            "input": [{"name": "X", **x}, {"name": "HOW", "data_type": "TYPE_STRING", "dims": [1], "optional": True}],
            "output": [{"name": "Y", **x}, {"name": "ON_CPU", "data_type": "TYPE_BOOL", "dims": [1]}],
            "instance_group": [{"kind": f"KIND_{kind}", "count": count}],
            "max_batch_size": batch,
            **({"dynamic_batching": batching} if batch else {}),
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        }
        self.runtime.load(name, MODEL, config=config)

    def on_device(self, values: NDArray[np.float32], model: str = "m") -> DeviceArray:
        """These values in the runtime's own memory on the device."""
        array = self.runtime.empty(model, "X", values.shape, device=0)
        array.settle()
        array.device.write(array.address, values)
        return array

    def memory_used(self, model: str = "m") -> int:
        """Blocks that callers have on the device."""
        hosted = hosted_in(self.runtime, model, None)
        memory = hosted.model.state.caller_memory.on_device(0)
        memory.empty((1,), 11, 4)
        return len(list(memory._arena.blocks())) - 1

    def infer(self, x: object, how: str = "pass", model: str = "m", **options: Any) -> Any:
        """Return the model's output, and true if it received X in ordinary memory."""
        inputs = {"X": x, "HOW": np.array([how.encode()], object)}
        outputs = self.runtime.infer(model, inputs, timeout_s=60, **options)
        return outputs["Y"], bool(on_host(outputs["ON_CPU"])[0])


class FakeHost(Host):
    """One whose device is the fake one."""

    def __init__(self, fake: Fake) -> None:
        super().__init__()
        self.fake = fake


AnyHost = TypeVar("AnyHost", bound=Host)


@contextmanager
def closing(make: Callable[[], AnyHost]) -> Iterator[AnyHost]:
    """Make a host that uses the driver on the library path, and close it at the end."""
    gpus.usable_gpus.cache_clear()
    host = make()
    try:
        yield host
    finally:
        host.runtime.close()
        # Unreferenced memory must be freed before the device is waited for.
        del host.runtime
        gc.collect()
        gpus.usable_gpus.cache_clear()


@pytest.fixture
def fake_host(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    """A host with the fake device, in this process and in others. Its work is done at once."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake.library.parent))
    with closing(lambda: FakeHost(fake)) as host:
        yield host


@pytest.fixture
def card_host(card: None) -> Iterator[Host]:  # noqa: ARG001 - it drives the device
    """A host with the machine's own GPU."""
    with closing(Host) as host:
        yield host


@pytest.fixture(params=["fake_host", pytest.param("card_host", marks=pytest.mark.gpu)])
def host(request: pytest.FixtureRequest) -> Host:
    """A host with a device: the fake one, or the machine's own where it has one."""
    found: Host = request.getfixturevalue(request.param)
    return found


class Foreign:
    """An array of somebody else's library, in memory of his own on the device."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        where = device(0)
        self._region = DeviceRegion.create(next_number(), where.rounded(values.nbytes), where)
        self._region.forget_fd()
        # The copy is as late as the fake driver is, so a consumer of the array has to wait for the stream.
        with where:
            source = values.__array_interface__["data"][0]
            where.driver.cuMemcpyHtoDAsync_v2(self._region.address, source, values.nbytes, 1)
        self._shape, self._size_bytes = values.shape, values.nbytes

    def overwrite(self) -> None:
        """Queue what changes all of it, on the stream that it is worked with."""
        with device(0) as where:
            where.driver.cuMemsetD8Async(self._region.address, 0xFF, self._size_bytes, 1)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._shape,
            "typestr": "<f4",
            "data": (self._region.address, False),
            "strides": None,
            "version": 3,
            "stream": 1,
        }
