"""The options of the gRPC server: Triton's `--grpc-*` flags and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moonpool.runtime.process.usage import part_of_memory

# The largest message that gRPC can send, and that Triton takes.
MAX_MESSAGE_BYTES = 2**31 - 1


@dataclass(frozen=True)
class GrpcOptions:
    """The fields have the names of the flags. Files are paths of PEM files, which are read once, at the start."""

    address: str = "127.0.0.1"
    port: int = 8001
    """0 takes any free port."""
    reuse_port: bool = False
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    """Goes before `use_ssl`: clients need a certificate that `root_cert` vouches for."""
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    header_forward_pattern: str = ""
    """Headers whose whole name matches this regular expression become parameters of requests."""
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    """0 lets connections grow as old as they like."""
    max_connection_age_grace_ms: int = 0
    reflection: bool = False
    """Tell clients which services and messages there are. Triton does not."""
    restricted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Names of APIs, each with the header, without Triton's prefix, and the value that RPCs of it must have."""
    control_token: str | None = None
    """The token that RPCs which change the server must have as `authorization: Bearer`."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """The largest request. A response has the bound of gRPC itself, `MAX_MESSAGE_BYTES`."""
    max_connections: int = 8192
    """More connections at once are closed, before TLS or HTTP/2 begin."""
    write_timeout_ms: int = 600_000
    """A connection ends when its client takes nothing for so long of what waits for it. 0 lets it wait."""
    read_timeout_ms: int = 60_000
    """A call ends when its large request has not come after so long, and the time that its bytes take at 16 KiB a
    second. 0 lets it wait.
    """
    max_calls: int = 10_000
    """More RPCs at once are refused."""
    max_backlog_bytes: int = part_of_memory(32, 256 << 20)
    """A stream ends when more bytes wait for its client, who does not read them."""
    max_backlogs_bytes: int = part_of_memory(16, 1 << 30)
    """The most bytes that wait for the clients of all streams. Beyond it, the stream with the most ends."""
