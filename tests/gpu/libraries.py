"""PyTorch and CuPy, as tests use them on a card: in the same words."""

from __future__ import annotations

import importlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

# A stream is busy for so long that a reader that does not wait for it is too early.
SLOW_CYCLES = 1_000_000_000


def imported(name: str) -> Any:
    """The package; skips where it is missing. It may warn as it likes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}")


class Torch:
    """Arrays are `torch.Tensor`s on device 0."""

    name = "torch"

    def __init__(self) -> None:
        self._torch = imported("torch")
        if not self._torch.cuda.is_available():
            pytest.skip("this PyTorch cannot use the GPU")
        # These streams must live as long as any array that was read on them.
        self._streams = [self._torch.cuda.Stream(), self._torch.cuda.Stream()]

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        """Meanwhile work goes to one of two streams that wait for no other one."""
        context: AbstractContextManager[object] = self._torch.cuda.stream(self._streams[number])
        return context

    def array(self, values: NDArray[np.float32]) -> Any:
        """Return an array of these values in the library's own device memory."""
        return self._torch.tensor(values, device="cuda:0")

    def take(self, array: object) -> Any:
        """Without a copy."""
        return self._torch.from_dlpack(array)

    def fill(self, array: Any, value: float) -> None:
        """Queue it, on the current stream."""
        array.fill_(value)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def values(self, array: Any) -> NDArray[np.float32]:
        """Return the array's values as the current stream sees them. Waits for the stream."""
        found: NDArray[np.float32] = array.cpu().numpy()
        return found

    def be_slow(self) -> None:
        """Keep the current stream busy for some tenths of a second."""
        self._torch.cuda._sleep(SLOW_CYCLES)

    def is_busy(self) -> bool:
        """Return true if the current stream still has work to do."""
        return not self._torch.cuda.current_stream().query()


class Cupy:
    """Arrays are `cupy.ndarray`s on device 0."""

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = imported("cupy")
        try:
            self._cupy.zeros(1)
        except Exception as error:
            pytest.skip(f"this CuPy cannot use the GPU: {error}")
        self._streams = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        source = (
            'extern "C" __global__ void spin(long long cycles) '
            "{ long long start = clock64(); while (clock64() - start < cycles) {} }"
        )
        self._spin = self._cupy.RawKernel(source, "spin")

    def on_stream(self, number: int) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self._streams[number]
        return stream

    def array(self, values: NDArray[np.float32]) -> Any:
        return self._cupy.asarray(values)

    def take(self, array: object) -> Any:
        return self._cupy.from_dlpack(array)

    def fill(self, array: Any, value: float) -> None:
        array.fill(value)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def values(self, array: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._cupy.asnumpy(array)
        return found

    def be_slow(self) -> None:
        self._spin((1,), (1,), (np.int64(SLOW_CYCLES),))

    def is_busy(self) -> bool:
        return not self._cupy.cuda.get_current_stream().done


Library = Torch | Cupy


def warmed(library: Library) -> Library:
    """After each of its functions was used once: a library makes and loads its kernels when it first needs them."""
    for number in (0, 1):
        with library.on_stream(number):
            array = library.take(library.array(np.zeros(4, np.float32)))
            library.fill(array, 1)
            library.be_slow()
            library.is_busy()
            assert library.values(array).tolist() == [1] * 4
    return library
