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
from moonpool.ipc.errors import CudaError, OutOfMemory, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The stub says EVENT before what needs it, but on another channel, and makes its context first.
_ARRIVAL_S = 30.0
# No socket holds more packets.
_MOST_WAITING = 300


class Lanes:
    """Any thread may call any method."""

    def __init__(
        self,
        send_event: Callable[[int, bytes], None],
        read_event: Callable[[], bool],
        gpus: Sequence[int] | None,
    ) -> None:
        """`send_event` sends EVENT. `read_event` takes in the next message of the control channel, if there is one;
        False where another thread does that. `gpus` are those that a contained stub sees, in its order; None where it sees all.
        With a contained one no events are shared: to open one the driver reads what the stub says, and what waits for it may wait
        for ever. Each waits for its own work instead.
        """
        self._send_event = send_event
        self._read_event = read_event
        # The thread that reads, while it looks for an event: what it reads may have to be received, too.
        self._looking = 0
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
                    lane = Lane(device(gpu), shares_events=self._gpus is None)
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
            if handle and self._gpus is not None:
                raise RemoteProtocolError("a contained stub shares no events")
            try:
                lane.meet(handle)
            except (CudaError, OutOfMemory):
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
        """After a message of the stub's. Raises `CudaError`, `RemoteProtocolError`, `PeerGone`.

        Waits for events that the stub has not told yet, but where the thread is the one that reads them: it has others to
        hear, and what is told of memory there comes after the event.
        """
        if self._is_closed:
            return
        for gpu, lane in self._lanes.copy().items():
            if gpu not in self._met:
                self._await(gpu)
            if gpu in self._met:
                lane.receive()

    def met(self, gpu: int) -> Lane:
        """The lane to a block that the stub names. Raises `RemoteProtocolError` where it has not told its event."""
        if gpu not in self._met and not self._is_closed:
            raise RemoteProtocolError(f"a block on device {self.number_of(gpu)} ahead of its EVENT")
        return self.lane(gpu)

    def _await(self, gpu: int) -> None:
        if self._looking == threading.get_ident() or self._look(gpu):
            return
        deadline = time.monotonic() + _ARRIVAL_S
        with self._changed:
            while gpu not in self._met and not self._is_closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RemoteProtocolError("the stub does not say its EVENT")
                self._changed.wait(left_s)

    def _look(self, gpu: int) -> bool:
        """Take in what has come; False where another thread does that."""
        if not self._read_event():
            return False
        self._looking = threading.get_ident()
        try:
            for _ in range(_MOST_WAITING):
                if gpu in self._met:
                    break
                self._read_event()
        finally:
            self._looking = 0
        return True

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
            self._send_event, self._read_event = _tell_nobody, _hear_nobody


def _tell_nobody(_number: int, _handle: bytes) -> None:
    """The stub is gone."""


def _hear_nobody() -> bool:
    return False
