"""What happens to device memory between this process and one peer, in order.

Theory of operation. A *lane* is a stream of our own for one peer on one device, and an event that the peer can wait for. All
that crosses is ordered through the stream:

- Before a message names blocks on the device, or gives them back, `publish` makes the lane wait for the streams that touched
  them, and records the event.
- After a message that names or gives back such blocks, `receive` makes the lane wait for the peer's event.
- Whoever touches a block on a stream of his own lets that stream wait for the lane with `enter`, and has it named to
  the next `publish`.

Nobody waits on the processor for any of it. An event that is recorded again only ever stands for more, so one for each direction is
enough. A lane for each peer, and not one for all, because what waits for a slow or dead peer must hold up nobody else.

Where the two processes cannot share events (each may find that out when it opens the other's), both wait for their own work before
they send: `publish` returns when the work is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from moonpool.ipc.cuda.device import Device


class Lane:
    """Thread-safe. Raises `CudaError` where the driver refuses."""

    device: Device
    stream: int
    # For EVENT; empty where events cannot be shared.
    handle: bytes

    def __init__(self, device: Device, *, shares_events: bool = True) -> None:
        raise NotImplementedError

    def meet(self, handle: bytes) -> None:
        """Take in the peer's EVENT. Raises `CudaError` where it cannot be opened: then `meet(b"")`, and tell the peer so.

        An empty handle: from now on `publish` waits itself, and `receive` has nothing to do. `handle` is empty then, too.
        """
        raise NotImplementedError

    def publish(self, streams: Iterable[int] = ()) -> None:
        """To be called right before a message that names blocks or gives them back.

        The peer sees what was queued on these streams, and on the lane, by now; so do the streams of leases that were
        dropped (`DeviceLease`).
        """
        raise NotImplementedError

    def receive(self) -> None:
        """To be called right after a message that names blocks or gives them back."""
        raise NotImplementedError

    def enter(self, stream: int) -> None:
        """Let a stream wait for all that was received or queued on the lane by now."""
        raise NotImplementedError

    def follow(self, other: Lane) -> None:
        """Let this lane wait for another one: what one peer made is handed to another."""
        raise NotImplementedError

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy on the lane, from device to device."""
        raise NotImplementedError

    def to_host(self, array: NDArray[Any], address: int) -> None:
        """Copy device memory into an array, which is C-contiguous, and wait for it. Fast where the array is pinned."""
        raise NotImplementedError

    def from_host(self, address: int, array: NDArray[Any]) -> None:
        """Copy a C-contiguous array to device memory, and wait until the array may be written to again."""
        raise NotImplementedError

    def keep(self, thing: object) -> None:
        """Hold on to something until all that is queued on the lane by now is done: the source of a copy, say."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all that is queued on the lane is done."""
        raise NotImplementedError

    def close(self) -> None:
        """The peer is gone. Arrays that were received stay valid. May be called many times."""
        raise NotImplementedError
