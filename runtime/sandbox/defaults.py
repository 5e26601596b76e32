"""The limits of models that are contained and set none themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moonpool.ipc.policy import is_contained
from moonpool.runtime.usage import machine_memory_bytes

if TYPE_CHECKING:
    from moonpool.runtime.config_options import ModelOptions

_TASKS = 512
# Each may hold some hundred kilobytes of kernel memory, which no other limit counts.
_OPEN_FILES = 256


def hardened(options: ModelOptions) -> ModelOptions:
    """The options with the limits of `strict` where the model is contained and sets none itself."""
    if not is_contained(options.sandbox):
        return options
    half_bytes = machine_memory_bytes() // 2
    return replace(
        options,
        memory_limit_bytes=options.memory_limit_bytes or half_bytes,
        region_limit_bytes=options.region_limit_bytes or max(half_bytes, options.region_bytes),
        task_limit=options.task_limit or _TASKS,
        open_files=options.open_files or _OPEN_FILES,
    )
