"""Gives a new process the default dispositions of signals: an exec keeps those that its parent ignored or blocked."""

from __future__ import annotations

import signal

# Every Python ignores these two.
_PYTHONS_OWN = frozenset((signal.SIGPIPE, signal.SIGXFSZ))


def use_defaults() -> None:
    """Give all signals their default disposition, and block none. For the main thread of a process that has just started.

    A shell starts a background job with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and some daemons with SIGCHLD, after
    which the kernel would reap the children of a model's process before anybody could ask for their exit codes.
    """
    for number in signal.valid_signals() - _PYTHONS_OWN:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Last: what was held back until now has its default effect.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
