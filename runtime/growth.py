"""A stub's memory for answers: it grows when the stub asks, and is told what is free in it again."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from moonpool.ipc.errors import Closed, MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import MAX_PLACES_IN_PACKET, NO_DEVICE, SHORT, Kind, Side
from moonpool.ipc.texts import beginning

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.ipc.region import SharedRegion
    from moonpool.runtime.control_channel import ControlChannel
    from moonpool.runtime.link import Link

_log = logging.getLogger("moonpool")
# So many blocks of answers that callers let go of are worth a message of their own.
_RELEASE_AT = 64


class Growth:
    """`grow`, `check` and `retire` are for the reactor; the rest is for any thread."""

    def __init__(self, link: Link, control: ControlChannel, limit_bytes: int | None) -> None:
        self._link = link
        self._control = control
        self._limit_bytes = limit_bytes
        # The memory of each device that the process may have kept. For a contained one it counts until the process ends.
        self._kept_on: Counter[int] = Counter()
        self._is_growing = self._is_closed = False
        # The breach of the protocol that another thread met while it answered the stub.
        self._breach: ProtocolError | None = None
        self._closing = threading.Lock()

    def grow(self, needed_bytes: int, device: int) -> None:
        """The stub needs another region of at least so many bytes, and waits. Raises `ProtocolError`."""
        if self._is_growing:
            raise ProtocolError("GROW came before the last one was answered")
        self._is_growing = True
        # Setting memory aside takes a millisecond for every few megabytes, and a device's context a second.
        thread = threading.Thread(
            target=self._grow, args=(needed_bytes, device), name="moonpool-grow"
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._refuse(f"the runtime has no thread for this: {error}")

    def _grow(self, needed_bytes: int, device: int) -> None:
        link = self._link
        try:
            # With word of all that is free again, which may be enough.
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
            _log.debug("a stub is gone before it could grow: %s", error)
        except ProtocolError as error:  # the stub does not read the answers
            self._breach = error
            # The reactor then sees the end of the channel, and raises the breach.
            self._control.channel.wake()
        except Exception:
            _log.exception("a stub asked for memory and cannot be answered")
            # It waits without a limit, for an answer or for this.
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
        from moonpool.runtime.device_regions import new_device_region

        lanes = self._link.open_lanes()
        gpu = lanes.gpu_of(number)
        # The stub is told of the lane before the first region there.
        lanes.lane(gpu)
        regions = [*self._link.device_answers.values()]
        present_bytes = sum(each.size_bytes for each in regions if each.device.ordinal == gpu)
        region = new_device_region(
            present_bytes, needed_bytes, self._limit_bytes, gpu, self._kept_on[gpu]
        )
        region.is_private = self._link.loans.is_private
        return region

    def _take_in(self, region: SharedRegion | DeviceRegion) -> bool:
        """Own another region; False, and it is closed, where the stub has been given up."""
        with self._closing:
            if self._is_closed:
                region.close()
            else:
                self._link.add_answers(region)
            return not self._is_closed

    def retire(self, region_id: int) -> None:
        """The stub does not use a region any more. Raises `ProtocolError`."""
        regions, on_devices = self._link.response_regions, self._link.device_answers
        if region_id in on_devices:
            # Memory that others opened in the older way goes when they do.
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
        """Tell the stub what callers let go of, without waiting for a batch that tells it."""
        while released := self._link.take_released(MAX_PLACES_IN_PACKET):
            if self._link.lanes is not None:
                self._link.lanes.publish()
            self._control.send(Kind.RELEASE, released)

    def release_many(self) -> None:
        """As `release`, if it is worth it: where responses come apart from batches, so must this word."""
        if len(self._link.released) >= _RELEASE_AT:
            self.release()

    def tidy(self) -> None:
        """As `release`, if the stub could give a region back then."""
        if len(self._link.response_regions) > 1 or self._link.device_answers:
            self.release()

    def close(self) -> None:
        """The stub has been given up: nothing is added any more."""
        with self._closing:
            self._is_closed = True
