"""What a process has of a stub that it sends batches to: two channels and memory.

The process that started the stub has more of it (`runtime.stub_handle`); a front end has only this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.ipc.policy import is_contained
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.control_channel import ControlChannel
from moonpool.runtime.flow import Flow
from moonpool.runtime.growth import Growth
from moonpool.runtime.link import Link
from moonpool.runtime.sandbox.privacy import forbid_looking_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.runtime.allotment import RegionSource
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.lanes import Lanes
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.request import InferenceRequest, Outcome

    Respond = Callable[[InferenceRequest, Outcome | None, int], None]

# When to tell once more what a stub had no room to read.
_LATER_S = 0.05
_RESPONSES = int(Kind.RESPONSES)


class StubConnection:
    """Methods are for any thread, but for those that read the control channel: they are for the reactor's."""

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
        """Own the channels, even if this raises `OutOfMemory`, and `memory`: the sources for requests and for answers.

        `gpus` are those that the stub sees, None for all.

        The rest is as for `Link`.
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
        self._flow = Flow(reactor, control.channel.fileno())
        self._growth = Growth(self.link, control, options.region_limit_bytes)

    # Memory of devices

    def _make_lanes(self) -> Lanes:
        from moonpool.runtime.lanes import Lanes

        def send_event(number: int, handle: bytes) -> None:
            self.control.send(Kind.EVENT, number, handle)

        return Lanes(send_event, self._read_event, self._gpus)

    def _read_event(self) -> bool:
        """Take in what the stub has told next; False where the reactor's thread is another one, and does."""
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
        """From now on, `respond` gets the responses that come apart from the answers to batches."""
        self._on_response = respond

    def cancel(self, request: InferenceRequest) -> bool:
        """Tell the model that nobody waits any more for a request; False if it does not have it."""
        key = self.link.replies.key_of(request)
        if key is None:
            return False
        try:
            if self.control.channel.is_half_full:
                # Many may leave at the same time. There has to be room for what a stub must be told.
                self._reactor.call_later(_LATER_S, lambda: self.cancel(request))
            else:
                self.control.send(Kind.CANCEL, *key)
        except (MoonpoolError, OSError):  # a stub that is gone needs no telling
            return False
        return True

    def tidy(self) -> None:
        """Give back memory that was not needed lately. For whoever holds the idle instance."""
        self.link.tidy()
        self._growth.tidy()

    # On the reactor's thread

    def read(self, most: int) -> None:
        """Take in what the stub has told, at most so many messages. Raises `PeerGone`, `ProtocolError`."""
        if self._is_closed:
            return
        try:
            for fields in self.control.receive(most, self.link, self._flow):
                self._handle(fields)
        except PeerGone:
            # If the stub broke the protocol, this end closed the channel.
            self._growth.check()
            raise
        self._growth.release_many()
        self._flow.settle()

    def _handle(self, fields: list[Any]) -> None:
        kind = fields[0]
        if kind == _RESPONSES:
            for row in fields[1]:
                self._on_response(*self.link.response(row))
        elif kind == Kind.BEGUN:
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
            self.link.let_go_of(fields[1])
        else:
            self.handle_other(fields)

    def handle_other(self, fields: list[Any]) -> None:
        """What is neither about requests nor about memory. Raises `ProtocolError`."""
        raise ProtocolError(f"{Kind(fields[0]).name} is not handled by a front end")

    def close(self) -> None:
        """Give everything up; responses that are out stay valid. May be called many times.

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
    """Until somebody wants to know."""
