"""The KServe v2 protocol over gRPC. This opens nghttp2 for the sessions of `_http2`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.extension import load, use_compiled

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc import _http2

use_compiled(__name__, "call", "connection", "inference", "infer_request", "infer_response", "wire")
_LIBRARY = "libnghttp2.so.14"
# A wheel has a copy if it was built where there is one.
_BUNDLED = Path(__file__).with_name(_LIBRARY)


class MissingHttp2(MoonpoolError):
    """There is no HTTP/2 for gRPC, since nghttp2 or the extension that opens it is missing. The text says what to
    install.
    """

    code = "UNAVAILABLE"


def open_nghttp2() -> tuple[Callable[..., _http2.Session], str]:
    """Return the maker of sessions, and the library that it uses. Raises `MissingHttp2`.

    The extension has no form in Python, so it is used with `MOONPOOL_PURE`, too. The system's library is preferred to
    the one in the wheel, because it gets the system's updates.
    """
    try:
        extension = load("moonpool.runtime.server.grpc._http2")
    except ImportError as error:
        raise MissingHttp2(
            f"gRPC needs what is compiled: {error}; install a C++ compiler, and moonpool again"
        ) from error
    where = _LIBRARY
    try:
        try:
            extension.open_library(where)
        except OSError:
            if not _BUNDLED.is_file():
                raise
            where = str(_BUNDLED)
            extension.open_library(where)
    except OSError as error:
        raise MissingHttp2(
            f"gRPC needs nghttp2: {error}; install it (Debian and Ubuntu: libnghttp2-14, Fedora: libnghttp2)"
        ) from error
    return extension.Session, where
