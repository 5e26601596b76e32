"""The program of a launcher, which starts the stubs of one backend of a tritonserver. It is run by path:

    python -I .../runtime/triton/launcher.py FD [NAME]

FD is the channel to the library inside the server, which started this process; `messages.py` has its messages. NAME is
the backend's name, which makes the process easy to find among others. The interpreter needs numpy and msgpack. moonpool
need not be installed in it, so nothing of moonpool is imported before `make_importable`. This process ends with the
server.
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


def make_importable(name: str, folder: str) -> None:
    """Make one package importable without adding its neighbours to the path."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]


def why_not() -> str | None:
    """Return the reason why this interpreter cannot run a launcher, if there is one."""
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
    """Give up everything inherited from the server but the channel: open files, process group and signals."""
    from moonpool.ipc import signals

    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= _FIRST_FD and fd != channel_fd:
            # The descriptor of the listing itself is closed already.
            with contextlib.suppress(OSError):
                os.close(fd)
    os.set_inheritable(channel_fd, False)
    # A signal to the server's process group is not for this process, which ends with the channel.
    os.setpgid(0, 0)
    signals.use_defaults()
    # A server that gets these ends its models in order, and needs this process for that.
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
        said = subprocess.run(asks, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return said.stdout.split() == [b"%d" % number for number in sys.version_info[:2]]


def main() -> int:
    """Launch until the server ends; returns the exit code."""
    channel_fd = int(sys.argv[1])
    here = os.path.dirname(os.path.realpath(__file__))
    make_importable("moonpool", os.path.dirname(os.path.dirname(here)))
    leave_server(channel_fd)
    leave_servers_python()
    reason = why_not()
    if reason is not None:
        sys.stderr.write(f"moonpool cannot be run by {sys.executable}: {reason}\n")
        return 1
    from moonpool.runtime.triton.launching import launch

    launch(channel_fd)
    return 0


if __name__ == "__main__":
    code = main()
    # sys.exit would wait for threads that are idle.
    os._exit(code)
