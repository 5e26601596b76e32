"""What a contained process needs to use certain GPUs and no others.

It sees its own alone, numbered from 0 in their order here, as a process does in a container that was given them.

Sources: the README of NVIDIA's driver for Linux ("The NVIDIA Character Device Files", "The /proc Filesystem Interface"); the
CUDA programming guide on `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.gpus import bus_id, uuid

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of all GPUs together: the driver's, that of unified memory, and what newer drivers open beside it.
_SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_INFORMATION = "/proc/driver/nvidia/gpus/{}/information"


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """Device nodes to grant, and what `CUDA_VISIBLE_DEVICES` is to be; both empty for no GPUs."""

    devices: tuple[str, ...] = ()
    visible: str = ""


def access_to(gpus: Sequence[int]) -> GpuAccess:
    """To the GPUs of these numbers. Raises `LoadFailed`."""
    if not gpus:
        return GpuAccess()
    nodes = [_node(gpu, bus_id(gpu)) for gpu in gpus]
    return GpuAccess((*_SHARED, *nodes), ",".join(uuid(gpu) for gpu in gpus))


def _node(gpu: int, place: str) -> str:
    """The device node of one GPU, whose number is the driver's and not CUDA's."""
    file = Path(_INFORMATION.format(place))
    try:
        found = re.search(
            r"^Device Minor:\s*(\d+)\s*$", file.read_text("ascii", "replace"), re.MULTILINE
        )
    except OSError as error:
        why = f"{file}: {error.strerror}"
    else:
        if found is not None:
            return f"/dev/nvidia{found[1]}"
        why = f"{file} has no line 'Device Minor'"
    raise LoadFailed(
        f"which device node GPU {gpu} has, and a contained model may use, is not known ({why}); "
        "lower MOONPOOL_SANDBOX to standard, or use KIND_CPU",
        stage="sandbox",
    )
