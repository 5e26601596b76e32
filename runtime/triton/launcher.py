"""Starts the stubs of one backend of a tritonserver, watches them, starts them again. Run by path:

    python -I .../runtime/triton/launcher.py FD [NAME]

FD is the channel to the library inside the server, which started this process; `messages.py` is what is said there. NAME is the
backend's, for who looks at the machine's processes. The
interpreter needs numpy and msgpack, and moonpool need not be installed in it. This process ends with the server.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import types

_NEEDED = ("msgpack", "numpy")
_OLDEST = (3, 11)
_FIRST_FD = 3
# The most seconds for another Python to print its version.
_ANSWER_S = 10.0
# Of the signals that are ignored: those that every Python ignores.
_PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}


def make_importable(name: str, folder: str) -> None:
    """Make the one package importable without adding what lies beside it to the path."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]


def why_not() -> str | None:
    """Why this interpreter cannot run a launcher, if so."""
    if sys.version_info < _OLDEST:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"it is Python {version}, and moonpool needs 3.11 or newer; models may have an older one"
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"it cannot import {name}: {error}"
    return None


def leave_server(channel_fd: int) -> None:
    """Give up what a child of the server has of it beside the channel: open files and signals."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= _FIRST_FD and fd != channel_fd:
            # The list's own is closed already.
            with contextlib.suppress(OSError):
                os.close(fd)
    os.set_inheritable(channel_fd, False)
    # What ends a server's process group is not for this process: it ends with the server's channel.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - _PYTHONS_OWN:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Whoever ends the server by them gives it time to end its models.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def leave_servers_python() -> None:
    """Give up the variables of the server's Python that would lead models astray.

    This process is isolated and ignores variables that begin with PYTHON; models get them. But PYTHONHOME is for the
    Python inside the server; any other interpreter knows its own place. And the packages in PYTHONPATH are for the
    version of Python that Triton's own backend runs, while moonpool may have been installed under another one.
    """
    os.environ.pop("PYTHONHOME", None)
    if "PYTHONPATH" in os.environ and not is_servers_version():
        del os.environ["PYTHONPATH"]


def is_servers_version() -> bool:
    """Tell if this Python has the version of the `python3` in the server's path, which Triton's own backend runs."""
    found = shutil.which("python3")
    if found is None or os.path.realpath(found) == os.path.realpath(sys.executable):
        return True
    asks = (found, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])")
    try:
        said = subprocess.run(
            asks, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return said.stdout.split() == [b"%d" % number for number in sys.version_info[:2]]


def main() -> int:
    """Launch until the server ends; returns the exit code."""
    channel_fd = int(sys.argv[1])
    leave_server(channel_fd)
    leave_servers_python()
    reason = why_not()
    if reason is not None:
        sys.stderr.write(f"moonpool cannot be run by {sys.executable}: {reason}\n")
        return 1
    here = os.path.dirname(os.path.realpath(__file__))
    make_importable("moonpool", os.path.dirname(os.path.dirname(here)))
    from moonpool.runtime.triton.launching import launch

    launch(channel_fd)
    return 0


if __name__ == "__main__":
    code = main()
    # Not sys.exit: threads that wait for more to do would keep the process.
    os._exit(code)
