"""The process that reads an archive: it may do nothing else, and nothing that it says is believed."""

from __future__ import annotations

import io
import json
import struct
import tempfile
import threading
from pathlib import Path

import pytest
from tests.runtime.repository.unpacking import unpack

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import archive
from moonpool.stub.sandbox import landlock

pytestmark = pytest.mark.promise("Environments", "The memory, disk and time that an …")


def message(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<cI", kind, len(data)) + data


def member(*fields: object) -> bytes:
    return message(b"m", json.dumps(fields).encode())


def replaced(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let another program read archives, which has the pipe as `pipe`."""
    program = folder / "reader.py"
    program.write_text(f"import os, signal, sys\npipe = int(sys.argv[2])\n{code}\n")
    monkeypatch.setattr(archive, "_READER", str(program))


FILE = member("f", "file", 0o644, "")


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (b"", r"the process that reads it ended too early \(exited with 0\)"),
        (FILE + message(b"d", b"x"), "ended too early"),
        (message(b"d", b"x" * 100)[:50], "ended too early"),
        (struct.pack("<cI", b"m", 1 << 31), "a message that is too long"),
        (member("../f", "file", 0o644, ""), r"Path contains '\.\.'"),
        (member("f", "door", 0, ""), "'f' is a door, not a file"),
        (member("l", "symlink", 0, "a\0b"), "has a member that cannot be written"),
        (member("\ud800", "file", 0, ""), "has a member that cannot be written"),
        (member("f", "file", 0), "has a member that cannot be written"),
        (member("f", "file", 0.5, ""), "has a member that cannot be written"),
        (message(b"m", b"5"), "has a member that cannot be written"),
        (message(b"m", b"[" * 100_000), "has a member that cannot be written"),
        (message(b"m", b"\xff"), "has a member that cannot be written"),
        (message(b"d", b"x"), "has a member that cannot be written"),
        (FILE + message(b"e", b"no \x1b[31m" + b"x" * 9999), r"no \\x1b\[31mx+$"),
    ],
)
def test_what_it_says_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, what: str) -> None:
    (tmp_path / "said").write_bytes(said)
    (tmp_path / "in").mkdir()
    replaced(monkeypatch, tmp_path, f"os.write(pipe, open({str(tmp_path / 'said')!r}, 'rb').read())")

    with pytest.raises(BadEnvironment, match=what) as caught:
        unpack(io.BytesIO(), tmp_path / "in")

    assert len(str(caught.value)) < 1000
    assert set(tmp_path.iterdir()) == {tmp_path / name for name in ("in", "said", "reader.py")}


def test_its_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGXCPU)")

    with pytest.raises(BadEnvironment, match=r"ended too early \(killed by SIGXCPU\)"):
        unpack(io.BytesIO(), tmp_path)


def test_a_load_that_is_given_up_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, tmp_path, "signal.pause()")
    stop = threading.Event()
    stop.set()

    with tempfile.TemporaryFile() as file, pytest.raises(BadEnvironment, match="the load was given up"):
        archive.unpack(file, tmp_path, stop=stop)


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, tmp_path, "signal.pause()")
    monkeypatch.setattr(archive, "MOST_S", 0)

    with pytest.raises(BadEnvironment, match="cannot be unpacked in 0 s"):
        unpack(io.BytesIO(), tmp_path)


CONFINED = """
import json, runpy, socket, struct
archive = runpy.run_path({reader!r}, run_name="archive")
archive["_confine"](*map(int, sys.argv[3:]))
done = []
def attempt(what, act):
    try:
        act()
    except OSError:
        return
    done.append(what)
attempt("reads", lambda: open("/etc/passwd"))
attempt("lists", lambda: os.listdir("/"))
attempt("writes", lambda: open({folder!r} + "/x", "w"))
attempt("connects", socket.socket)
attempt("forks", lambda: os.fork() or os._exit(0))
attempt("executes", lambda: os.execv("/bin/true", ["true"]))
attempt("signals", lambda: os.kill(os.getppid(), 0))
said = json.dumps(done).encode()
os.write(pipe, struct.pack("<cI", b"e", len(said)) + said)
"""


@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
def test_it_may_do_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, tmp_path, CONFINED.format(reader=archive._READER, folder=str(tmp_path)))

    with pytest.raises(BadEnvironment, match=r"^\[\]$"):
        unpack(io.BytesIO(), tmp_path)
