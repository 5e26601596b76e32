"""Makes the text of an error fit for readers outside of this process: clients of a server, and models.

There is one redaction for all of them, `MoonpoolError.public_text`. Callers in this process, the log and the page of a
server get the whole text.
"""

from __future__ import annotations

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.errors import scrubbed as scrubbed


def public_text(error: BaseException, request_id: str = "", *, is_for_contained: bool = False) -> str:
    """Return the text of any error without private facts. The caller logs the whole text.

    The text of an error that is not moonpool's stays private. The rest is as in `MoonpoolError.public_text`.
    """
    if not isinstance(error, MoonpoolError):
        error = MoonpoolError()
        error.public_message = "internal error"
    return error.public_text(request_id, is_for_contained=is_for_contained)
