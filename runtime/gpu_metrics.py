"""What Triton tells of the machine's GPUs, from the library of their driver; nothing where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Any

from moonpool.runtime.exposition import Family, Sample

if TYPE_CHECKING:
    from collections.abc import Callable

_UUID_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


# Name, type, description; the function that answers, what it fills in, and the value in that.
_FAMILIES: list[tuple[str, str, str, str, type[Any], Callable[[Any], float]]] = [
    (
        "nv_gpu_utilization",
        "gauge",
        "GPU utilization rate [0.0 - 1.0)",
        "nvmlDeviceGetUtilizationRates",
        _Utilization,
        lambda answer: answer.gpu / 100,
    ),
    (
        "nv_gpu_memory_total_bytes",
        "gauge",
        "GPU total memory, in bytes",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda answer: answer.total,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "gauge",
        "GPU used memory, in bytes",
        "nvmlDeviceGetMemoryInfo",
        _Memory,
        lambda answer: answer.used,
    ),
    (
        "nv_gpu_power_usage",
        "gauge",
        "GPU power usage in watts",
        "nvmlDeviceGetPowerUsage",
        ctypes.c_uint,
        lambda answer: answer.value / 1000,
    ),
    (
        "nv_gpu_power_limit",
        "gauge",
        "GPU power management limit in watts",
        "nvmlDeviceGetEnforcedPowerLimit",
        ctypes.c_uint,
        lambda answer: answer.value / 1000,
    ),
    (
        "nv_energy_consumption",
        "counter",
        "GPU energy consumption in joules since the Triton Server started",
        "nvmlDeviceGetTotalEnergyConsumption",
        ctypes.c_ulonglong,
        lambda answer: answer.value / 1000,
    ),
]
NAMES = tuple(family[0] for family in _FAMILIES)
_ENERGY = "nv_energy_consumption"


class GpuMetrics:
    """The GPUs that the driver knows of. Any thread may call any method."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        """Where the library is not there, or does not answer, there are no GPUs."""
        self._lock = threading.Lock()
        self._library: Any = None
        self._gpus: dict[str, ctypes.c_void_p] = {}
        with contextlib.suppress(OSError, AttributeError):
            self._open(ctypes.CDLL(library))
        # Joules that were consumed before.
        _, _, _, function, answer, value_in = _FAMILIES[-1]
        self._before = dict(self._values(function, answer, value_in))

    def _open(self, library: Any) -> None:
        if library.nvmlInit_v2():
            return
        self._library = library
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle = ctypes.c_void_p()
            uuid = ctypes.create_string_buffer(_UUID_BYTES)
            if not library.nvmlDeviceGetHandleByIndex_v2(
                index, ctypes.byref(handle)
            ) and not library.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES):
                self._gpus[uuid.value.decode("ascii", "replace")] = handle

    def _values(
        self, function: str, kind: type[Any], value_in: Callable[[Any], float]
    ) -> list[tuple[str, float]]:
        """Of the GPUs that know it."""
        values = []
        for uuid, handle in self._gpus.items():
            answer = kind()
            with contextlib.suppress(AttributeError):  # a library that is older than the function
                if not getattr(self._library, function)(handle, ctypes.byref(answer)):
                    values.append((uuid, value_in(answer)))
        return values

    def families(self) -> list[Family]:
        """As they are now."""
        with self._lock:
            families = []
            for name, kind, text, function, answer, value_in in _FAMILIES:
                samples = []
                for uuid, value in self._values(function, answer, value_in):
                    before = self._before.get(uuid, 0.0) if name == _ENERGY else 0.0
                    samples.append(Sample("", (("gpu_uuid", uuid),), value - before))
                families.append(Family(name, text, kind, samples))
            return families

    def close(self) -> None:
        """Let go of the library; there are no GPUs any more."""
        with self._lock:
            library, self._library, self._gpus = self._library, None, {}
            if library is not None:
                library.nvmlShutdown()
