"""Defines tensors, the named arrays that go into a model and come out of it, and the memory that they are wanted in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memory import Lease, lease_of, offset_in
from moonpool.ipc.messages import ANY_MEMORY, DEVICE_MEMORY, NO_DEVICE, ORDINARY_MEMORY
from moonpool.ipc.tensors import BF16, BYTES, CODE_OF, code_of, decode_bytes, encode_bytes
from moonpool.stub.attributes import TensorBase
from moonpool.stub.pb_utils.errors import Constant, TritonModelException, as_text, bad_arguments

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.region import DeviceLease


class MemoryType(Constant):
    """Tells ordinary memory and the memory of a GPU apart."""

    __module__ = "c_python_backend_utils"

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """Names the memory in which a request wants its outputs. If a GPU has no room, they come in ordinary memory."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        given: tuple[object, object] = (preferred_memory_type, preferred_device_id)
        if not isinstance(given[0], MemoryType) or not isinstance(given[1], int):
            raise bad_arguments(
                "PreferredMemory", "preferred_memory_type: MemoryType, preferred_device_id: int = 0", *given
            )
        self._memory_type = preferred_memory_type
        self._device_id = preferred_device_id

    @property
    def is_ordinary(self) -> bool:
        """Return whether this is ordinary memory."""
        return self._memory_type is MemoryType.TRITONSERVER_MEMORY_CPU

    @property
    def device(self) -> int:
        """Return the number of the GPU, NO_DEVICE for ordinary memory."""
        return NO_DEVICE if self.is_ordinary else self._device_id

    def as_sent(self) -> tuple[int, int]:
        """Return the fields `memory` and `device` of the details of a request."""
        return (ORDINARY_MEMORY, 0) if self.is_ordinary else (DEVICE_MEMORY, self._device_id)


ORDINARY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)


def preferred(memory: int, device: int) -> PreferredMemory | None:
    """Read the fields `memory` and `device` of a message. None leaves the choice to the model."""
    if memory == ANY_MEMORY:
        return None
    if memory == DEVICE_MEMORY:
        return PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, device)
    return ORDINARY


_new: Any = TensorBase.__new__
BF16_TO_NUMPY = "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."

_UNSUPPORTED = "NumPy dtype is not supported."


class Tensor(TensorBase):
    """Is a tensor of a request or of a response: a name and a numpy array.

    The array is kept without a copy, unless it is not contiguous. The response is sent with the contents that the array
    has at that moment. The array of an input lies in memory shared with the runtime. A model may write to it, and it
    stays valid as long as anything refers to it.
    """

    __module__ = "c_python_backend_utils"
    # _array is the C-contiguous typed array to send. For BYTES and BF16 it is None, and _wire holds the raw bytes.
    # _strings is a BYTES tensor as the model sees it; other tensors have none.
    __slots__ = ("__weakref__",)

    _name: str
    _datatype: int
    _shape: Sequence[int]
    _array: NDArray[np.generic] | None
    _wire: NDArray[np.uint8] | None
    _strings: NDArray[np.generic] | None
    # True for a `DeviceTensor`.
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
    def from_wire(cls, name: str, datatype: int, shape: Sequence[int], buffer: NDArray[np.generic]) -> Tensor:
        """Make a tensor over memory that came from the runtime. Nothing is checked or copied.

        `buffer` is the typed view in its shape; for BYTES and BF16 it is the raw bytes.
        """
        tensor: Tensor = _new(cls)
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
        """Return whether the tensor is in ordinary memory, not in that of a GPU."""
        return True

    def triton_dtype(self) -> int:
        """Return the datatype as `triton_to_numpy_type` takes it."""
        return self._datatype

    def as_numpy(self) -> NDArray[Any]:
        """Return the same array at each call: a writable view, or for BYTES an object array of bytes."""
        if self._array is not None:
            return self._array
        if self._strings is None:
            self._strings = self._decoded()
        return self._strings

    # For moonpool's own models.
    _as_array = as_numpy

    def to_dlpack(self) -> CapsuleType:
        """Return a DLPack capsule over the tensor's own memory, which the capsule keeps alive."""
        from moonpool.stub.pb_utils import dlpack

        return dlpack.export(self._datatype, self._array, self._wire, self._shape)

    @staticmethod
    def from_dlpack(name: str, tensor: object, /) -> Tensor:
        """Return a tensor over the memory of a DLPack capsule, or of an object that can give one.

        That memory may be a GPU's. If the object is still being computed there, the GPU waits for that stream.
        """
        from moonpool.stub.pb_utils import dlpack

        found = dlpack.load(name, tensor)
        if isinstance(found, dlpack.OnDevice):
            from moonpool.stub.pb_utils.device_tensor import from_device

            return from_device(*found, dlpack.checked)
        return Tensor.from_wire(*found)

    def __dlpack__(
        self,
        stream: object = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Return a capsule by the array API's standard. In ordinary memory there is no stream to wait for."""
        from moonpool.stub.pb_utils import dlpack

        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"The tensor is in ordinary memory and not on device {dl_device}.")
        return dlpack.export(self._datatype, self._array, self._wire, self._shape, max_version, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name for ordinary memory."""
        return (1, 0)

    # Its place in memory, for the code that sends it

    @property
    def _data(self) -> Any:
        """Return the array of its bytes, of numpy's or a `DeviceArray`."""
        return self._array if self._wire is None else self._wire

    def _lease(self) -> Lease | DeviceLease | None:
        """Return the block in which it lies, if any."""
        return lease_of(self._data)

    def _offset_in(self, lease: Any) -> int:
        """Return its offset in the block."""
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
