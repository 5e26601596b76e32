"""Where a client, or a model that asks another one, would like the outputs of its request."""

from __future__ import annotations

from moonpool.ipc.messages import ANY_MEMORY, DEVICE_MEMORY, NO_DEVICE, ORDINARY_MEMORY
from moonpool.stub.constants import Constant
from moonpool.stub.errors import bad_arguments


class MemoryType(Constant):
    """Ordinary memory or a GPU's."""

    __module__ = "c_python_backend_utils"

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """A wish, and no more: outputs come in ordinary memory where a GPU's has no room for them."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        given: tuple[object, object] = (preferred_memory_type, preferred_device_id)
        if not isinstance(given[0], MemoryType) or not isinstance(given[1], int):
            raise bad_arguments(
                "PreferredMemory",
                "preferred_memory_type: MemoryType, preferred_device_id: int = 0",
                *given,
            )
        self._memory_type = preferred_memory_type
        self._device_id = preferred_device_id

    @property
    def is_ordinary(self) -> bool:
        """Whether it is no GPU's memory."""
        return self._memory_type is MemoryType.TRITONSERVER_MEMORY_CPU

    @property
    def device(self) -> int:
        """The number of the GPU; NO_DEVICE for ordinary memory."""
        return NO_DEVICE if self.is_ordinary else self._device_id

    def as_sent(self) -> tuple[int, int]:
        """The fields `memory` and `device` of the details of a request."""
        return (ORDINARY_MEMORY, 0) if self.is_ordinary else (DEVICE_MEMORY, self._device_id)


ORDINARY = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)


def preferred(memory: int, device: int) -> PreferredMemory | None:
    """What the fields of a message say; None: wherever the model leaves its outputs."""
    if memory == ANY_MEMORY:
        return None
    if memory == DEVICE_MEMORY:
        return PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, device)
    return ORDINARY
