"""Pages as a reader follows them: the files that a page shows are saved, its programs run, and its commands are typed
in order.

The reader has the examples, also as the repository `models`, and one server at a time: the next `moonpool serve` ends
the one before. Three things differ from what the page says, for all pages alike. A server takes free ports, and
`localhost:8000` to `localhost:8002` mean these. `moonpool bench` and `moonpool tune` measure for as short as they can
where the page names no time. And what a page marks as not run is left out.

    python -m tests.pages README.md    follows a page in a bare copy of the repository, which is the working
                                       directory, lines that install something included
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.waiting import wait_until

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
# The first line of a block that is a file.
NAMED = re.compile(r"# ([\w/.-]+\.(?:py|pbtxt|toml|yml|yaml))\n")
SHELL = ("sh", "bash")
# A line that installs something. Tests have it already.
INSTALLS = re.compile(r"\bpip install\b")
# What the shell would make of a line beyond splitting it into words.
SHELL_SYNTAX = re.compile(r"[$`|&;<>(){}~]")
# Left out where it is not installed.
OPTIONAL = ("curl",)
# Given to a command unless the page gives them. A measurement of one short window does not settle, and says so.
ADDED = {
    "serve": {"--http-port": "0", "--grpc-port": "0", "--metrics-port": "0"},
    "bench": {"--seconds": "0.05", "--warm-up": "0", "--windows": "1"},
    "tune": {"--budget": "1", "--seconds": "0.05", "--warm-up": "0", "--most-callers": "1"},
    "top": {"--url": "http://localhost:8000"},
}
# Limits of measurements, which exit with 1 if they are not kept. That is no fault of the page: the machine may be busy.
LIMITS = ("--slo", "--fail-if")
SERVICES = {"8000": "HTTPService", "8001": "GRPCInferenceService", "8002": "Metrics Service"}
PATIENCE_S = 120.0

# Runs what is given as if it were typed into one session, and then loads each model that the page shows with a
# configuration.
SESSION = """
import pathlib, sys
import moonpool
from moonpool import testing

with testing.utilities():
    typed = {"__name__": "__main__"}
    for number, text in enumerate(sys.argv[1:]):
        exec(compile(text, f"block {number}", "exec"), typed)
    with moonpool.Runtime() as models:
        for file in sorted(pathlib.Path().glob("*/config.pbtxt")):
            models.load(file.parent.name, file.parent)
if "runtime" in typed:
    typed["runtime"].close()
"""


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    text: str
    is_left_out: bool
    # Nothing stands between the block before and this one, so it shows what that prints.
    is_output: bool = False

    @property
    def file(self) -> str | None:
        """The path under which a reader saves it, if its first line names one."""
        named = NAMED.match(self.text)
        return named[1] if named else None


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    page = path.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(page))
    assert 2 * len(found) == len(re.findall(r"^\s*```", page, re.MULTILINE)), "a fence is indented"
    made: list[Block] = []
    end = 0
    for each in found:
        follows = bool(made) and made[-1].language in SHELL and not made[-1].is_left_out
        is_output = follows and each["language"] == "text" and not page[end : each.start()].strip()
        made.append(Block(each["language"], each["text"], each["why"] is not None, is_output))
        end = each.end()
    return made


def shape_of(text: str) -> list[str]:
    """Return the lines of an output without its numbers and the widths of its columns."""
    lines = (re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "0", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


def lines_of(text: str) -> list[str]:
    """Return the lines of a block of commands, those that go on joined, without comments and empty ones."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def command_of(line: str) -> list[str] | None:
    """Return the words after `moonpool` of a plain command, or None if the line is the shell's."""
    if not re.match(r"(?:\.venv/bin/)?moonpool ", line):
        return None
    unquoted = re.sub(r"'[^']*'|#.*", "", line)
    return None if SHELL_SYNTAX.search(unquoted) else shlex.split(line, comments=True)[1:]


class Process(Protocol):
    """A process of `subprocess.Popen`, or one like it."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Commands(Protocol):
    """Runs moonpool's commands."""

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]: ...
    def start(self, arguments: Sequence[str], folder: Path, stdout: int, stderr: int) -> Process: ...


