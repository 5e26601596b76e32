"""The order of work between the runtime and one stub, on the devices whose memory both handle.

Once there is a lane, every message that could name blocks there, or give some back, is a fence: `publish` before it is sent,
`receive` after it was read. That takes some microseconds, and nobody waits for a device.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.errors import CudaError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The stub says EVENT before what needs it, but on another channel.
_ARRIVAL_S = 10.0


class Lanes:
    """Any thread may call any method."""

    def __init__(
        self,
        send_event: Callable[[int, bytes], None],
        read_events: Callable[[float], bool],
        gpus: Sequence[int] | None,
    ) -> None:
        """`send_event` sends EVENT. `read_events` takes in what comes on the control channel within so many seconds;
        False where another thread does that. `gpus` are those that the stub sees, in its order; None for all.
        """
        self._send_event = send_event
        self._read_events = read_events
        self._gpus = gpus
        self._lanes: dict[int, Lane] = {}
        # Those whose event the stub has told.
        self._met: set[int] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def number_of(self, gpu: int) -> int | None:
        """Under which number the stub knows a device of ours; None where it does not see it."""
        if self._gpus is None:
            return gpu
        return self._gpus.index(gpu) if gpu in self._gpus else None

    def gpu_of(self, number: int) -> int:
        """Which device of ours the stub means. Raises `RemoteProtocolError` for one that it does not see."""
        if self._gpus is None:
            return number
        if number >= len(self._gpus):
            raise RemoteProtocolError(f"device {number} is none of the stub's")
        return self._gpus[number]

    def nearest(self, gpu: int) -> int:
        """A device, or another one that the stub sees where it does not see this one."""
        return gpu if self._gpus is None or gpu in self._gpus else self._gpus[0]

    def lane(self, gpu: int) -> Lane:
        """The lane on a device that the stub sees, and is told of when it is made.

        Raises `CudaUnavailable`, `CudaError`.
        """
        lane = self._lanes.get(gpu)
        if lane is None:
            number = self.number_of(gpu)
            if number is None:
                raise ValueError(f"the stub does not see device {gpu}")
            with self._changed:
                lane = self._lanes.get(gpu)
                if lane is None:
                    lane = Lane(device(gpu))
                    self._send_event(number, lane.handle)
                    self._lanes[gpu] = lane
        return lane

    def meet(self, number: int, handle: bytes) -> None:
        """The stub's event. Raises `RemoteProtocolError` where it was not to be told."""
        gpu = self.gpu_of(number)
        with self._changed:
            lane = self._lanes.get(gpu)
            if lane is None or gpu in self._met:
                raise RemoteProtocolError(f"EVENT of device {number} came unasked")
            try:
                lane.meet(handle)
            except CudaError:
                lane.meet(b"")
                self._send_event(number, b"")
            self._met.add(gpu)
            self._changed.notify_all()

    def publish(self) -> None:
        """Before a message to the stub. Raises `CudaError`."""
        if self._is_closed:
            return
        for lane in self._lanes.copy().values():
            lane.publish()

    def receive(self) -> None:
        """After a message of the stub's. Raises `CudaError`, `RemoteProtocolError`, `PeerGone`."""
        if self._is_closed:
            return
        for gpu, lane in self._lanes.copy().items():
            if gpu not in self._met:
                self._await(gpu)
            lane.receive()

    def _await(self, gpu: int) -> None:
        deadline = time.monotonic() + _ARRIVAL_S
        while gpu not in self._met and not self._is_closed:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RemoteProtocolError("the stub does not say its EVENT")
            if not self._read_events(left_s):
                with self._changed:
                    self._changed.wait_for(lambda: gpu in self._met or self._is_closed, left_s)

    def tidy(self) -> None:
        """Let go of what the devices are done with by now."""
        for lane in self._lanes.copy().values():
            lane.let_go()
            lane.device.tidy()

    def close(self) -> None:
        """The stub is gone; arrays that it made stay valid."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for lane in self._lanes.values():
                lane.close()
            # Who has these refers to this, too.
            self._send_event, self._read_events = _tell_nobody, _hear_nobody


def _tell_nobody(_number: int, _handle: bytes) -> None:
    """The stub is gone."""


def _hear_nobody(_timeout_s: float) -> bool:
    return False
