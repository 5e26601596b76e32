"""Limits and options of the HTTP server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HttpLimits:
    """The most that a client may send, and the longest that it may take.

    Requests over a size are answered with 413 or 431. Requests over a time are answered with 408, and connections
    without a request are closed.
    """

    head_bytes: int = 64 << 10
    """For request line and headers."""
    body_bytes: int = 2**31 - 1
    """For a body as it is sent."""
    inflated_bytes: int = 1 << 30
    """For a body after its decompression."""
    json_bytes: int = 64 << 20
    """The JSON of a request, and outputs that a response carries as JSON: values take many times the memory of their
    text.
    """
    input_bytes: int | None = None
    """Triton's one limit. A body over one of the three limits above that equals it is refused with 400 and Triton's
    text.
    """
    connections: int = 16384
    """At the same time. The next one gets 503."""
    metrics_connections: int = 2048
    """The same for the port for metrics."""
    head_timeout_s: float = 20.0
    """Seconds from the first byte of a request to the end of its headers."""
    body_timeout_s: float = 60.0
    """Seconds for a body, beyond the time that it takes at `body_bytes_per_s`."""
    body_bytes_per_s: int = 16 << 10
    idle_timeout_s: float = 600.0
    """Seconds between two requests."""
    write_timeout_s: float = 60.0
    """Seconds without the client reading any of its response."""


@dataclass(frozen=True)
class HttpOptions:
    """Addresses and ports; a port of None is not served, 0 is any free one."""

    address: str = "127.0.0.1"
    port: int | None = 8000
    metrics_address: str = "127.0.0.1"
    metrics_port: int | None = 8002
    reuse_port: bool = False
    """Several processes may listen on the same ports."""
    certificate: str | os.PathLike[str] | None = None
    """PEM files; with them the port speaks TLS only. The metrics port never does."""
    private_key: str | os.PathLike[str] | None = None
    restricted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Names of APIs, each with the header and the value that requests for it must have."""
    control_token: str | None = None
    """The token that requests which change the server must have as `Authorization: Bearer`."""
    allowed_origins: frozenset[str] = frozenset()
    """Origins, such as `https://example.org`, whose pages may drive the server beside its own."""
    header_forward_pattern: str = ""
    """Headers whose whole lower-case name matches this regular expression become parameters of requests."""
    allow_openai: bool = True
    """Serve OpenAI's API under `/v1`."""
    openai_address: str = "127.0.0.1"
    openai_port: int | None = None
    """A port that serves OpenAI's API alone."""
    openai_restricted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Groups of OpenAI's API, each with the header and the value that requests for it must have."""
    limits: HttpLimits = field(default_factory=HttpLimits)
