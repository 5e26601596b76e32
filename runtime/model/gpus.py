"""Finds the GPUs that instances may use, and places instance groups on them."""

from __future__ import annotations

import ctypes
import functools
from uuid import UUID

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import is_contained
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig

_log = RuntimeLog("moonpool")
# Shown wherever a user meets GPUs, until the tests and figures of a card are in docs/GPU.md.
EXPERIMENTAL = "Support for GPUs is experimental: it was tried on a fake driver and never on a card (docs/GPU.md)."
_BUS_ID_BYTES = 32


@functools.lru_cache(maxsize=1)
def usable_gpus() -> tuple[tuple[int, ...], str]:
    """Return CUDA's numbers of the GPUs which this process may use, and the reason if there are none.

    The driver is asked once, when a model is loaded that may have a GPU, because from then on CUDA cannot be used in
    forks of this process. No context is made. Any thread may call it.
    """
    from moonpool.ipc.cuda.driver import load

    count = ctypes.c_int()
    try:
        load().cuDeviceGetCount(ctypes.byref(count))
    except MoonpoolError as error:  # CudaUnavailable, as a rule
        return (), str(error)
    return tuple(range(count.value)), ""


def bus_id(gpu: int) -> str:
    """Return the address of a GPU on the PCI bus, such as `0000:3b:00.0`. Raises `CudaError`."""
    from moonpool.ipc.cuda.driver import load

    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    load().cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, gpu)
    return text.value.decode("ascii").lower()


def uuid(gpu: int) -> str:
    """Return the name of a GPU for `CUDA_VISIBLE_DEVICES`. Raises `CudaError`."""
    from moonpool.ipc.cuda.driver import load

    raw = (ctypes.c_ubyte * 16)()
    load().cuDeviceGetUuid_v2(raw, gpu)
    return f"GPU-{UUID(bytes=bytes(raw))}"


def placed(model: Model) -> ModelConfig:
    """Return the configuration of a model with its instance groups placed as Triton does it. Raises `ConfigError`.

    If a configuration names no kind, two sorts of models stay on the CPU: a contained model gets the driver of a GPU
    only if it names the kind, and a model that is forked after `initialize` could not use it.
    """
    config, options = model.config, model.options
    kinds = {group.kind for group in config.instance_groups}
    stays = is_contained(options.sandbox) or options.prefork == "initialize"
    if "GPU" not in kinds and (stays or "AUTO" not in kinds):
        return config.placed(())
    present, why_none = usable_gpus()
    config = config.placed(present, why_none)
    if config.uses_gpu:
        _warn()
    return config


@functools.cache
def _warn() -> None:
    """Log once in this process that what its user is about to do is experimental."""
    _log.warning(EXPERIMENTAL)
