"""The address of a server, as a person writes it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from moonpool.ipc.errors import MoonpoolError

_DEFAULT_PORTS = {"http": 8000, "grpc": 8001}


class BadAddress(MoonpoolError):
    """A text that is no address."""

    code = "INVALID_ARG"


class Endpoint(NamedTuple):
    """`scheme` is http or grpc; `path` goes before the protocol's own, for HTTP."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From http://HOST[:PORT][/PATH] or grpc://HOST[:PORT]. Raises `BadAddress`."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadAddress(f"{text!r} is no address: {error}") from error
        if parts.scheme in ("https", "grpcs"):
            raise BadAddress(
                f"{text!r}: TLS is not here; measure behind it, at the server's own port"
            )
        if parts.scheme not in _DEFAULT_PORTS or not host or parts.query or parts.fragment:
            raise BadAddress(f"{text!r} must be http://HOST:PORT or grpc://HOST:PORT")
        path = parts.path.rstrip("/")
        if path and parts.scheme == "grpc":
            raise BadAddress(f"{text!r}: gRPC has no path")
        if parts.username is not None:
            raise BadAddress(f"{text!r}: names and passwords go into a header (--header)")
        return cls(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path)
