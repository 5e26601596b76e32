"""The policy of a stub: its sandbox and limits, as the JSON object in SANDBOX, and the sentences that name a limit in
an error.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from typing import Any

OFF, STANDARD, BEST_EFFORT, STRICT = "off", "standard", "best-effort", "strict"
# From the least to the most strict.
LEVELS = (OFF, STANDARD, BEST_EFFORT, STRICT)
# If the ids of a folder cannot be mapped, instances share it by running as the user that owns it, which is one of
# these. No instance gets one of them for itself.
FIRST_SHARED_USER, LAST_SHARED_USER = 61100, 61183
# If the machine runs out of memory, the kernel should end a stub before its runtime.
OOM_SCORE = 500
# System calls that start processes, and that can be granted.
_STARTING = frozenset(["fork", "vfork", "clone", "clone3"])


def is_contained(level: str) -> bool:
    """Return True if a model at this level may be hostile."""
    return level in (BEST_EFFORT, STRICT)


class Policy:
    """The restrictions of one stub. With the defaults, it may do anything. Immutable by convention.

    Below `best-effort`, only `limits`, `cpus` and `nice` have an effect. Paths are absolute and without links.
    """

    def __init__(
        self,
        *,
        level: str = STANDARD,
        user: int | None = None,
        read: Sequence[str] = (),
        granted: Sequence[tuple[str, bool]] = (),
        devices: Sequence[str] = (),
        scratch: str = "",
        scratch_bytes: int = 0,
        ports: Sequence[int] = (),
        syscalls: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        cpus: Sequence[int] = (),
        nice: int = 0,
        forks: bool = False,
        shares_scratch: bool = False,
    ) -> None:
        self.level = level
        # The user and group as which the stub runs, if the runtime is root.
        self.user = user
        # Files, and folders with their contents, that it needs to run.
        self.read = list(read)
        # Paths that the model was granted by name, each with True if it may write there.
        self.granted = [(path, bool(writes)) for path, writes in granted]
        # Device nodes of GPUs, and of their driver.
        self.devices = list(devices)
        # A folder of its own, and the most bytes in it; "" for none.
        self.scratch = scratch
        self.scratch_bytes = scratch_bytes
        # TCP ports to which it may connect, and names of system calls that it may make beside the usual ones.
        self.ports = list(ports)
        self.syscalls = list(syscalls)
        # `memory_bytes` (address space), `data_bytes`, `open_files`, `tasks`, `file_bytes`. A missing name has no
        # limit.
        self.limits = dict(limits or {})
        # Numbers of processors; empty for all.
        self.cpus = list(cpus)
        self.nice = nice
        # True for a template, from which instances are forked.
        self.forks = forks
        # True for an instance that was forked from a template, as the others have the same scratch folder.
        self.shares_scratch = shares_scratch

    @property
    def is_contained(self) -> bool:
        """True if its model may be hostile."""
        return is_contained(self.level)

    @property
    def may_start_processes(self) -> bool:
        """True if the process is contained and may start others, which have to end with it."""
        return self.is_contained and (self.forks or bool(_STARTING & set(self.syscalls)))

    @property
    def has_files_alone(self) -> bool:
        """True if no other process may write to the files that this one may write to, so that no lock on them keeps
        anybody out.
        """
        return not (self.may_start_processes or self.shares_scratch or self.granted)

    def changed(self, **changes: Any) -> Policy:
        """Return a copy with other values for some of its fields."""
        return Policy(**{**vars(self), **changes})

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Return the policy that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(vars(self))


# The limits of memory: of addresses, and of private memory. A process has at most one of them.
MEMORY = ("memory_bytes", "data_bytes")
# For each limit of a policy: its subject, its unit, and the option of the model that sets it.
_NAMES = {
    "memory_bytes": ("memory", "bytes", "MOONPOOL_MEMORY_LIMIT_BYTES"),
    "data_bytes": ("memory", "bytes", "MOONPOOL_MEMORY_LIMIT_BYTES"),
    "tasks": ("task", "processes and threads", "MOONPOOL_TASK_LIMIT"),
    "open_files": ("descriptor", "open descriptors", "MOONPOOL_OPEN_FILES"),
    "file_bytes": ("scratch", "bytes", "MOONPOOL_SCRATCH_BYTES"),
}
_NO_MEMORY = (
    "cannot allocate memory",
    "can't allocate memory",
    "unable to allocate",
    "failed to allocate",
    "memory allocation",  # OpenBLAS, Rust
    "allocation failed",
    "failed to map segment",
    "bad_alloc",
    "memoryerror",
    "out of memory",
    "not enough memory",
    "insufficient memory",
)
# These are about other memory: a GPU's, and a fixed table of the loader.
_OTHER_MEMORY = ("cuda", "static tls")
_NO_TASK = (
    "can't start new thread",
    "pthread_create",
    "thread creation failed",
    "failed to spawn thread",
    "what():  resource temporarily unavailable",  # std::thread
)
_NO_SPACE = ("no space left on device", "file size limit exceeded", "file too large", "disk quota exceeded")
_BY_NUMBER = {
    errno.ENOMEM: MEMORY,
    errno.EMFILE: ("open_files",),
    errno.ENOSPC: ("file_bytes",),
    errno.EDQUOT: ("file_bytes",),
    errno.EFBIG: ("file_bytes",),
}


def reached(name: str, value: int) -> str:
    """Return a clause such as `reached its task limit of 512 processes and threads (MOONPOOL_TASK_LIMIT)`."""
    return f"reached its {limit_named(name, value)}"


def limit_named(name: str, value: int) -> str:
    """Return words such as `task limit of 512 processes and threads (MOONPOOL_TASK_LIMIT)`."""
    what, unit, option = _NAMES[name]
    return f"{what} limit of {value} {unit} ({option})"


def limit_behind(error: BaseException, text: str, limits: Mapping[str, int]) -> str:
    """Return the clause of `reached` for the limit that caused this error; "" if none did.

    `text` is the error's message. For errors from C libraries, nothing else is known.
    """
    names: tuple[str, ...] = ()
    if isinstance(error, MemoryError):
        names = MEMORY
    elif isinstance(error, OSError) and error.errno in _BY_NUMBER:
        names = _BY_NUMBER[error.errno]
    elif isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and forked(error):
        names = ("tasks",)
    return _either(names, limits) or limit_in(text, limits)


def limit_in(text: str, limits: Mapping[str, int]) -> str:
    """Return the clause of `reached` for the limit that the last words of a process point to; "" for none."""
    lines = text.lower().split("\n")
    text = "\n".join(line for line in lines if not any(words in line for words in _OTHER_MEMORY))
    names: tuple[str, ...] = ()
    if any(words in text for words in _NO_TASK):
        # The stack of a thread is memory, and the kernel reports both shortages with the same error.
        names = ("tasks", *MEMORY)
    elif any(words in text for words in _NO_MEMORY):
        names = MEMORY
    elif any(words in text for words in _NO_SPACE):
        names = ("file_bytes",)
    return _either(names, limits)


def _either(names: tuple[str, ...], limits: Mapping[str, int]) -> str:
    found = [reached(name, limits[name]) for name in names if name in limits]
    return ", or ".join(found)


def forked(error: BaseException) -> bool:
    """Return True if the error was raised in, or right below, a function that makes processes. Sockets raise the same
    error.
    """
    codes = []
    frame = error.__traceback__
    while frame is not None:
        codes.append(frame.tb_frame.f_code)
        frame = frame.tb_next
    return any("fork" in name for code in codes[-2:] for name in code.co_names)