class Installed:
    """Runs the commands of the environment that lines of the page have made."""

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [".venv/bin/moonpool", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    def start(self, arguments: Sequence[str], folder: Path, stdout: int, stderr: int) -> Process:
        return subprocess.Popen([".venv/bin/moonpool", *arguments], cwd=folder, stdout=stdout, stderr=stderr)


class Server:
    """The server that a page has started last."""

    def __init__(self, commands: Commands, words: list[str], folder: Path) -> None:
        self._log = open(folder / "server.log", "w+", encoding="utf-8")  # noqa: SIM115
        self._process = commands.start(words, folder, self._log.fileno(), self._log.fileno())

    def text(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def is_ready(self) -> bool:
        """Wait until it is ready or has ended."""
        wait_until(lambda: " Ready" in self.text() or self._process.poll() is not None, PATIENCE_S)
        return self._process.poll() is None

    def port(self, usual: str) -> str:
        """Return the port that it has in place of the usual one."""
        found = re.search(rf"Started {SERVICES[usual]} at \S+:(\d+)", self.text())
        return found[1] if found else usual

    def close(self) -> int:
        """End it, and return its exit code."""
        try:
            self._process.send_signal(signal.SIGTERM)
            return self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._log.close()


class Reader:
    """Follows a page in a folder that has the environment `.venv`, or gets it, and notes what went wrong."""

    def __init__(self, folder: Path, commands: Commands, *, installs: bool = False) -> None:
        self.folder = folder
        # What each line, and the programs together under the name "", have printed to stdout.
        self.printed: dict[str, str] = {}
        self.complaints: list[str] = []
        self._commands = commands
        self._installs = installs
        self._server: Server | None = None
        # Those of servers that have ended.
        self.logs: list[str] = []

    def follow(self, page: list[Block]) -> list[str]:
        """Save the files of a page, run its programs and commands, and return what went wrong."""
        for block in page:
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
        runs = [block for block in page if block.file is None and not block.is_left_out]
        # They share a session, so all of them run at the place of the last one.
        programs = [block for block in runs if block.language == "python"]
        typed: list[str] = []
        try:
            for block in runs:
                if block.language in SHELL:
                    typed = lines_of(block.text)
                    for line in typed:
                        self.type(line)
                elif block.is_output:
                    said = [text for line in typed for text in shape_of(self.printed.get(line, ""))]
                    self._compare(shape_of(block.text), said)
                elif programs and block is programs[-1]:
                    self._run_programs(programs)
            if not programs and any(self.folder.glob("*/config.pbtxt")):
                self._run_programs([])
        finally:
            self._end_server()
        return self.complaints

    def type(self, line: str) -> None:
        """Run one line."""
        if INSTALLS.search(line) and not self._installs:
            return
        words = command_of(line)
        if words is None:
            program = shlex.split(line)[0]
            if program in OPTIONAL and shutil.which(program) is None:
                return
            self._ended(line, self._program("bash", "-e", "-c", self._with_ports(line)))
            return
        named = {word.partition("=")[0] for word in words}
        added = ADDED.get(words[0], {})
        words += [f"{flag}={value}" for flag, value in added.items() if flag not in named]
        if words[0] == "serve":
            self._end_server()
            self._server = Server(self._commands, words, self.folder)
            if not self._server.is_ready():
                self.complaints.append(f"{line}\n{self._server.text()}")
            return
        words = [self._with_ports(word) for word in words]
        self._ended(line, self._commands.run(words, self.folder), may_miss=not named.isdisjoint(LIMITS))

    def _with_ports(self, text: str) -> str:
        if self._server is None:
            return text
        ports = {usual: self._server.port(usual) for usual in SERVICES}
        return re.sub(r"(?<=localhost:)800[012]\b", lambda found: ports[found[0]], text)

    def _compare(self, shown: list[str], printed: list[str]) -> None:
        """Note the lines that the page shows and the commands did not print, whatever their numbers are."""
        for line in shown:
            if line not in printed:
                self.complaints.append(f"the page shows {line!r}, and this was printed: {printed}")

    def _run_programs(self, programs: list[Block]) -> None:
        texts = [block.text for block in programs]
        self._ended("", self._program(".venv/bin/python", "-c", SESSION, *texts))

    def _program(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            command, cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )

    def _ended(self, line: str, ended: subprocess.CompletedProcess[str], *, may_miss: bool = False) -> None:
        self.printed[line] = self.printed.get(line, "") + ended.stdout
        if ended.returncode not in (0, int(may_miss)) or "Traceback" in ended.stderr:
            self.complaints.append(
                f"{line or 'a program'} ended with {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
            )

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            text = server.text()
            self.logs.append(text)
            if status := server.close():
                self.complaints.append(f"the server ended with {status}\n{text}")


def main() -> str | None:
    """Follow the page that the command line names, and return what is wrong with it."""
    folder = Path.cwd()
    page = blocks(folder / sys.argv[1])
    complaints = Reader(folder, Installed(), installs=True).follow(page)
    return "\n".join(complaints) or None


if __name__ == "__main__":
    sys.exit(main())
