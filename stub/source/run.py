"""Runs source in a process that has nothing else to do: compiles and executes it, and answers with its value.

The first packet of the runtime has the limits. Then it sends one document for each run, and takes one back
(`ipc/source/values.py`). With the packet come the file for the
answer and, if there are arrays, the file that they lie in, which is mapped as a private copy.

Whatever is executed here shares this process with this file, so it may answer itself, and answer anything. It speaks
for itself only: the runtime checks the answer, and nobody else has this channel.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import inspect
import io
import linecache
import os
import resource
import signal
import stat
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import unpack
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.source import values
from moonpool.ipc.source.folders import MOST_FILES, OUT
from moonpool.stub.report import traceback_of
from moonpool.stub.source.functions import HostError, HostFunctions, mapped

SOURCE = "<source>"
_MOST_REPR = 10_000
_MOST_MESSAGE = 10_000
# What the kernel counts beside the threads of a run: the template, and the process that keeps it.
_OTHER_TASKS = 4
_LIMITS = {
    "memory": resource.RLIMIT_AS,
    "tasks": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
    "files_bytes": resource.RLIMIT_FSIZE,
}
_BY_NUMBER = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "open_files",
    errno.ENOSPC: "files_bytes",
    errno.EDQUOT: "files_bytes",
    errno.EFBIG: "files_bytes",
}
# The streams of the template: they would close their descriptors if they went.
_before: list[object] = []
_NO_THREAD = "can't start new thread"
# A text and a function, and how often a template runs them: the interpreter optimizes what ran some times.
_REHEARSED = [("y = x + 1\n(y, more)", ""), ("def add(x, more):\n    return {'y': x + 1, 'more': more}", "add")]
_INPUTS = {"x": 1, "more": [1.5, "text", b"bytes", None]}
REHEARSALS = 16


def prepare() -> None:
    """Do what all runs need, before the first one is forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        # Whole lines at once, whatever PYTHONUNBUFFERED says.
        binary = open(number, "wb", closefd=False)  # noqa: SIM115 - until the end of the process
        stream = io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        _before.append(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def rehearse(times: int = 1) -> None:
    """Run sources of moonpool's own, so that the next run finds caches filled, code that the interpreter has optimized,
    and, in a fork, the memory that it writes to.

    Leaves the folder `out`, and nothing else.
    """
    before = sys.modules["__main__"]
    for source, name in _REHEARSED * times:
        asked = values.write({"source": source, "name": name, "inputs": _INPUTS, "files": {}, "functions": []})
        # No part of either packet lies in a file.
        SourceRun().answer(values.parcel(asked, -1), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    sys.modules["__main__"] = before
    linecache.cache.pop(SOURCE, None)


class SourceRun:
    """Serves one run, or several with one namespace, until the runtime ends the process."""

    def __init__(self) -> None:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._namespace = module.__dict__
        # The files below `out/` as they were handed over, with size and time of change.
        self._handed: dict[str, tuple[int, int]] = {}
        self._runs = self._files_bytes = 0
        self._functions = HostFunctions()
        self._channel: Channel | None = None

    def serve(self, channel: Channel) -> NoReturn:
        """Run what comes. Ends the process when the runtime is gone."""
        try:
            self._channel = channel
            self._files_bytes = _limit(unpack(channel.receive()))
            while True:
                packet, fds = channel.receive_with_fds()
                channel.send_waiting(self.answer(packet, *fds))
        except MoonpoolError:
            os._exit(1)

    def answer(self, packet: bytes, answer_fd: int, *memory: int) -> bytes:
        """Run the source in a packet, and return the packet with the answer. Closes the descriptors."""
        try:
            asked = values.unpacked(packet, lambda size_bytes: mapped(memory[0], size_bytes))
        finally:
            for fd in memory:
                os.close(fd)
        value: object = None
        error: dict[str, str] | None = None
        files: dict[str, bytes] = {}
        try:
            self._runs += 1
            _write_files(asked["files"])
            self._functions.begin(self._channel if asked["functions"] else None, answer_fd)
            self._namespace.update((name, self._functions.named(name)) for name in asked["functions"])
            value = self._execute(asked["source"], asked["name"], asked["inputs"])
        except SystemExit as ended:
            if ended.code not in (None, 0):
                error = _described(ended)
        except BaseException as raised:
            error = _described(raised)
        try:
            self._functions.end()
            files, left_out = self._files_out(self._files_bytes)
            if left_out and error is None:
                error = _error("FilesTooLarge", left_out, limit="files_bytes")
        except BaseException as raised:
            error = error or _described(raised)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # the source may have put anything there
                stream.flush()
        answer = self._written(answer_fd, value, error, files)
        os.close(answer_fd)
        return answer

    def _execute(self, source: str, name: str, inputs: Mapping[str, Any]) -> object:
        """Execute the source, and return the value of its last expression, or of its function `name`."""
        file = SOURCE if self._runs == 1 else f"<source {self._runs}>"
        lines = source.splitlines(keepends=True)
        # Tracebacks show lines of files that are in this cache.
        linecache.cache[file] = (len(source), None, lines, file)
        namespace = self._namespace
        value: object = None
        if name:
            exec(compile(source, file, "exec", dont_inherit=True), namespace)
            value = namespace[name](**inputs)
        else:
            namespace.update(inputs)
            tree: Any = compile(source, file, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, file, "exec", dont_inherit=True), namespace)
            if last is not None:
                expression = ast.Expression(last.value)
                value = eval(compile(expression, file, "eval", dont_inherit=True), namespace)
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        return value

    def _written(self, fd: int, value: object, error: dict[str, str] | None, files: dict[str, bytes]) -> bytes:
        """Write the answer, with the value's text in its place if the value does not travel."""
        answer: dict[str, object] = {"value": value, "is_repr": False, "error": error, "files": files}
        try:
            written = values.write(answer)
        except BaseException:  # what makes a value into another one may be the source's own
            answer.update(value=_text_of(value), is_repr=True)
            written = values.write(answer)
        try:
            return values.parcel(written, fd)
        except OSError as too_large:
            if error is None:
                what = f"the value and the files take {written.size_bytes} bytes: {too_large.strerror}"
                error = _error("ValueTooLarge", what, limit="files_bytes")
            answer.update(value=None, is_repr=False, error=error, files={})
            return values.parcel(values.write(answer), fd)

    def _files_out(self, most_bytes: int) -> tuple[dict[str, bytes], str]:
        """Return the files below `out/` that are new or have changed, and a sentence about those that are left out."""
        files: dict[str, bytes] = {}
        left_bytes = most_bytes
        for folder, _, names in os.walk(OUT):
            for name in names:
                path = os.path.join(folder, name)
                found = os.lstat(path)
                if not stat.S_ISREG(found.st_mode):
                    continue
                mark = (found.st_size, found.st_mtime_ns)
                shown = os.path.relpath(path, OUT)
                if self._handed.get(shown) == mark:
                    continue
                if found.st_size > left_bytes or len(files) >= MOST_FILES:
                    what = f"are more than {MOST_FILES} files or {most_bytes} bytes"
                    return files, f"{OUT}/{shown:.200} and the files after it {what}"
                with open(path, "rb", opener=_open_no_link) as file:
                    files[shown] = file.read(left_bytes)
                left_bytes -= len(files[shown])
                self._handed[shown] = mark
        return files, ""


def _open_no_link(path: str, flags: int) -> int:
    # Nobody waits for the other end of a pipe that has taken the file's place.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _limit(limits: Mapping[str, int]) -> int:
    """Put on the limits of this process, which cannot be raised again. Returns `files_bytes`."""
    # The file for the answer has room for texts beside the value and the files, which may take all that they may.
    beside = {"tasks": _OTHER_TASKS, "files_bytes": values.BESIDE_BYTES}
    for name, which in _LIMITS.items():
        value = limits[name] + beside.get(name, 0)
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    return limits["files_bytes"]


def _write_files(files: Mapping[str, bytes]) -> None:
    os.makedirs(OUT, exist_ok=True)
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _text_of(value: object) -> str:
    try:
        return repr(value)[:_MOST_REPR]
    except BaseException as error:  # it is the source's own
        return f"<{type(value).__name__:.100}, whose repr raised {type(error).__name__:.100}>"


def _described(error: BaseException) -> dict[str, str]:
    limit = "memory" if isinstance(error, MemoryError) else ""
    if isinstance(error, OSError):
        limit = _BY_NUMBER.get(error.errno or 0, "")
    try:
        message = str(error)[:_MOST_MESSAGE]
    except BaseException as second:
        message = f"<no text: {type(second).__name__:.100}>"
    if isinstance(error, RuntimeError) and message == _NO_THREAD:
        limit = "tasks"
    if isinstance(error, HostError):
        limit = error.limit
    if isinstance(error, SyntaxError):
        with contextlib.suppress(BaseException):
            return _error(
                type(error).__name__, message, "".join(traceback.format_exception_only(type(error), error)), limit
            )
    return _error(type(error).__name__, message, traceback_of(error), limit)


def _error(name: str, message: str, traceback: str = "", limit: str = "") -> dict[str, str]:
    texts = {"type": name, "message": message, "traceback": traceback, "limit": limit}
    return {key: str(text)[: 4 * _MOST_MESSAGE] for key, text in texts.items()}
