"""nghttp2 in the wheel: gRPC is served over it where the system has none."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from tests.server.grpc.frames import LIVE
from tests.server.grpc.serving import TIMEOUT_S
from tests.server.repositories import write
from tests.server.running import starting

from moonpool.runtime.server import grpc as package
from moonpool.runtime.server.grpc import port

pytestmark = pytest.mark.promise(
    "The package",
    "A wheel has a copy of nghttp2, with its license, if it was built where there is one. gRPC is served over it where the "
    "system has none, and else over the system's.",
)
HERE = Path(port.__file__).parent
# An empty file lies over the library, as root of a namespace of its own may arrange.
HIDE = (
    "unshare",
    *(("--mount",) if os.geteuid() == 0 else ("--map-root-user", "--mount")),
    "sh",
    "-ec",
    'mount --bind /dev/null "$0"; exec "$@"',
)


def library_of_the_system() -> str:
    """Return the path of the library that this process would open."""
    ctypes.CDLL("libnghttp2.so.14")
    maps = Path("/proc/self/maps").read_text().splitlines()
    (found,) = {line.split(maxsplit=5)[5] for line in maps if "/libnghttp2.so" in line}
    return found


def test_grpc_is_served_where_the_system_has_no_library(tmp_path: Path) -> None:
    hide = (*HIDE, library_of_the_system())
    tried = subprocess.run([*hide, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file can be hidden here: {tried.stderr.strip()}")
    write(tmp_path, "echo")
    with starting(tmp_path, before=hide) as server:
        server.wait_for("Ready", TIMEOUT_S)
        with grpc.insecure_channel(server.grpc) as channel:
            assert channel.unary_unary(LIVE)(b"", timeout=TIMEOUT_S)
        if (HERE / "libnghttp2.so.14").exists():
            assert f"gRPC is served over {HERE}/libnghttp2.so.14" in server.text()
        else:
            assert "gRPC is served by grpcio" in server.text()


def test_a_wheel_has_the_library_and_its_license() -> None:
    if (HERE / "_http2.cpp").exists():
        assert not (HERE / "libnghttp2.so.14").exists(), "an installation in place has no copy"
        return
    assert (HERE / "libnghttp2.so.14").read_bytes()[:4] == b"\x7fELF"
    assert "Tatsuhiro Tsujikawa" in (HERE / "libnghttp2.LICENSE").read_text()


@pytest.mark.parametrize(
    ("there", "copies", "opened"),
    [
        (True, True, ["libnghttp2.so.14"]),
        (False, True, ["libnghttp2.so.14", "copy"]),
        (False, False, ["libnghttp2.so.14"]),
    ],
)
def test_the_system_s_library_goes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool, copies: bool, opened: list[str]
) -> None:
    tried: list[str] = []

    def open_library(name: str) -> None:
        tried.append(Path(name).name)
        if not (there or name == str(tmp_path / "copy")):
            raise OSError("no such file")

    if copies:
        (tmp_path / "copy").touch()
    extension = SimpleNamespace(open_library=open_library, Session=object)
    monkeypatch.setattr(package, "_BUNDLED", tmp_path / "copy")
    monkeypatch.setattr(package, "load", lambda _: extension)
    if there or copies:
        made: object = port.nghttp2()
        assert made is object
    else:
        with pytest.raises(OSError, match="no such file"):
            port.nghttp2()
    assert tried == opened
