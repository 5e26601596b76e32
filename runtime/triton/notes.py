"""The launcher's log, as lines of the server's."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from moonpool.ipc.texts import beginning
from moonpool.runtime.triton.messages import Word

if TYPE_CHECKING:
    from moonpool.runtime.triton.post import Post

# Of a note, which goes into a line or some of the server's log.
_MAX_BYTES = 1 << 16
_OUTPUT = "moonpool.stub"
_LEVELS = {logging.WARNING: 1, logging.ERROR: 2, logging.CRITICAL: 2, logging.DEBUG: 3}


class Notes(logging.Handler):
    """Sends what moonpool logs to the server; what models print goes where the server's own output goes."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = beginning(self.format(record), _MAX_BYTES)
            if record.name == _OUTPUT and not hasattr(record, "is_logged"):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
            else:
                level = _LEVELS.get(record.levelno, 0)
                self._post.tell(Word.NOTE, level, text, record.filename, record.lineno)
        except Exception:
            self.handleError(record)
