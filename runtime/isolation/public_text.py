"""Makes the text of an error fit for readers outside of this process: clients of a server, and models of others.

Callers in this process, the log and the page of a server get the whole text.
"""

from __future__ import annotations

import re

from moonpool.ipc.errors import Closed, MoonpoolError, OutOfMemory, PeerGone, ProtocolError
from moonpool.runtime.errors import BackendError, ModelError, ModelUnavailable, StubDied

# Errors in moonpool's own words. Others quote the client's request, or are a model's, which are as in Triton.
_OWN = (StubDied, ModelUnavailable, BackendError, OutOfMemory, ProtocolError, PeerGone, Closed)

# A path in quotes may have spaces in it. In other paths, a name ends at a space, or at a character that names rarely have.
_QUOTED = re.compile(r"""(["'])(?:file://)?/(?:[^"'\n/]*/)+([^"'\n/]*)\1""")
_PATH = re.compile(r"""(?:file:/?/?|(?<![\w./-]))/(?:[^\s/"'(),:;<>=|]+/)+([^\s/"'(),:;<>=|]*)""")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_FRAME = re.compile(r'\s*File ".*", line \d+')
_SOURCE = " " * 4


def public_text(error: BaseException, request_id: str = "") -> str:
    """Return the text of an error without private facts. The caller logs the whole text.

    `request_id` is named in the text, so that the entry in the log can be found.
    """
    if not isinstance(error, MoonpoolError) or error.public_message is not None:
        public = "internal error" if not isinstance(error, MoonpoolError) else error.public_message
        where = f" (request id: {request_id})" if request_id else ""
        return f"{public}; see the server's log{where}"
    if isinstance(error, _OWN) or (isinstance(error, ModelError) and error.is_confined):
        return scrubbed(str(error))
    return str(error)


def scrubbed(text: str) -> str:
    """Return the text without folders, addresses and lines of source. The last name of a path stays, and the line of a frame."""
    text = _QUOTED.sub(r"\1\2\1", text)
    text = _PATH.sub(r"\1", text)
    text = _ADDRESS.sub("0x…", text)
    if 'File "' not in text:
        return text
    kept = []
    is_frame = False
    for line in text.split("\n"):
        if is_frame and line.startswith(_SOURCE):
            continue
        is_frame = _FRAME.match(line) is not None
        kept.append(line)
    return "\n".join(kept)
