"""Handles SIGTERM for programs that host models and do not handle it themselves."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the main thread inside the block, so that `with Runtime` drains and finalizes.

    SIGINT does the same without help, by KeyboardInterrupt. Call it in the main thread of a program, not in a library.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
