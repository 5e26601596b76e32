"""Whether moonpool will work as a backend of a tritonserver, and why not: tried, as far as that is possible without it."""

from __future__ import annotations

import mmap
import os
import select
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import PeerGone, ProtocolError
from moonpool.ipc.messages import PROTOCOL_VERSION
from moonpool.runtime.triton import installation
from moonpool.runtime.triton.installation import NotInstallable
from moonpool.runtime.triton.messages import LAUNCHER_VERSION, End
from moonpool.runtime.triton.post import Post

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TRIAL_S = 60.0
# Loads the library as a server does, and says which functions it needs of one.
_LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], 2)
names = ctypes.c_char.in_dll(library, "moonpool_required_functions")
print(ctypes.string_at(ctypes.addressof(names)).decode())
"""
# From a directory of backends: in NVIDIA's containers, and in the wheel that brings a server along.
_SERVERS = ("../lib/libtritonserver.so", "../../../nvidia_pytriton.libs/libtritonserver*.so*")


@dataclass(frozen=True, slots=True)
class Finding:
    """`works` is None where it could not be found out, or depends on the server's user."""

    subject: str
    works: bool | None
    what: str


def findings(backends: Path, library: Path | None, server: Path | None) -> Iterator[Finding]:
    """One for each thing that must hold. `library` and `server` are looked for where they are not given."""
    yield _backends(backends)
    try:
        library = library or installation.find_library()
    except NotInstallable as error:
        yield Finding("library", False, str(error))
    else:
        needed = _needed(library)
        if isinstance(needed, Finding):
            yield needed
        else:
            yield Finding("library", True, f"{library} can be loaded on this machine")
            yield _server(server or _find_server(backends), needed)
        yield from _installed(backends, library)
    yield _launcher()
    yield _rights()


def _backends(backends: Path) -> Finding:
    try:
        installation.check_backends(backends)
    except NotInstallable as error:
        return Finding("backends", False, str(error))
    if not os.access(backends, os.W_OK):
        what = (
            f"{backends} cannot be written to by this user: install as its owner, or use an overlay"
        )
        return Finding("backends", None, what)
    return Finding("backends", True, str(backends))


def _needed(library: Path) -> list[str] | Finding:
    ended = subprocess.run(
        [sys.executable, "-I", "-c", _LOAD, library], capture_output=True, text=True, check=False
    )
    if ended.returncode == 0:
        return ended.stdout.split()
    why = (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1]
    return Finding("library", False, f"{library} cannot be loaded on this machine: {why}")


def _find_server(backends: Path) -> Path | None:
    for pattern in _SERVERS:
        base = backends
        while pattern.startswith("../"):
            base, pattern = base.parent, pattern[3:]
        for found in sorted(base.glob(pattern)):
            return found
    return None


def _server(server: Path | None, needed: Sequence[str]) -> Finding:
    """The server's library is not loaded, which would take its GPU libraries along: its names are looked for."""
    if server is None:
        what = "no libtritonserver was found beside the backends; name it with --server"
        return Finding("server", None, what)
    try:
        with open(server, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            missing = [name for name in needed if text.find(f"\0{name}\0".encode()) < 0]
    except (OSError, ValueError) as error:
        return Finding("server", False, f"{server} cannot be read: {error}")
    if missing:
        what = f"{server} is too old, or no server: it has no {', '.join(missing)}"
        return Finding("server", False, what)
    return Finding("server", True, f"{server} has all {len(needed)} functions that are needed")


def _installed(backends: Path, library: Path) -> Iterator[Finding]:
    overlay = installation.overlay_of(backends) / installation.STOCK
    found = [each for each in (backends / installation.NAME, overlay) if installation.is_ours(each)]
    for folder in found:
        try:
            is_same = installation.is_up_to_date(folder, folder.name, library)
        except OSError as error:
            yield Finding("installed", False, f"{folder} cannot be read: {error}")
            continue
        what = "" if is_same else " is of another moonpool or interpreter than this; make it again"
        yield Finding("installed", is_same, f"{folder}{what}")
    if not found:
        yield Finding(
            "installed", None, f"not yet for {backends}: `install` or `overlay` does that"
        )


def _launcher() -> Finding:
    """Start one as the library does, and hear what it says."""
    channel, end = Channel.pair()
    with end:
        process = subprocess.Popen(
            [sys.executable, "-I", installation.LAUNCHER, str(end.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(end.fileno(),),
        )
    post = Post(channel, End.SHIM)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        if not poll.poll(_TRIAL_S * 1000):
            process.kill()
        (_, version, protocol, _, _), _ = post.hear()
        spoken = (version, protocol) == (LAUNCHER_VERSION, PROTOCOL_VERSION)
        what = sys.executable if spoken else f"{sys.executable} runs another moonpool"
    except (PeerGone, ProtocolError):
        spoken, what = False, ""
    finally:
        post.close()
        _, errors = process.communicate()
    return Finding("interpreter", spoken, what or errors.decode(errors="replace").strip())


def _rights() -> Finding:
    """Servers often run as another user than whoever installs."""
    for path in (Path(sys.executable), Path(sys.executable).resolve(), installation.LAUNCHER):
        for folder in path.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                what = f"a server of another user cannot start {path}: {folder} is closed to others"
                return Finding("rights", None, what)
    return Finding("rights", True, "servers of every user can start the interpreter")
