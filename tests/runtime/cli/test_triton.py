"""`moonpool triton`: the library comes into a server's backends, and out of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.runtime.cli.shell import CommandLine
from tests.runtime.triton.library import library

from moonpool.runtime.triton import install

# The library may have to be compiled first.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def real() -> Path:
    return library()


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """A server's folder of backends: its own, and some of others."""
    for name in ("python", "onnxruntime", "vllm"):
        (tmp_path / "backends" / name).mkdir(parents=True)
    (tmp_path / "backends" / "python" / "libtriton_python.so").write_bytes(b"the server's own")
    (tmp_path / "backends" / "vllm" / "model.py").write_text("")
    return tmp_path / "backends"


@pytest.fixture
def any_library(tmp_path: Path) -> Path:
    """Nobody loads it here."""
    path = tmp_path / "any.so"
    path.write_bytes(b"any bytes")
    return path


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.promise(
    "Coming into a tritonserver (`moonpool triton`)",
    "The library is copied beside the other backends, with a file that names the interpreter "
    "and the launcher to start. A library that a server has mapped stays as it is.",
)
def test_install_puts_a_copy_and_who_is_to_be_started_beside_the_other_backends(
    cli: CommandLine, backends: Path, any_library: Path
) -> None:
    ended = cli("triton", "install", backends, "--library", any_library)

    assert (ended.returncode, ended.stderr) == (0, "")
    folder = backends / "moonpool"
    assert names(folder) == {"libtriton_moonpool.so", "moonpool.txt"}
    assert (folder / "libtriton_moonpool.so").read_bytes() == b"any bytes"
    assert not (folder / "libtriton_moonpool.so").is_symlink()
    # A server of another user must be able to read it.
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "moonpool.txt").stat().st_mode & 0o777 == 0o644
    assert (folder / "moonpool.txt").read_text().splitlines() == [sys.executable, str(install.LAUNCHER)]


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "The library is copied beside …")
def test_installing_again_replaces_the_library_and_leaves_the_mapped_one_as_it_is(
    backends: Path, any_library: Path
) -> None:
    installed = install.install(backends, any_library) / "libtriton_moonpool.so"
    with open(installed, "rb") as mapped:
        any_library.write_bytes(b"a newer one")

        install.install(backends, any_library)

        assert installed.read_bytes() == b"a newer one"
        assert mapped.read() == b"any bytes"


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "`uninstall` removes the files that …")
def test_install_leaves_a_directory_alone_that_it_did_not_make(
    cli: CommandLine, backends: Path, any_library: Path
) -> None:
    (backends / "moonpool").mkdir()

    ended = cli("triton", "install", backends, "--library", any_library)

    assert ended.returncode == 1
    assert "was not made by moonpool" in ended.stderr
    assert names(backends / "moonpool") == set()


@pytest.mark.promise(
    "Coming into a tritonserver (`moonpool triton`)",
    "In an overlay, moonpool is the backend `python`. Nothing else is changed, there or anywhere else.",
)
def test_in_an_overlay_moonpool_is_python_and_the_others_are_as_they_were(
    cli: CommandLine, backends: Path, any_library: Path, tmp_path: Path
) -> None:
    into = tmp_path / "overlay"

    ended = cli("triton", "overlay", backends, "--library", any_library, "--into", into)

    assert ended.stdout == f"{into}\n"
    assert names(into) == {"moonpool", "onnxruntime", "python", "vllm"}
    assert (into / "python" / "libtriton_python.so").read_bytes() == b"any bytes"
    assert (into / "moonpool" / "libtriton_moonpool.so").read_bytes() == b"any bytes"
    assert (into / "vllm").resolve() == backends / "vllm"
    assert (backends / "python" / "libtriton_python.so").read_bytes() == b"the server's own"


def test_an_overlay_that_is_made_again_has_what_is_there_now(backends: Path, any_library: Path, tmp_path: Path) -> None:
    into = tmp_path / "overlay"
    install.overlay(backends, any_library, into)
    (backends / "vllm").rename(backends / "trtllm")

    install.overlay(backends, any_library, into)

    assert names(into) == {"moonpool", "onnxruntime", "python", "trtllm"}


def test_an_overlay_is_made_only_where_there_is_nothing(backends: Path, any_library: Path) -> None:
    with pytest.raises(install.NotInstallable, match="was not made by moonpool"):
        install.overlay(backends, any_library, backends)


@pytest.mark.promise(
    "Coming into a tritonserver (`moonpool triton`)",
    "`uninstall` removes the files that moonpool made, and nothing else. Files and folders that "
    "somebody else made are left alone.",
)
def test_uninstall_removes_what_was_made_and_nothing_else(
    cli: CommandLine, backends: Path, any_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = names(backends)
    installed = install.install(backends, any_library)
    overlay = install.overlay(backends, any_library)

    assert install.uninstall(backends) == [overlay, installed]

    assert names(backends) == before
    assert not overlay.exists()
    ended = cli("triton", "uninstall", backends)
    assert (ended.returncode, ended.stdout) == (0, f"there is nothing of moonpool's for {backends}\n")


def test_an_overlay_elsewhere_is_uninstalled_by_its_own_name(backends: Path, any_library: Path, tmp_path: Path) -> None:
    overlay = install.overlay(backends, any_library, tmp_path / "overlay")

    assert install.uninstall(overlay) == [overlay]

    assert (backends / "vllm" / "model.py").exists()


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "`uninstall` removes the files that …")
def test_a_file_of_somebody_is_not_removed(backends: Path, any_library: Path) -> None:
    folder = install.install(backends, any_library)
    (folder / "notes.txt").write_text("mine")

    with pytest.raises(install.NotInstallable, match=r"notes\.txt"):
        install.uninstall(backends)

    assert (folder / "notes.txt").exists()


