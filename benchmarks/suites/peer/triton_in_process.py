"""Triton's server in the caller's process, through its C API: the quickest way to its Python backend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from moonpool.benchmarks.hosts.kserve import TritonFiles
from moonpool.benchmarks.suites.hosted import folders_of
from moonpool.benchmarks.suites.peer.peer import Peer, Unavailable

_SOURCE = Path(__file__).with_name("triton_caller.c")


class TritonInProcess(Peer):
    """A caller in C, so that no Python runs between it and the server."""

    def __init__(self) -> None:
        self._files = TritonFiles(Path(sys.executable), folders_of(("add_sub",)))
        try:
            self._process = self._start()
        except BaseException:
            self._files.remove()
            raise

    def _start(self) -> subprocess.Popen[str]:
        compiler = shutil.which("cc")
        if compiler is None:
            raise Unavailable("its caller is a C program, and there is no C compiler (cc)")
        program = self._files.folder / "caller"
        libraries = f"-Wl,-rpath,{self._files.libraries}"
        command: list[str | Path] = [compiler, "-O2", "-o", program, _SOURCE, self._files.library, libraries]
        link = ["-Wl,--allow-shlib-undefined", "-lpthread"]
        built = subprocess.run([*command, *link], capture_output=True, text=True, check=False)
        if built.returncode:
            raise Unavailable(f"its caller cannot be built: {built.stderr.splitlines()[-1]}")
        log = (self._files.folder / "log").open("w+")
        with log:
            process = subprocess.Popen(
                [program, self._files.repository, self._files.backends],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._files.environment(),
            )
            if process.stdout is None or process.stdout.readline() != "ready\n":
                process.communicate()
                log.seek(0)
                said = " ".join(log.read().split())[-300:]
                raise Unavailable(f"the server did not start: {said}")
        return process

    def _ask(self, elements: int, calls: int, in_flight: int) -> list[int]:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the caller has no pipes")
        process.stdin.write(f"{elements} {calls} {in_flight}\n")
        process.stdin.flush()
        answer = [int(word) for word in process.stdout.readline().split()]
        if not answer:
            raise ValueError("Triton's caller has ended")
        return answer

    def times_us(self, elements: int, count: int) -> list[float]:
        # The first call after a change of size makes Triton grow its memory.
        return [ns / 1000 for ns in self._ask(elements, count + 1, 1)[2:]]

    def rate(self, callers: int, total: int) -> float:
        return total / (self._ask(4, total, callers)[0] / 1e9)

    def close(self) -> None:
        self._process.communicate()
        self._files.remove()
