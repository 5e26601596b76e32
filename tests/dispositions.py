"""Default signals for programs that tests send signals to: a shell has programs in the background ignore some."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Inside, SIGINT raises KeyboardInterrupt here, and a program that is started has no signal ignored that ends
    programs.

    For the main thread.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGQUIT: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
