"""Makes the text of an error fit for readers outside of this process: clients of a server, and models.

There is one redaction for all of them. Callers in this process, the log and the page of a server get the whole text.
"""

from __future__ import annotations

import re

from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.runtime.errors import InvalidRequest, ModelError

# These name what the reader has sent, and nothing of this machine.
_QUOTES = (InvalidRequest, BadTensor)

# A path in quotes may have spaces in it. In other paths, a name ends at a space, or at a character that names rarely have.
_QUOTED = re.compile(r"""(["'])(?:file://)?/(?:[^"'\n/]*/)+([^"'\n/]*)\1""")
_PATH = re.compile(r"""(?:file:/?/?|(?<![\w./-]))/(?:[^\s/"'(),:;<>=|]+/)+([^\s/"'(),:;<>=|]*)""")
# A repository may be named by a relative path, and then errors of its configurations are.
_RELATIVE = re.compile(r"""(?<![\w./-])(?:[^\s/"'(),:;<>=|]+/)+(config\.pbtxt)\b""")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_FRAME = re.compile(r'\s*File ".*", line \d+')
_SOURCE = " " * 4


def public_text(
    error: BaseException, request_id: str = "", *, is_for_contained: bool = False
) -> str:
    """Return the text of an error without private facts. The caller logs the whole text.

    `request_id` is named in the text, so that the entry in the log can be found. Errors that a model answers with are as in Triton if the
    model is not contained, except for a reader that is (`is_for_contained`): it may not know where other models lie.
    """
    if not isinstance(error, MoonpoolError) or error.public_message is not None:
        where = f" (request id: {request_id})" if request_id else ""
        return f"{_redacted(error, is_for_contained=is_for_contained)}; see the server's log{where}"
    return _redacted(error, is_for_contained=is_for_contained)


def _redacted(error: BaseException, *, is_for_contained: bool) -> str:
    if not isinstance(error, MoonpoolError):
        return "internal error"
    text = str(error) if error.public_message is None else error.public_message
    if isinstance(error, _QUOTES):
        return text
    if isinstance(error, ModelError) and not (error.is_confined or is_for_contained):
        return text
    return scrubbed(text)


def scrubbed(text: str) -> str:
    """Return the text without folders, addresses and lines of source. The last name of a path stays, and the line of a frame."""
    text = _QUOTED.sub(r"\1\2\1", text)
    text = _RELATIVE.sub(r"\1", _PATH.sub(r"\1", text))
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
