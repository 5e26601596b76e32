"""Which GPUs there are for instances, and which models get one."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING
from uuid import UUID

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import is_contained

if TYPE_CHECKING:
    from moonpool.runtime.backend import Model
    from moonpool.runtime.config import ModelConfig

_BUS_ID_BYTES = 32


@functools.lru_cache(maxsize=1)
def usable_gpus() -> tuple[tuple[int, ...], str]:
    """The numbers that CUDA gives to the GPUs which this process may use, and why there are none.

    The driver is asked once, when a model is loaded that may have a GPU: from then on CUDA cannot be used in forks
    of this process. No context is made. Any thread may call it.
    """
    from moonpool.ipc.cuda.driver import load

    count = ctypes.c_int()
    try:
        load().cuDeviceGetCount(ctypes.byref(count))
    except MoonpoolError as error:  # CudaUnavailable, as a rule
        return (), str(error)
    return tuple(range(count.value)), ""


def bus_id(gpu: int) -> str:
    """Where a GPU is plugged in, such as `0000:3b:00.0`. Raises `CudaError`."""
    from moonpool.ipc.cuda.driver import load

    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    load().cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, gpu)
    return text.value.decode("ascii").lower()


def uuid(gpu: int) -> str:
    """The name of a GPU that `CUDA_VISIBLE_DEVICES` takes. Raises `CudaError`."""
    from moonpool.ipc.cuda.driver import load

    raw = (ctypes.c_ubyte * 16)()
    load().cuDeviceGetUuid_v2(raw, gpu)
    return f"GPU-{UUID(bytes=bytes(raw))}"


def placed(model: Model) -> ModelConfig:
    """The configuration of a model with its instance groups placed, as Triton places them. Raises `ConfigError`.

    Where a configuration names no kind, two sorts of models stay on the CPU: what is contained gets the driver of a
    GPU only by name, and what is forked after `initialize` could not use it.
    """
    config, options = model.config, model.options
    kinds = {group.kind for group in config.instance_groups}
    stays = is_contained(options.sandbox) or options.prefork == "initialize"
    if "GPU" not in kinds and (stays or "AUTO" not in kinds):
        return config.placed(())
    present, why_none = usable_gpus()
    return config.placed(present, why_none)
