"""Finds the device nodes and variables with which a contained process can use certain GPUs and no others.

The process sees only its own GPUs, numbered from 0 in the given order, as a process in a container does.

Sources: the README of NVIDIA's driver for Linux ("The NVIDIA Character Device Files", "The /proc Filesystem
Interface"); the CUDA programming guide on `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.gpus import bus_id, uuid

# Nodes for all GPUs together: the driver's, that of unified memory, and another one that newer drivers open.
_SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_INFORMATION = "/proc/driver/nvidia/gpus/{}/information"


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """Device nodes to grant, and the value of `CUDA_VISIBLE_DEVICES`; both empty for no GPUs."""

    devices: tuple[str, ...] = ()
    visible: str = ""


def access_to(gpus: Sequence[int]) -> GpuAccess:
    """Return the access to the GPUs of these numbers. Raises `LoadFailed`."""
    if not gpus:
        return GpuAccess()
    nodes = [_node(gpu, bus_id(gpu)) for gpu in gpus]
    return GpuAccess((*_SHARED, *nodes), ",".join(uuid(gpu) for gpu in gpus))


def _node(gpu: int, place: str) -> str:
    """Return the device node of one GPU. Its number is the driver's and not CUDA's."""
    file = Path(_INFORMATION.format(place))
    try:
        found = re.search(r"^Device Minor:\s*(\d+)\s*$", file.read_text("ascii", "replace"), re.MULTILINE)
    except OSError as error:
        why = f"{file}: {error.strerror}"
    else:
        if found is not None:
            return f"/dev/nvidia{found[1]}"
        why = f"{file} has no line 'Device Minor'"
    raise LoadFailed(
        f"the device node of GPU {gpu}, which a contained model would use, is not known ({why}); "
        "lower MOONPOOL_SANDBOX to standard, or use KIND_CPU",
        stage="sandbox",
    )
