"""What may be said of an error outside of this process: to clients of a server, and to models of others.

Whoever calls in this process, the log and the page of a server have the whole text.
"""

from __future__ import annotations

import re

from moonpool.ipc.errors import Closed, MoonpoolError, OutOfMemory, PeerGone, ProtocolError
from moonpool.runtime.errors import BackendError, ModelError, ModelUnavailable, StubDied

# In moonpool's own words. Others quote what a client sent, or are those of a model, which are as in Triton.
_OWN = (StubDied, ModelUnavailable, BackendError, OutOfMemory, ProtocolError, PeerGone, Closed)

# A path in quotes may have spaces in it; of others each name ends at one, or at what a name rarely has.
_QUOTED = re.compile(r"""(["'])(?:file://)?/(?:[^"'\n/]*/)+([^"'\n/]*)\1""")
_PATH = re.compile(r"""(?:file:/?/?|(?<![\w./-]))/(?:[^\s/"'(),:;<>=|]+/)+([^\s/"'(),:;<>=|]*)""")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_FRAME = re.compile(r'\s*File ".*", line \d+')
_SOURCE = " " * 4


def public_text(error: BaseException, request_id: str = "") -> str:
    """The text of an error, without what is nobody else's business. The caller logs what this does not say.

    `request_id` is what to look for there, if the request had one.
    """
    if not isinstance(error, MoonpoolError) or error.told is not None:
        told = "internal error" if not isinstance(error, MoonpoolError) else error.told
        where = f" (request id: {request_id})" if request_id else ""
        return f"{told}; see the server's log{where}"
    if isinstance(error, _OWN) or (isinstance(error, ModelError) and error.is_confined):
        return scrubbed(str(error))
    return str(error)


def scrubbed(text: str) -> str:
    """The text without folders, addresses and lines of source: of a path its last name is left, of a frame its line."""
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
