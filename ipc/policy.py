"""What the runtime asks of a stub's sandbox: the JSON object in SANDBOX, as both sides know it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

OFF, STANDARD, BEST_EFFORT, STRICT = "off", "standard", "best-effort", "strict"
# From the loosest to the tightest.
LEVELS = (OFF, STANDARD, BEST_EFFORT, STRICT)
# Calls that start processes, and that can be granted.
_STARTING = frozenset(["fork", "vfork", "clone", "clone3"])


def is_contained(level: str) -> bool:
    """Whether a model at this level may be hostile."""
    return level in (BEST_EFFORT, STRICT)


class Policy:
    """What a stub may do; the defaults are those of a stub that may do anything. Not changed once it is made.

    Only `limits`, `cpus` and `nice` mean something below `best-effort`. Paths are absolute and without links.
    """

    def __init__(
        self,
        *,
        level: str = STANDARD,
        user: int | None = None,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        devices: Sequence[str] = (),
        scratch: str = "",
        scratch_bytes: int = 0,
        ports: Sequence[int] = (),
        syscalls: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        cpus: Sequence[int] = (),
        nice: int = 0,
        forks: bool = False,
    ) -> None:
        self.level = level
        # The user and group that the stub is to be, where the runtime is root.
        self.user = user
        # Files, and folders with all that is in them.
        self.read = list(read)
        self.write = list(write)
        # Device nodes of GPUs, and of their driver.
        self.devices = list(devices)
        # A folder that is its own, and how much may be in it; "" for none.
        self.scratch = scratch
        self.scratch_bytes = scratch_bytes
        # TCP ports that it may connect to, and names of system calls that it may make beside the usual ones.
        self.ports = list(ports)
        self.syscalls = list(syscalls)
        # `memory_bytes` (address space), `data_bytes`, `open_files`, `tasks`, `file_bytes`; what is not there is
        # not limited.
        self.limits = dict(limits or {})
        # Numbers of processors; none is all.
        self.cpus = list(cpus)
        self.nice = nice
        # Whether it is a template, from which others are forked.
        self.forks = forks

    @property
    def is_contained(self) -> bool:
        """Whether the model in it may be hostile."""
        return is_contained(self.level)

    @property
    def may_start_processes(self) -> bool:
        """True if the process is contained and may start others, which have to end with it."""
        return self.is_contained and (self.forks or bool(_STARTING & set(self.syscalls)))

    def changed(self, **changes: Any) -> Policy:
        """The same with other values for some of its fields."""
        return Policy(**{**vars(self), **changes})

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """What `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(vars(self))
