"""`moonpool top`, as text and in a terminal until somebody presses q."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.cli.shell import CommandLine, environment
from tests.server.page.models import write
from tests.server.page.site import Site
from tests.server.running import running
from tests.waiting import wait_until

pytestmark = pytest.mark.promise(
    "The overview",
    "`moonpool top` keeps a terminal up to date without obeying texts of models, restores "
    "it whenever it ends, and says if a server is not moonpool's.",
)

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run a server with one model."""
    with running(write(tmp_path_factory.mktemp("models"), "add_sub")) as server:
        yield Site(server)


class Watched:
    """A command in a terminal of its own, whose output is kept."""

    def __init__(
        self, cli: CommandLine, *arguments: str, rows: int = 24, columns: int = 80, has_keys: bool = True
    ) -> None:
        self.fd, end = pty.openpty()
        self._size(rows, columns)
        self.process = subprocess.Popen(
            cli.command(*arguments),
            stdin=end if has_keys else subprocess.DEVNULL,
            stdout=end,
            stderr=end,
            cwd=cli.folder,
            env=environment({"LANG": "C.UTF-8"}),
        )
        os.close(end)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        """Give the window another size. The terminal is not the process's own, so the test sends the signal."""
        self._size(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def _size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> str:
        """Return all output until now, without waiting."""
        os.set_blocking(self.fd, False)
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.fd, 1 << 16):
                self.text += data.decode(errors="replace")
        return self.text

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.read(), PATIENCE_S, repr(text))

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait(self) -> int:
        """Wait for the end and return the exit code. Output is read meanwhile, as the process may wait for that."""

        def ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_until(ended, PATIENCE_S, "the end")
        self.read()
        return self.process.returncode


@pytest.fixture
def watch(cli: CommandLine, site: Site) -> Iterator[Watched]:
    """Run `moonpool top` in a terminal."""
    watched = Watched(cli, "top", site.server.http, "--interval", "0.2")
    try:
        yield watched
    finally:
        watched.process.kill()
        watched.process.wait()
        os.close(watched.fd)


def test_where_there_is_no_terminal_it_is_shown_once(cli: CommandLine, site: Site) -> None:
    ended = cli("top", "--url", site.url)

    assert ended.returncode == 0
    assert ended.stdout.startswith("moonpool ")
    assert "add_sub:1" in ended.stdout
    assert "READY" in ended.stdout
    assert f"pid {site.model('add_sub')['instances'][0]['pid']}" in ended.stdout
    assert "\x1b" not in ended.stdout


def test_where_nobody_can_press_q_it_is_shown_once(cli: CommandLine, site: Site) -> None:
    watched = Watched(cli, "top", site.server.http, has_keys=False)
    try:
        assert watched.wait() == 0
    finally:
        watched.process.kill()
        watched.process.wait()
        os.close(watched.fd)
    assert "add_sub:1" in watched.text
    assert "\x1b[?1049h" not in watched.text


def test_it_keeps_up_and_ends_at_q(watch: Watched) -> None:
    watch.wait_for("add_sub:1")
    before = len(watch.text)
    # The server's uptime is redrawn, and little else.
    wait_until(lambda: len(watch.read()) > before, PATIENCE_S, "a change")
    watch.press("q")

    assert watch.wait() == 0
    # The terminal shows its own screen again.
    assert "\x1b[?1049l" in watch.text
    assert "Traceback" not in watch.text


def test_it_fits_a_terminal_that_shrinks(watch: Watched) -> None:
    watch.wait_for("add_sub_0")
    watch.resize(6, 40)
    watch.wait_for("…")
    watch.press("q")

    assert watch.wait() == 0


def test_i_hides_the_instances(watch: Watched) -> None:
    watch.wait_for("line 1 of 9")
    watch.press("i")
    # After a change of the window's size, everything is redrawn.
    watch.resize(20, 70)
    watch.wait_for("line 1 of 8")
    watch.press("q")

    assert watch.wait() == 0


def test_an_interrupt_or_a_signal_gives_the_terminal_back(watch: Watched) -> None:
    watch.wait_for("add_sub:1")
    watch.process.send_signal(signal.SIGTERM)

    assert watch.wait() == 128 + signal.SIGTERM
    assert "\x1b[?1049l" in watch.text


def test_a_server_that_goes_away_is_told_and_waited_for(cli: CommandLine, tmp_path: Path) -> None:
    with running(write(tmp_path / "models", "add_sub")) as server:
        watched = Watched(cli, "top", server.http, "--interval", "0.2", columns=120)
        watched.wait_for("add_sub:1")
    try:
        watched.wait_for("cannot reach")
        watched.wait_for("trying again")
        watched.press("q")
        assert watched.wait() == 0
    finally:
        watched.process.kill()
        watched.process.wait()
        os.close(watched.fd)


def test_nobody_there_is_told_in_a_sentence(cli: CommandLine) -> None:
    ended = cli("top", "127.0.0.1:1")

    assert ended.returncode == 1
    assert ended.stderr.startswith("moonpool: error: cannot reach http://127.0.0.1:1")


def test_a_server_that_does_not_speak_http_is_reported(cli: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\0\0\x18\4 something else\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listening.getsockname()[1]
        ended = cli("top", f"127.0.0.1:{port}")
        thread.join()

    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("what answers there does not speak HTTP")


@contextlib.contextmanager
def other_server(answers: dict[str, bytes]) -> Iterator[str]:
    """Run a server of something else, and return its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/v2": json.dumps({"name": "triton", "version": "2.51.0"}).encode()}, "triton 2.51.0"),
        ({"/v2": b"<html>"}, "is not a moonpool server"),
        ({}, "is not a moonpool server"),
        ({"/v2/moonpool/overview": b'{"models": [1]}'}, "another version of moonpool"),
        ({"/v2/moonpool/overview": b"[" * 100_000}, "is not a moonpool server"),
    ],
    ids=["triton", "a web page", "nothing", "another overview", "no json"],
)
def test_another_server_is_named(cli: CommandLine, answers: dict[str, bytes], words: str) -> None:
    with other_server(answers) as address:
        ended = cli("top", address)

    assert ended.returncode == 1
    assert words in ended.stderr


@pytest.mark.parametrize("arguments", [("--interval", "0"), ("ftp://x",), ("a", "b")])
def test_a_wrong_command_line_is_told(cli: CommandLine, arguments: tuple[str, ...]) -> None:
    ended: subprocess.CompletedProcess[str] = cli("top", *arguments)

    assert ended.returncode == 2
