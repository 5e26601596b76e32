"""Where the library lies, and how it comes into a directory of tritonserver's backends.

In each of these directories it lies under the name that the server asks for, beside a file that says which
interpreter runs the launcher. It is copied, not linked: a server refuses a backend that leads out of its directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from moonpool.ipc.errors import MoonpoolError

FOLDER = Path(__file__).resolve().parent
LAUNCHER = FOLDER / "launcher.py"
NAME = "moonpool"
# The backend in whose place an overlay has moonpool.
STOCK = "python"
_READABLE = 0o755
# The interpreter and the launcher, each on a line. The library looks for it beside itself.
SETTINGS = "moonpool.txt"
# In a wheel, and where it is compiled in a source tree.
_PLACES = (
    FOLDER / "libtriton_moonpool.so",
    FOLDER / "native" / "build" / "libtriton_moonpool.so",
)


class NotInstallable(MoonpoolError):
    """The library cannot be put where it is to be; the text says what to do."""


def find_library() -> Path:
    """The library of this moonpool. Raises `NotInstallable`."""
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
    """The file name that the server looks for in the directory of a backend."""
    return f"libtriton_{name}.so"


def check_backends(backends: Path) -> None:
    """Raises `NotInstallable` for what is no directory of backends."""
    if not backends.is_dir():
        raise NotInstallable(
            f"there is no directory {backends}; give the one that tritonserver has its backends in, "
            "often /opt/tritonserver/backends"
        )


def is_ours(folder: Path) -> bool:
    """Whether this is the directory of a backend that was put there by `put`."""
    return (folder / SETTINGS).is_file()


def put(folder: Path, name: str, library: Path, python: str = sys.executable) -> None:
    """Make `folder` the directory of the backend `name`, with this library in it; a server that runs keeps what it has.

    Raises `NotInstallable` where something else is there, OSError.
    """
    if folder.exists() and not is_ours(folder):
        raise NotInstallable(f"{folder} is there already, and was not made by moonpool")
    folder.mkdir(exist_ok=True)
    # The server may be another user, whatever this one's umask is.
    folder.chmod(_READABLE)
    _write(folder / SETTINGS, _settings(python).encode(), 0o644)
    _write(folder / library_of(name), library.read_bytes(), _READABLE)


def _settings(python: str) -> str:
    return f"{python}\n{LAUNCHER}\n"


def _write(path: Path, contents: bytes, mode: int) -> None:
    """Replace a file at once: a library that is mapped somewhere must not change."""
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
    """Put the backend `moonpool` beside the others; the directory that it has then. Raises `NotInstallable`."""
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
    """Where the overlay of a directory of backends is, for this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    number = hashlib.sha256(str(backends.resolve()).encode()).hexdigest()[:12]
    return Path(cache) / "moonpool" / "triton" / number


def overlay(backends: Path, library: Path, folder: Path | None = None) -> Path:
    """A directory in which moonpool is the backend `python`, and all others are as in `backends`.

    Nothing in `backends` is changed. It is made anew where it is there already.
    """
    check_backends(backends)
    folder = folder or overlay_of(backends)
    if folder.exists() and any(folder.iterdir()) and not is_ours(folder / STOCK):
        raise NotInstallable(f"{folder} is there already, and was not made by moonpool")
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
    """Remove what `install` and `overlay` have made for this directory, which may be an overlay itself; what was removed.

    Raises `NotInstallable` where something else has come to lie there, OSError.
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
    """Whether what `put` would put there is there. Raises OSError."""
    same = (folder / library_of(name)).read_bytes() == library.read_bytes()
    return same and (folder / SETTINGS).read_text() == _settings(python)
