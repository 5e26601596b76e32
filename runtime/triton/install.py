"""Installs the library for tritonserver into a directory of backends, removes it, and checks that it will work.

The directory of a backend holds the library, under the name that the server looks for, and a file that names the
interpreter for the launcher. The library is copied, not linked, because a server refuses a backend that leads out of
its directory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import MoonpoolError, PeerGone, ProtocolError
from moonpool.ipc.messages import PROTOCOL_VERSION
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.messages import LAUNCHER_VERSION, End

FOLDER = Path(__file__).resolve().parent
LAUNCHER = FOLDER / "launcher.py"
NAME = "moonpool"
# The backend that moonpool replaces in an overlay.
STOCK = "python"
_READABLE = 0o755
# The file has the paths of the interpreter and of the launcher, each on a line. The library looks for it beside itself.
SETTINGS = "moonpool.txt"
# The places of the library: in a wheel, and in a source tree that compiled it.
_PLACES = (FOLDER / "libtriton_moonpool.so", FOLDER / "native" / "build" / "libtriton_moonpool.so")


class NotInstallable(MoonpoolError):
    """The library cannot be installed. The text says what to do."""


def find_library() -> Path:
    """Return the path of this moonpool's library. Raises `NotInstallable`."""
    for place in _PLACES:
        if place.is_file():
            return place
    native = FOLDER / "native"
    if (native / "Makefile").is_file():
        how = f"run make -C {native}"
    else:
        how = "install g++ and make, and moonpool anew from its source (pip install --force-reinstall --no-deps PATH)"
    raise NotInstallable(f"this moonpool has no library for tritonserver: {how}")


def library_of(name: str) -> str:
    """Return the file name that the server looks for in the directory of a backend."""
    return f"libtriton_{name}.so"


def check_backends(backends: Path) -> None:
    """Raise `NotInstallable` if there is no directory at this path."""
    if not backends.is_dir():
        raise NotInstallable(
            f"there is no directory {backends}; give the one that tritonserver has its backends in, "
            "often /opt/tritonserver/backends"
        )


def is_ours(folder: Path) -> bool:
    """Return True if `put` has made this directory of a backend."""
    return (folder / SETTINGS).is_file()


def put(folder: Path, name: str, library: Path, python: str = sys.executable) -> None:
    """Make `folder` the directory of the backend `name`, with this library. A running server keeps its old library.

    Raises `NotInstallable` if the folder is not moonpool's, and OSError.
    """
    if folder.exists() and not is_ours(folder):
        raise NotInstallable(f"{folder} exists already, and was not made by moonpool")
    folder.mkdir(exist_ok=True)
    # The server may run as another user, who must be able to read this whatever the umask is.
    folder.chmod(_READABLE)
    _write(folder / SETTINGS, _settings(python).encode(), 0o644)
    _write(folder / library_of(name), library.read_bytes(), _READABLE)


def _settings(python: str) -> str:
    return f"{python}\n{LAUNCHER}\n"


def _write(path: Path, contents: bytes, mode: int) -> None:
    """Replace a file by renaming a new one. A library that a server has mapped must not change."""
    fd, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(fd, "wb") as file:
            file.write(contents)
        os.chmod(made, mode)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def install(backends: Path, library: Path) -> Path:
    """Put the backend `moonpool` beside the others, and return its directory. Raises `NotInstallable`."""
    check_backends(backends)
    folder = backends / NAME
    try:
        put(folder, NAME, library)
    except OSError as error:
        raise NotInstallable(
            f"{folder} cannot be written: {error.strerror}; do so as the owner of {backends}, or make an "
            f"overlay, which writes nothing there: moonpool triton overlay {backends}"
        ) from error
    return folder


def overlay_of(backends: Path) -> Path:
    """Return the usual place for this user's overlay of a directory of backends."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    number = hashlib.sha256(str(backends.resolve()).encode()).hexdigest()[:12]
    return Path(cache) / "moonpool" / "triton" / number


def overlay(backends: Path, library: Path, folder: Path | None = None) -> Path:
    """Make a directory in which moonpool is the backend `python`, and all others are those of `backends`.

    An overlay that exists is made again. Nothing in `backends` is changed.
    """
    check_backends(backends)
    folder = folder or overlay_of(backends)
    if folder.exists() and any(folder.iterdir()) and not is_ours(folder / STOCK):
        raise NotInstallable(f"{folder} exists already, and was not made by moonpool")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(_READABLE)
    for old in folder.iterdir():
        if old.is_symlink():
            old.unlink()
    for name in (STOCK, NAME):
        put(folder / name, name, library)
    for backend in sorted(backends.resolve().iterdir()):
        if backend.name not in (STOCK, NAME):
            (folder / backend.name).symlink_to(backend)
    return folder


def uninstall(backends: Path) -> list[Path]:
    """Undo `install` and `overlay` for this directory, which may be an overlay itself. Return what was removed.

    Raises `NotInstallable` if there are files of others, and OSError.
    """
    removed = []
    for folder in (backends, overlay_of(backends)):
        if is_ours(folder / STOCK):
            _remove_overlay(folder)
            removed.append(folder)
    if is_ours(backends / NAME):
        _remove(backends / NAME, NAME)
        removed.append(backends / NAME)
    return removed


def _remove_overlay(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_symlink():
            each.unlink()
    for name in (STOCK, NAME):
        _remove(folder / name, name)
    folder.rmdir()


def _remove(folder: Path, name: str) -> None:
    others = sorted({each.name for each in folder.iterdir()} - {SETTINGS, library_of(name)})
    if others:
        raise NotInstallable(f"{folder} has files that are not moonpool's: {', '.join(others)}")
    shutil.rmtree(folder)


def is_up_to_date(folder: Path, name: str, library: Path, python: str = sys.executable) -> bool:
    """Return True if the folder already has what `put` would write. Raises OSError."""
    same = (folder / library_of(name)).read_bytes() == library.read_bytes()
    return same and (folder / SETTINGS).read_text() == _settings(python)


_TRIAL_S = 60.0
# A program that loads the library as a server does, and prints the functions that it needs of the server.
_LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], 2)
names = ctypes.c_char.in_dll(library, "moonpool_required_functions")
print(ctypes.string_at(ctypes.addressof(names)).decode())
"""
# Paths of the server's library from a directory of backends: in NVIDIA's containers, and in the wheel with a server.
_SERVERS = ("../lib/libtritonserver.so", "../../../nvidia_pytriton.libs/libtritonserver*.so*")


