"""A stub that this process starts, and another one talks to."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from moonpool.runtime.stub_handle import GRACE_S, StubHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.region import SharedRegion

_log = logging.getLogger("moonpool")
# How long a process that has finalized its model may take to be gone.
EXIT_S = 1.0


class LentStub(StubHandle):
    """Its control and calls channels are lent before anything of the model runs, its work channel by `lend_work`."""

    def __init__(self, *arguments: Any, born: Callable[[LentStub, tuple[int, ...]], None]) -> None:
        """As `StubHandle`. `born` gets the descriptors that BORN comes with, and owns them."""
        self._born = born
        super().__init__(*arguments)

    def _listen(self, calls: Channel) -> None:
        # There is one who reads, and it is not this process.
        self._is_mute = True
        files = (self.requests.fd, self.responses.fd)
        fds = (self.control.channel.fileno(), calls.fileno(), self.process.pidfd, *files)
        self._born(self, tuple(os.dup(fd) for fd in fds))
        # The stub is to see the end of whoever reads now. What it is to be may need more memory, which
        # goes over the control channel.
        calls.close()

    @property
    def requests(self) -> SharedRegion:
        """The first region for requests."""
        return self.link.loans.first

    @property
    def responses(self) -> SharedRegion:
        """The first region for responses."""
        (region,) = self.link.response_regions.values()
        return region

    def lend_work(self) -> int:
        """The descriptor of its work channel, for another process alone. The model is initialized."""
        channel = self.link.conversation.channel
        fd = os.dup(channel.fileno())
        channel.close()
        self.control.channel.close()
        self.link.close()
        return fd

    def tell(self, *message: object) -> None:
        """Whoever has the channel tells it."""

    def leave(self, within_s: float | None) -> None:
        """Wait so long for a process that is ending by itself; None: end it."""
        if within_s is None:
            self._stop(grace_s=GRACE_S)
        elif self.process.wait(within_s) is None:
            _log.warning("[%s] is finalized, but its process does not end; killing it", self.name)
        self.end()
