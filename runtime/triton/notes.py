"""The launcher's log, as lines of the server's.

A note is one line whatever is in it, as in the log of moonpool's own server. The exception is a load's traceback of a
model that is not contained: it stays as readable as that of Triton's own backend, and such a model could write to the
server's log anyway.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from moonpool.ipc.texts import beginning
from moonpool.runtime.output import one_line
from moonpool.runtime.triton.messages import Word

if TYPE_CHECKING:
    from moonpool.runtime.triton.post import Post

# Of what goes into the server's log at once.
MAX_BYTES = 1 << 16
# Of a record that may take several lines of the log.
AS_IT_IS = {"is_as_it_is": True}
_OUTPUT = "moonpool.stub"
_LEVELS = {logging.WARNING: 1, logging.ERROR: 2, logging.CRITICAL: 2, logging.DEBUG: 3}


class Notes(logging.Handler):
    """Sends what moonpool logs to the server; what models print goes where the server's own output goes."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

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
                self._post.tell(Word.NOTE, level, text, record.filename, record.lineno)
        except Exception:
            self.handleError(record)
