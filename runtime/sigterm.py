"""SIGTERM for programs that host models and have no use for the signal themselves."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit in the main thread, so that `with Runtime` drains and finalizes.

    SIGINT does that anyway, as KeyboardInterrupt. For programs of their own; main thread only.
    """

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
