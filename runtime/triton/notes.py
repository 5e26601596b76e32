"""The launcher's log, as lines of the server's log.

A note is always one line, as in the log of moonpool's own server. The exception is the traceback of a failed load of a
model that is not contained. It keeps its lines, as in Triton's own backend; such a model could write to the server's
log anyway.
"""

from __future__ import annotations

import logging
import sys

from moonpool.ipc.messages import beginning
from moonpool.runtime.process.terminal import one_line
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.messages import Word

# The most bytes of a note.
MAX_BYTES = 1 << 16
# `extra` of a record that may take several lines of the log.
AS_IT_IS = {"is_as_it_is": True}
_OUTPUT = "moonpool.stub"
_LEVELS = {logging.WARNING: 1, logging.ERROR: 2, logging.CRITICAL: 2, logging.DEBUG: 3}


class Notes(logging.Handler):
    """Sends moonpool's log to the server. The output of models goes to the standard error of the server."""

    def __init__(self, peer: LauncherChannel) -> None:
        super().__init__()
        self._peer = peer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if not hasattr(record, "is_as_it_is"):
                text = one_line(text)
            text = beginning(text, MAX_BYTES)
            if record.name == _OUTPUT and not hasattr(record, "is_logged"):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
            else:
                level = _LEVELS.get(record.levelno, 0)
                self._peer.send(Word.NOTE, level, text, record.filename, record.lineno)
        except Exception:
            self.handleError(record)