@dataclass(frozen=True, slots=True)
class TritonFinding:
    """The result of one check. `works` is None if it is unknown, or depends on the server's user."""

    subject: str
    works: bool | None
    what: str


def findings(backends: Path, library: Path | None, server: Path | None) -> Iterator[TritonFinding]:
    """Check everything that must hold. Without `library` or `server`, search for it."""
    yield _backends(backends)
    try:
        library = library or find_library()
    except NotInstallable as error:
        yield TritonFinding("library", False, str(error))
    else:
        needed = _needed(library)
        if isinstance(needed, TritonFinding):
            yield needed
        else:
            yield TritonFinding("library", True, f"{library} can be loaded on this machine")
            yield _server(server or _find_server(backends), needed)
        yield from _installed(backends, library)
    yield _launcher()
    yield _rights()


def _backends(backends: Path) -> TritonFinding:
    try:
        check_backends(backends)
    except NotInstallable as error:
        return TritonFinding("backends", False, str(error))
    if not os.access(backends, os.W_OK):
        what = f"{backends} cannot be written to by this user: install as its owner, or use an overlay"
        return TritonFinding("backends", None, what)
    return TritonFinding("backends", True, str(backends))


def _needed(library: Path) -> list[str] | TritonFinding:
    ended = subprocess.run([sys.executable, "-I", "-c", _LOAD, library], capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return ended.stdout.split()
    why = (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1]
    return TritonFinding("library", False, f"{library} cannot be loaded on this machine: {why}")


def _find_server(backends: Path) -> Path | None:
    for pattern in _SERVERS:
        base = backends
        while pattern.startswith("../"):
            base, pattern = base.parent, pattern[3:]
        for found in sorted(base.glob(pattern)):
            return found
    return None


def _server(server: Path | None, needed: Sequence[str]) -> TritonFinding:
    """Search the server's library for names of functions. Loading it would load its GPU libraries, too."""
    if server is None:
        what = "no libtritonserver was found beside the backends; name it with --server"
        return TritonFinding("server", None, what)
    try:
        with open(server, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            missing = [name for name in needed if text.find(f"\0{name}\0".encode()) < 0]
    except (OSError, ValueError) as error:
        return TritonFinding("server", False, f"{server} cannot be read: {error}")
    if missing:
        what = f"{server} is too old, or no server: it has no {', '.join(missing)}"
        return TritonFinding("server", False, what)
    return TritonFinding("server", True, f"{server} has all {len(needed)} functions that are needed")


def _installed(backends: Path, library: Path) -> Iterator[TritonFinding]:
    overlay = overlay_of(backends) / STOCK
    found = [each for each in (backends / NAME, overlay) if is_ours(each)]
    for folder in found:
        try:
            is_same = is_up_to_date(folder, folder.name, library)
        except OSError as error:
            yield TritonFinding("installed", False, f"{folder} cannot be read: {error}")
            continue
        what = "" if is_same else " is of another moonpool or interpreter than this; make it again"
        yield TritonFinding("installed", is_same, f"{folder}{what}")
    if not found:
        yield TritonFinding("installed", None, f"not yet for {backends}: `install` or `overlay` does that")


def _launcher() -> TritonFinding:
    """Start a launcher as the library does, and read its HELLO."""
    channel, end = Channel.pair()
    with end:
        process = subprocess.Popen(
            [sys.executable, "-I", LAUNCHER, str(end.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(end.fileno(),),
        )
    peer = LauncherChannel(channel, End.SHIM)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        if not poll.poll(_TRIAL_S * 1000):
            process.kill()
        (_, version, protocol, _, _), _ = peer.receive()
        spoken = (version, protocol) == (LAUNCHER_VERSION, PROTOCOL_VERSION)
        what = sys.executable if spoken else f"{sys.executable} runs another moonpool"
    except (PeerGone, ProtocolError):
        spoken, what = False, ""
    finally:
        peer.close()
        _, errors = process.communicate()
    return TritonFinding("interpreter", spoken, what or errors.decode(errors="replace").strip())


def _rights() -> TritonFinding:
    """Check that other users can reach the interpreter, since servers often run as another user."""
    for path in (Path(sys.executable), Path(sys.executable).resolve(), LAUNCHER):
        for folder in path.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                what = f"a server of another user cannot start {path}: {folder} is closed to others"
                return TritonFinding("rights", None, what)
    return TritonFinding("rights", True, "servers of every user can start the interpreter")
