"""No other process at all: the work itself."""

from __future__ import annotations

from moonpool.benchmarks.suites.peer.peer import Floats, Peer


class Here(Peer):
    """numpy in this process."""

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        return a + b, a - b