def test_a_moonpool_without_a_library_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "_PLACES", (tmp_path / "none.so",))

    with pytest.raises(install.NotInstallable, match=r"tritonserver: (run make -C|install g\+\+) "):
        install.find_library()


def test_a_directory_that_cannot_be_written_is_told(cli: CommandLine, any_library: Path) -> None:
    backends = "/sys/kernel"  # closed to root, too

    done = cli("triton", "install", backends, "--library", str(any_library))

    assert done.returncode != 0
    assert f"{backends}/moonpool cannot be written: " in done.stderr
    assert f"moonpool triton overlay {backends}" in done.stderr


def test_a_wrong_directory_is_told(cli: CommandLine, tmp_path: Path, any_library: Path) -> None:
    ended = cli("triton", "install", tmp_path / "nowhere", "--library", any_library)

    assert ended.returncode == 1
    assert "often /opt/tritonserver/backends" in ended.stderr


@pytest.mark.parametrize(
    "arguments", [["fly", "x"], ["install"], ["install", "x", "--into", "y"], ["overlay", "x", "--server", "y"]]
)
def test_a_wrong_command_line_is_told(cli: CommandLine, arguments: list[str]) -> None:
    assert cli("triton", *arguments).returncode == 2


# Check


def server_with(folder: Path, functions: str) -> Path:
    """The library of a server, as far as the names of its functions go."""
    path = folder / "libtritonserver.so"
    path.write_bytes(b"\0" + b"\0".join(name.encode() for name in functions.split()) + b"\0")
    return path


def finding(subject: str, backends: Path, library: Path, server: Path | None = None) -> install.TritonFinding:
    """Return what `check` finds out about a subject."""
    return next(each for each in install.findings(backends, library, server) if each.subject == subject)


@pytest.mark.promise(
    "Coming into a tritonserver (`moonpool triton`)",
    "`check` loads the library, starts a launcher, and names the functions that a server lacks.",
)
def test_check_finds_a_server_in_which_moonpool_works(cli: CommandLine, backends: Path, real: Path) -> None:
    needed = finding("server", backends, real, server_with(backends.parent, "")).what.partition("it has no ")[2]
    assert "TRITONBACKEND_ModelServer, " in needed
    (backends.parent / "lib").mkdir()
    server_with(backends.parent / "lib", needed.replace(",", ""))
    cli("triton", "install", backends, "--library", real)

    ended = cli("triton", "check", backends, "--library", real)

    assert ended.returncode == 0
    said = {line.split()[0]: line.split()[1] for line in ended.stdout.splitlines()}
    assert said.pop("rights") in ("yes", "?")
    assert said == dict.fromkeys(("backends", "library", "server", "installed", "interpreter"), "yes")


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "`check` loads the library, starts …")
def test_check_names_the_functions_that_a_server_has_not(
    cli: CommandLine, backends: Path, real: Path, tmp_path: Path
) -> None:
    server = server_with(tmp_path, "TRITONSERVER_ErrorNew")

    ended = cli("triton", "check", backends, "--library", real, "--server", server)

    assert ended.returncode == 1
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("server")]
    assert "is too old, or no server: it has no TRITONSERVER_ErrorDelete, " in line


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "`check` loads the library, starts …")
def test_check_says_why_a_library_cannot_be_loaded(cli: CommandLine, backends: Path, any_library: Path) -> None:
    ended = cli("triton", "check", backends, "--library", any_library)

    assert ended.returncode == 1
    assert "cannot be loaded on this machine" in ended.stdout


def test_check_finds_an_installation_of_another_moonpool(backends: Path, any_library: Path) -> None:
    folder = install.install(backends, any_library)
    (folder / "libtriton_moonpool.so").write_bytes(b"an older one")

    found = finding("installed", backends, any_library)

    assert (found.works, found.what.endswith("make it again")) == (False, True)


def test_check_finds_an_overlay(
    backends: Path, any_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = finding("installed", backends, any_library)
    assert (found.works, found.what.startswith("not yet for ")) == (None, True)
    overlay = install.overlay(backends, any_library)

    found = finding("installed", backends, any_library)
    any_library.write_bytes(b"a newer one")

    assert (found.works, found.what) == (True, str(overlay / "python"))
    assert finding("installed", backends, any_library).works is False


@pytest.mark.promise("Coming into a tritonserver (`moonpool triton`)", "`check` loads the library, starts …")
def test_check_starts_a_launcher(
    backends: Path, any_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert finding("interpreter", backends, any_library) == install.TritonFinding("interpreter", True, sys.executable)

    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    os.chmod(python, 0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    found = finding("interpreter", backends, any_library)

    assert found.works is False
    assert "it cannot import msgpack: No module named 'msgpack'" in found.what
