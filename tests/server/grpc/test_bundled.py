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
from tests.server.running import running, starting

from moonpool.runtime.server import grpc as package

pytestmark = pytest.mark.promise(
    "The package",
    "A wheel has a copy of nghttp2, with its license, if it was built where there is one. gRPC is served over it where "
    "the "
    "system has none, and else over the system's.",
)
HERE = Path(package.__file__).parent
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
        if not (HERE / "libnghttp2.so.14").exists():
            assert server.wait() == 1
            assert "gRPC needs nghttp2: " in server.text()
            assert "install it (Debian and Ubuntu: libnghttp2-14" in server.text()
            assert "serve HTTP alone (--allow-grpc=false)" in server.text()
            return
        server.wait_for("Ready", TIMEOUT_S)
        with grpc.insecure_channel(server.grpc) as channel:
            assert channel.unary_unary(LIVE)(b"", timeout=TIMEOUT_S)
        assert f"gRPC is served over {HERE}/libnghttp2.so.14" in server.text()


@pytest.mark.promise(
    "gRPC",
    "Without nghttp2 or a compiler there is no gRPC: the server does not start, and says what to install. It serves "
    "HTTP alone with `--allow-grpc=false`.",
)
def test_http_alone_needs_no_library(tmp_path: Path) -> None:
    hide = (*HIDE, library_of_the_system())
    tried = subprocess.run([*hide, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file can be hidden here: {tried.stderr.strip()}")
    write(tmp_path, "echo")
    with running(tmp_path, "--allow-grpc=false", before=hide, serves=("http", "metrics")) as server:
        assert server.get("/v2/models/echo/ready")[0] == 200


@pytest.mark.promise("gRPC", "Without nghttp2 or a compiler there …")
def test_without_compiled_code_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("no module")

    monkeypatch.setattr(package, "load", fail)
    with pytest.raises(package.MissingHttp2, match="no module; install a C\\+\\+ compiler, and moonpool again"):
        package.open_nghttp2()


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
        made, _ = package.open_nghttp2()
        assert made is object
    else:
        with pytest.raises(package.MissingHttp2, match="no such file; install it"):
            package.open_nghttp2()
    assert tried == opened
