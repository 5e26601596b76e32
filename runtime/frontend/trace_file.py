"""Traces in files, in Triton's JSON form."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.runtime.frontend.trace import Trace

_log = logging.getLogger("moonpool")


class TraceFile:
    """One file, or a row of files of so many traces each. Any thread may call any method.

    A file is a list in JSON whenever somebody reads it: every trace is added as soon as it is finished.
    """

    def __init__(self, path: str) -> None:
        """Files are made when they are needed, and one that is there from before is written anew."""
        self._path = path
        self._lock = threading.Lock()
        self._file: Any = None
        self._index = 0
        self._count = 0
        self._has_failed = False

    def write(self, trace: Trace) -> None:
        """Add it. Where that cannot be it is lost, which the log says once."""
        rows = ",".join(json.dumps(row, separators=(",", ":")) for row in rows_of(trace))
        with self._lock:
            try:
                self._add(rows, trace.log_frequency)
                self._has_failed = False
            except OSError as error:
                self._give_up_file()
                if not self._has_failed:
                    self._has_failed = True
                    _log.error("traces cannot be written to %r: %s", self._path, error)

    def _add(self, rows: str, log_frequency: int) -> None:
        if log_frequency and self._count >= log_frequency:
            self._give_up_file()
        if self._file is None:
            path = self._path
            if log_frequency:
                path = f"{path}.{self._index}"
                self._index += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            # The user may have named a pipe, and nobody is to wait here for who reads it.
            fd = os.open(path, flags | os.O_NONBLOCK, 0o644)
            self._file = os.fdopen(fd, "wb", buffering=0)
            self._file.write(b"[" + rows.encode() + b"]")
        else:
            self._file.seek(-1, os.SEEK_END)
            self._file.write(b"," + rows.encode() + b"]")
        self._count += 1

    def _give_up_file(self) -> None:
        file, self._file, self._count = self._file, None, 0
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close the file; it is whole."""
        with self._lock:
            self._give_up_file()


def rows_of(trace: Trace) -> list[dict[str, object]]:
    """The entries of one trace, in order of time, with what it is of before the first of the model's."""
    number = trace.number
    entries: list[tuple[int, dict[str, object]]] = [
        (ns, {"id": number, "timestamps": [{"name": activity, "ns": ns}]})
        for activity, ns in trace.marks
    ]
    for activity, name, datatype, shape, data, ns in trace.tensors:
        tensor = {"name": name, "data": data, "shape": shape, "dtype": datatype}
        entries.append((ns, {"id": number, "activity": activity, "tensor": tensor}))
    entries.sort(key=lambda entry: entry[0])
    rows = [row for _, row in entries]
    head: dict[str, object] = {
        "id": number,
        "model_name": trace.model.name,
        "model_version": trace.model.version,
    }
    if trace.request_id:
        head["request_id"] = trace.request_id
    if trace.parent is not None:
        head["parent_id"] = trace.parent.number
    starts = [ns for activity, ns in trace.marks if activity == "REQUEST_START"]
    before = sum(1 for ns, _ in entries if starts and ns < starts[0])
    rows.insert(before, head)
    return rows
