"""The work channel in memory, in place of a socket, where it is compiled and the kernel has what it needs.

Theory of operation. The runtime makes the memory and the bells with `offer`, and SLOTS carries the stub's share of
them on the control channel. A stub that can use them takes them with `take`, and says `slots` in LOADED. From the
message after LOADED on both ends use a `SlotChannel` and close their sockets. Otherwise the sockets go on: the
interpreter of the model may be an older one, or something in between may be missing. `ipc/native/slot.h` says how the
memory is used, and what a stub can do with it.

Both ends are compiled, or none: a form in Python could not order its stores on every machine.
"""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

from moonpool.ipc.extension import is_wanted, load_if_there

# None if it is not compiled.
_compiled: Any = load_if_there("moonpool.ipc.slots._slots") if is_wanted() else None

if TYPE_CHECKING:
    SlotChannel = Any
else:
    SlotChannel = None if _compiled is None else _compiled.SlotChannel


def counts() -> dict[str, int]:
    """Return how often threads of this process looked for a message in memory, and how often it came meanwhile."""
    return {"looks": 0, "hits": 0} if _compiled is None else dict(_compiled.counts())


def offer() -> tuple[SlotChannel, list[int]] | None:
    """Make a channel, and the descriptors of its other end, which the caller owns.

    Returns None if that is not possible here, or if the process may soon be out of descriptors: a channel has three
    more than a socket has.
    """
    if _compiled is None:
        return None
    try:
        channel, fds = _compiled.SlotChannel.offer()
    except OSError:  # no descriptors, no memory, or a kernel before 5.1
        return None
    # The kernel gives out the lowest free number, so the highest one of these tells how many are taken.
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and max(fds) > most * 3 // 4:
        channel.close()
        for fd in fds:
            os.close(fd)
        return None
    return channel, fds


def take(fds: list[int], look_us: int) -> SlotChannel | None:
    """Return the end that came with these descriptors, and own them. Returns None if this process cannot use it."""
    if _compiled is None or len(fds) != 4:
        for fd in fds:
            os.close(fd)
        return None
    try:
        channel: SlotChannel = _compiled.SlotChannel.taken(fds)
    except OSError:  # no memory
        return None
    channel.look_ns = look_us * 1000
    return channel
