"""The KServe v2 protocol over gRPC. This opens nghttp2 for the sessions of `_http2`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.extension import PURE, is_wanted, load, use_compiled

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc import _http2

use_compiled(__name__, "call", "connection", "inference", "infer_request", "infer_response", "wire")
_LIBRARY = "libnghttp2.so.14"
# A wheel has a copy if it was built where there is one.
_BUNDLED = Path(__file__).with_name(_LIBRARY)


def open_nghttp2() -> tuple[Callable[..., _http2.Session], str]:
    """Return the maker of sessions, and the library that it uses.

    Raises ImportError without the extension, and OSError without nghttp2.

    The system's library is preferred to the one in the wheel, because it gets the system's updates.
    """
    if not is_wanted():
        raise ImportError(f"{PURE} leaves out what is compiled")
    extension = load("moonpool.runtime.server.grpc._http2")
    where = _LIBRARY
    try:
        extension.open_library(where)
    except OSError:
        if not _BUNDLED.is_file():
            raise
        where = str(_BUNDLED)
        extension.open_library(where)
    return extension.Session, where


def what_is_missing(error: ImportError | OSError) -> str:
    """Say what to install after an error of `open_nghttp2`."""
    if isinstance(error, OSError):
        return f"{error}; install it (Debian and Ubuntu: libnghttp2-14, Fedora: libnghttp2)"
    return f"{error}; install a C++ compiler, and moonpool again"
