"""A stub that this process starts, and another one talks to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from moonpool.runtime.stub_handle import StubHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.region import SharedRegion


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
        # Kept until the stub is ready: the server may have no descriptor for it, and the stub is not to see an end
        # before this process has heard why. Whoever reads now shuts the channel down for all.
        self._calls = calls

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
        """A descriptor of its work channel, for another process until the model is to finalize. It is initialized."""
        self.control.channel.close()
        self._calls.close()
        return os.dup(self.link.conversation.channel.fileno())

    def close(self) -> None:
        super().close()
        self._calls.close()

    def tell(self, *message: object) -> None:
        """Whoever has the channel tells it."""
