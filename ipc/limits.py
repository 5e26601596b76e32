"""What limits of an instance are called, and the sentences in which they are named, on both sides."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of each limit of a policy: what it limits, its unit, and the option of the model that sets it.
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
    "failed to map segment",
    "bad_alloc",
    "memoryerror",
    "out of memory",
)
_NO_TASK = ("can't start new thread", "pthread_create")
_BY_NUMBER = {
    errno.ENOMEM: ("memory_bytes", "data_bytes"),
    errno.EMFILE: ("open_files",),
    errno.ENOSPC: ("file_bytes",),
    errno.EDQUOT: ("file_bytes",),
    errno.EFBIG: ("file_bytes",),
}


def reached(name: str, value: int) -> str:
    """`reached its task limit of 512 processes and threads (MOONPOOL_TASK_LIMIT)`."""
    what, unit, option = _NAMES[name]
    return f"reached its {what} limit of {value} {unit} ({option})"


def limit_behind(error: BaseException, text: str, limits: Mapping[str, int]) -> str:
    """What `reached` says of the limit that this error comes of, "" where it comes of none.

    `text` is the error's message. Of what C libraries raise, it is all that there is.
    """
    names: tuple[str, ...] = ()
    if isinstance(error, MemoryError):
        names = ("memory_bytes", "data_bytes")
    elif isinstance(error, OSError) and error.errno in _BY_NUMBER:
        names = _BY_NUMBER[error.errno]
    elif isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and _forked(error):
        names = ("tasks",)
    return _either(names, limits) or limit_in(text, limits)


def limit_in(text: str, limits: Mapping[str, int]) -> str:
    """As `limit_behind`, for the words of whoever could not go on."""
    text = text.lower()
    names: tuple[str, ...] = ()
    if any(words in text for words in _NO_TASK):
        # The stack of a thread is memory, and the kernel says the same of both.
        names = ("tasks", "memory_bytes", "data_bytes")
    elif any(words in text for words in _NO_MEMORY):
        names = ("memory_bytes", "data_bytes")
    return _either(names, limits)


def _either(names: tuple[str, ...], limits: Mapping[str, int]) -> str:
    found = [reached(name, limits[name]) for name in names if name in limits]
    return ", or ".join(found)


def _forked(error: BaseException) -> bool:
    """Whether it was raised in or right below a function that makes processes; sockets raise the same."""
    codes = []
    frame = error.__traceback__
    while frame is not None:
        codes.append(frame.tb_frame.f_code)
        frame = frame.tb_next
    return any("fork" in name for code in codes[-2:] for name in code.co_names)
