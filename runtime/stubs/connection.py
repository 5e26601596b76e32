"""The connection of a process to a stub that it sends batches to: two channels, and memory that grows.

The process that started the stub has more of it (`handle.py`); a front end has only this.

Theory of operation. The driver of a batch uses the link on any thread. The reactor's thread reads the control channel
and hands out what comes: responses, memory, events of devices. `close` runs there, too, so that no descriptor is closed
while the reactor watches it. It wakes the driver, which then finds the channel closed.

Growth. A stub allocates its answers itself, in regions that this process makes. When none has room, the stub sends GROW
and waits without a limit for REGION or REFUSED, in the middle of a batch. So it must get one of them, or its end:

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import Closed, MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import MAX_PLACES_IN_PACKET, NO_DEVICE, SHORT, Kind, Side, beginning
from moonpool.ipc.policy import is_contained
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.budgets import RELEASE_AT
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.request import InferenceRequest, Outcome
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import forbid_looking_inside
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.stubs.allotment import RegionSource
from moonpool.runtime.stubs.control import ControlChannel, MessageRateLimiter
from moonpool.runtime.stubs.link import Link

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.runtime.stubs.devices import Lanes

Respond = Callable[[InferenceRequest, Outcome | None, int], None]


# Seconds until CANCEL is sent again if the stub's channel is half full.
_LATER_S = 0.05
_RESPONSES = int(Kind.RESPONSES)


class StubConnection:
    """Sends batches to a stub. Any thread may call any method, except those below "On the reactor's thread"."""

    def __init__(
        self,
        work: Channel,
        control: ControlChannel,
        options: ModelOptions,
        reactor: Reactor,
        *,
        is_loaded: bool = False,
        is_shared: bool = False,
        gpus: Sequence[int] | None = (),
        memory: tuple[RegionSource, RegionSource],
    ) -> None:
        """Own the channels and `memory`, the sources for requests and for answers. Raises `OutOfMemory`.

        The channels are owned, and closed, even if this raises. `gpus` are those that the stub sees, None for all. The
        other arguments are those of `Link`.
        """
        self.control = control
        self._gpus = gpus
        self._reactor = reactor
        self._on_response: Respond = _nothing
        self._is_closed = False
        requests, answers = memory
        try:
            is_private = is_contained(options.sandbox)
            if is_private:
                forbid_looking_inside()
            self.link = Link(
                work,
                self._send_region,
                lambda region_id: control.send(Kind.RETIRE, region_id),
                region_bytes=options.region_bytes,
                requests=requests,
                answers=answers,
                is_private=is_private,
                is_loaded=is_loaded,
                is_shared=is_shared,
                make_lanes=None if gpus == () else self._make_lanes,
            )
        except BaseException:
            work.close()
            control.channel.close()
            raise
        self.rate_limiter = MessageRateLimiter(reactor, control.channel.fileno())
        self._growth = Growth(self.link, control, options.region_limit_bytes)

    # Memory of devices

    def _make_lanes(self) -> Lanes:
        from moonpool.runtime.stubs.devices import Lanes

        def send_event(number: int, handle: bytes) -> None:
            self.control.send(Kind.EVENT, number, handle)

        return Lanes(send_event, self._read_event, self._gpus)

    def _read_event(self) -> bool:
        """Read the next control message. Returns False, and reads nothing, on any thread but the reactor's."""
        if not self._reactor.is_here:
            return False
        self.read(1)
        return True

    def _send_region(self, region: SharedRegion | DeviceRegion, writer: Side) -> None:
        number: int | None = NO_DEVICE
        if not isinstance(region, SharedRegion):
            number = self.link.open_lanes().number_of(region.device.ordinal)
        if number is None:
            raise ValueError(f"the stub does not see the device of {region!r}")
        self.control.send_region(region, writer, number)

    def serve(self, respond: Respond) -> None:
        """Give responses that come apart from the answers to batches to `respond` from now on."""
        self._on_response = respond

    def cancel(self, request: InferenceRequest) -> bool:
        """Tell the model that nobody waits for a request any more. Returns False if the model does not have it."""
        key = self.link.replies.key_of(request)
        if key is None:
            return False
        try:
            if self.control.channel.is_half_full:
                # Many callers may leave at the same time. Messages that a stub must get need room, too.
                self._reactor.call_later(_LATER_S, lambda: self.cancel(request))
            else:
                self.control.send(Kind.CANCEL, *key)
        except (MoonpoolError, OSError):  # the stub is gone
            return False
        return True

    def tidy(self, now_s: float) -> None:
        """Give back memory that was not needed lately. For the thread that holds the idle instance."""
        self.link.tidy(now_s)
        self._growth.tidy()

    # On the reactor's thread

    def read(self, most: int) -> None:
        """Read and handle at most so many control messages. Raises `PeerGone`, `ProtocolError`."""
        if self._is_closed:
            return
        try:
            response = self.link.response
            for fields in self.control.receive(most, self.link, self.rate_limiter):
                if fields[0] == _RESPONSES:
                    for row in fields[1]:
                        self._on_response(*response(row))
                else:
                    self._handle(fields)
        except PeerGone:
            # The growth's thread wakes the channel, which reads like its end, if the stub broke the protocol.
            self._growth.check()
            raise
        self._growth.release_many()
        self.rate_limiter.settle()

    def _handle(self, fields: list[Any]) -> None:
        kind = fields[0]
        if kind == Kind.BEGUN:
            self.link.begun(fields[1])
        elif kind == Kind.GROW:
            self._growth.grow(*fields[1:])
        elif kind == Kind.EVENT:
            if self.link.lanes is None:
                raise ProtocolError("EVENT came unasked")
            self.link.lanes.meet(fields[1], fields[2])
        elif kind == Kind.RETIRE:
            self._growth.retire(fields[1])
        elif kind == Kind.RELEASE:
            self.link.release(fields[1])
        else:
            self.handle_other(fields)

    def handle_other(self, fields: list[Any]) -> None:
        """Handle a message that is neither about requests nor about memory. Raises `ProtocolError`."""
        raise ProtocolError(f"{Kind(fields[0]).name} is not handled by a front end")

    def close(self) -> None:
        """Close the channels and the memory. Responses that callers hold stay valid. May be called many times.

        On the reactor's thread, so that no descriptor is closed while it is watched.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._growth.close()
        channel = self.link.conversation.channel
        for fd in (self.control.channel.fileno(), channel.fileno()):
            self._reactor.forget(fd)
        self.control.channel.close()
        channel.wake()
        channel.close()
        self.link.close()


def _nothing(*_: object) -> None:
    """Do nothing, until `serve` is called."""


_log = RuntimeLog("moonpool")


class Growth:
    """Gives a stub more memory for its answers when it asks for it.

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
        thread = threading.Thread(
            target=self._grow, args=(needed_bytes, device), name="moonpool-grow"
        )
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
            _log.debug("a stub is gone before it could grow: %s", error)
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
        region = new_device_region(
            present_bytes, needed_bytes, self._limit_bytes, gpu, self._kept_on[gpu]
        )
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
