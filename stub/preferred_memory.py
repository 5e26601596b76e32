"""Where a model would like the outputs of a request that it sends to another model."""

from __future__ import annotations

from moonpool.stub.constants import Constant
from moonpool.stub.errors import bad_arguments


class MemoryType(Constant):
    """Ordinary memory or a GPU's."""

    __module__ = "c_python_backend_utils"

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


class PreferredMemory:
    """A wish, and no more: outputs come in ordinary memory where it cannot be met."""

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
