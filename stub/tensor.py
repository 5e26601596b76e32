"""A named array on its way into a model or out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes, encode_bytes
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memory import lease_of, offset_in
from moonpool.ipc.tensors import BF16, BYTES, CODE_OF, code_of
from moonpool.stub.errors import TritonModelException, as_text, bad_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.ipc.memory import Lease

_new = object.__new__
BF16_TO_NUMPY = (
    "Tensor dtype is BF16 and cannot be converted to NumPy. "
    "Use to_dlpack() and from_dlpack() instead."
)

_UNSUPPORTED = "NumPy dtype is not supported."


class Tensor:
    """A tensor of a request or of a response: a name and a numpy array.

    The array is kept, not copied, unless it has to be made contiguous; what it holds when the
    response is sent is what is sent. An input's array lies in memory shared with the runtime: it
    may be written to, and it stays valid for as long as anything refers to it.
    """

    __module__ = "c_python_backend_utils"
    # _array is what to send, as a C-contiguous typed array; for BYTES and BF16 it is None and
    # _wire holds the raw bytes. _strings is a BYTES tensor as its user sees it; the others have none.
    __slots__ = ("__weakref__", "_array", "_datatype", "_name", "_shape", "_strings", "_wire")

    _name: str
    _datatype: int
    _shape: Sequence[int]
    _array: NDArray[np.generic] | None
    _wire: NDArray[np.uint8] | None
    _strings: NDArray[np.generic] | None
    # Whether it is a `DeviceTensor`.
    _is_on_device = False

    def __init__(self, name: str, array: NDArray[np.generic], /) -> None:
        if type(name) is not str or not name or not isinstance(array, np.ndarray):
            name = _name_of(name, array)
        datatype = CODE_OF.get(array.dtype) or _rare_code_of(array)
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        self._name = name
        self._datatype = datatype
        self._shape = array.shape
        if datatype < BYTES:
            self._array = array
            self._wire = None
        elif datatype == BYTES:
            self._array = None
            self._strings = array
            self._wire = _encoded(array, name)
        else:
            raise TritonModelException(_UNSUPPORTED)

    @classmethod
    def from_wire(
        cls, name: str, datatype: int, shape: Sequence[int], buffer: NDArray[np.generic]
    ) -> Tensor:
        """A tensor over memory that came from the runtime; nothing is checked or copied.

        `buffer` is the typed view in its shape, or for BYTES and BF16 the raw bytes.
        """
        tensor = _new(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = shape
        if datatype < BYTES:
            tensor._array = buffer
            tensor._wire = None
        else:
            tensor._array = tensor._strings = None
            tensor._wire = buffer  # type: ignore[assignment]
        return tensor

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._shape)

    def is_cpu(self) -> bool:
        """Whether the tensor is in ordinary memory, and not in a GPU's."""
        return True

    def triton_dtype(self) -> int:
        """The datatype as `triton_to_numpy_type` takes it."""
        return self._datatype

    def as_numpy(self) -> NDArray[Any]:
        """The same array at each call: a writable view, or for BYTES an object array of bytes."""
        if self._array is not None:
            return self._array
        if self._strings is None:
            self._strings = self._decoded()
        return self._strings

    # What moonpool's own models get.
    _as_array = as_numpy

    def to_dlpack(self) -> CapsuleType:
        """A DLPack capsule over the tensor's own memory, which it keeps alive."""
        from moonpool.stub import dlpack

        return dlpack.export(self)

    @staticmethod
    def from_dlpack(name: str, tensor: object, /) -> Tensor:
        """A tensor over the memory of a DLPack capsule, or of an object that can give one.

        That may be a GPU's. A stream on which the object is still being computed is waited for, on the GPU.
        """
        from moonpool.stub import dlpack

        return dlpack.load(name, tensor)

    def __dlpack__(
        self,
        stream: object = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """As the array API's standard has it; there is no stream to wait for in ordinary memory."""
        from moonpool.stub import dlpack

        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"The tensor is in ordinary memory and not on device {dl_device}.")
        return dlpack.export(self, max_version, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's name for ordinary memory."""
        return (1, 0)

    # Where it is, for whoever sends it

    @property
    def _data(self) -> Any:
        """What holds its bytes: an array of numpy's, or a `DeviceArray`."""
        return self._array if self._wire is None else self._wire

    def _lease(self) -> Lease | DeviceLease | None:
        """The block that it lies in, if it does in one."""
        return lease_of(self._data)

    def _offset_in(self, lease: Any) -> int:
        """Where in its block it begins."""
        return offset_in(lease, self._data)

    def __repr__(self) -> str:
        return f"<Tensor {self._name!r}, datatype {self._datatype}, shape {self.shape()}>"

    def _decoded(self) -> NDArray[np.generic]:
        if self._datatype == BF16 or self._wire is None:
            raise TritonModelException(BF16_TO_NUMPY)
        try:
            return decode_bytes(self._wire.data, self._shape, self._name)
        except BadTensor as error:
            raise TritonModelException(str(error)) from None


def _name_of(name: object, array: object) -> str:
    if not isinstance(name, (str, bytes)) or not isinstance(array, np.ndarray):
        raise bad_arguments("Tensor", "arg0: str, arg1: numpy.ndarray", name, array)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return as_text(name)


def _rare_code_of(array: NDArray[np.generic]) -> int:
    try:
        return code_of(array.dtype)
    except BadTensor:
        raise TritonModelException(_UNSUPPORTED) from None


def _encoded(array: NDArray[np.generic], name: str) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(encode_bytes(array, name), np.uint8)  # type: ignore[arg-type]
    except BadTensor as error:
        raise TritonModelException(str(error)) from error
