"""Gives a stub more memory for its answers when it asks for it, and takes it back.

Theory of operation. A stub allocates its answers itself, in regions that this process makes. When none has room, the
stub sends GROW and waits without a limit for REGION or REFUSED, in the middle of a batch. So it must get one of them,
or its end:

- Setting pages aside takes a millisecond for every few megabytes, and opening a device a second. The reactor must not
  wait for that, so each GROW gets a thread. A second GROW before the answer is a breach of the protocol, so a stub has
  one thread that makes a region.
- The thread first sends RELEASE with all blocks that callers have dropped. They may be room enough for the next time.
- `_closing` orders the end of the thread with `close`. A region that comes too late is closed at once; any other is
  added to the link before REGION is sent, since the stub may answer from it as soon as it has the message.
- `_is_growing` becomes False before REGION or REFUSED is sent, since the stub may send the next GROW at once.
- The thread may find that the stub does not read its channel. It must not end the stub itself, so it keeps the error in
  `_breach` and wakes the control channel. The reactor then reads the end of the channel, and raises the breach.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from moonpool.ipc.errors import Closed, MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import MAX_PLACES_IN_PACKET, NO_DEVICE, SHORT, Kind, Side, beginning
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.budgets import RELEASE_AT
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.stubs.control import ControlChannel
from moonpool.runtime.stubs.link import Link

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion

_log = RuntimeLog("moonpool")


class Growth:
    """Makes regions for the answers of one stub.

    `grow`, `check` and `retire` are for the reactor, the other methods for any thread.
    """

    def __init__(self, link: Link, control: ControlChannel, limit_bytes: int | None) -> None:
        self._link = link
        self._control = control
        self._limit_bytes = limit_bytes
        # Bytes of retired regions on each device, which the process may have kept. Those of a contained process count
        # until it ends.
        self._kept_on: Counter[int] = Counter()
        self._is_growing = self._is_closed = False
        # The breach of the protocol that a thread met while it answered the stub.
        self._breach: ProtocolError | None = None
        self._closing = threading.Lock()

    def grow(self, needed_bytes: int, device: int) -> None:
        """Begin to make another region of at least so many bytes, for which the stub waits. Raises `ProtocolError`."""
        if self._is_growing:
            raise ProtocolError("GROW came before the last one was answered")
        self._is_growing = True
        # Setting memory aside takes a millisecond for every few megabytes, and a device's context a second.
        thread = threading.Thread(target=self._grow, args=(needed_bytes, device), name="moonpool-grow")
        try:
            start_thread(thread)
        except OutOfThreads as error:
            self._refuse(str(error))

    def _grow(self, needed_bytes: int, device: int) -> None:
        link = self._link
        try:
            self.release()
            try:
                region = self._new(needed_bytes, device)
            except MoonpoolError as error:
                self._refuse(str(error))
                return
            if self._take_in(region):
                self._is_growing = False
                link.send_region(region, Side.STUB)
        except (PeerGone, Closed) as error:
            _log.debug("a stub ended before it got more memory: %s", error)
        except ProtocolError as error:  # the stub does not read the answers
            self._breach = error
            self._control.channel.wake()
        except Exception:
            _log.exception("a stub asked for memory and cannot be answered")
            # The stub waits without a limit. The reactor finds the channel ended, and ends the stub.
            self._control.channel.wake()

    def check(self) -> None:
        """Raise `ProtocolError` if the stub broke the protocol while it was answered."""
        if self._breach is not None:
            raise self._breach

    def _refuse(self, why: str) -> None:
        self._is_growing = False
        self._control.send(Kind.REFUSED, beginning(why, SHORT))

    def _new(self, needed_bytes: int, device: int) -> SharedRegion | DeviceRegion:
        if device != NO_DEVICE:
            return self._new_on_device(needed_bytes, device)
        present_bytes = sum(each.size_bytes for each in [*self._link.response_regions.values()])
        return self._link.new_answers(present_bytes, needed_bytes)

    def _new_on_device(self, needed_bytes: int, number: int) -> DeviceRegion:
        from moonpool.runtime.stubs.devices import new_device_region

        lanes = self._link.open_lanes()
        gpu = lanes.gpu_of(number)
        # The stub must know the lane before the first region there.
        lanes.lane(gpu)
        regions = [*self._link.device_answers.values()]
        present_bytes = sum(each.size_bytes for each in regions if each.device.ordinal == gpu)
        region = new_device_region(present_bytes, needed_bytes, self._limit_bytes, gpu, self._kept_on[gpu])
        region.is_private = self._link.borrowed_blocks.is_private
        return region

    def _take_in(self, region: SharedRegion | DeviceRegion) -> bool:
        """Add a region to the link. If the stub has been given up, close the region and return False."""
        with self._closing:
            if self._is_closed:
                region.close()
            else:
                self._link.add_answers(region)
            return not self._is_closed

    def retire(self, region_id: int) -> None:
        """Give up a region that the stub does not use any more. Raises `ProtocolError`."""
        regions, on_devices = self._link.response_regions, self._link.device_answers
        if region_id in on_devices:
            # Device memory that was shared by a handle stays until the process that opened it has ended.
            if not on_devices[region_id].handle:
                region = on_devices.pop(region_id)
                if region.is_private:
                    self._kept_on[region.device.ordinal] += region.size_bytes
                region.close()
        elif region_id in regions and len(regions) > 1:
            self._link.retire_answers(region_id)
        else:
            raise ProtocolError(f"region {region_id} is not the stub's to retire")

    def release(self) -> None:
        """Send RELEASE with the blocks that callers have dropped, instead of waiting for the next EXECUTE."""
        while released := self._link.take_released(MAX_PLACES_IN_PACKET):
            if self._link.lanes is not None:
                self._link.lanes.publish()
            self._control.send(Kind.RELEASE, released)

    def release_many(self) -> None:
        """Release if many blocks were dropped. A model whose responses come apart from batches may get no EXECUTE for
        long.
        """
        if len(self._link.released) >= RELEASE_AT:
            self.release()

    def tidy(self) -> None:
        """Release if the stub has more than one region, and so could give one back."""
        if len(self._link.response_regions) > 1 or self._link.device_answers:
            self.release()

    def close(self) -> None:
        """Add no region any more, because the stub has been given up."""
        with self._closing:
            self._is_closed = True
