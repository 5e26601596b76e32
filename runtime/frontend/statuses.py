"""What an error is called in each protocol, as Triton's frontends map its codes."""

from __future__ import annotations

from moonpool.ipc.errors import MoonpoolError

# https://github.com/triton-inference-server/server: what its HTTP frontend answers is 400 where it says no more.
HTTP = {
    "UNKNOWN": 400,
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "INVALID_ARG": 400,
    "UNAVAILABLE": 503,
    "UNSUPPORTED": 501,
    "ALREADY_EXISTS": 400,
    "CANCELLED": 499,
}
# The names of gRPC's status codes, so that nothing here needs its library.
GRPC = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "NOT_FOUND",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}


def http_status(error: BaseException) -> int:
    """The status of an answer that is this error; 500 for errors that are not moonpool's."""
    return HTTP[error.code] if isinstance(error, MoonpoolError) else 500


def grpc_status(error: BaseException) -> str:
    """The name of gRPC's status code for this error; INTERNAL for errors that are not moonpool's."""
    return GRPC[error.code] if isinstance(error, MoonpoolError) else "INTERNAL"
