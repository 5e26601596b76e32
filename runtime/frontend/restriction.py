"""Who may use what: APIs that ask for a header, changes that ask for a token, and pages of strangers.

Pure. Whoever asks has the headers of a request, by lower-case name.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

APIS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""As Triton names them."""
GRPC_PREFIX = "triton-grpc-protocol-"
"""Before the names of headers in gRPC's metadata."""


class Refusal(NamedTuple):
    """Why a request is not served."""

    is_unknown: bool
    """Whether the client has not said who it is, rather than not being the one."""
    text: str


class Restriction:
    """Decides about requests by what they want and what they say of themselves."""

    def __init__(
        self, apis: Mapping[str, tuple[str, str]] | None = None, control_token: str | None = None
    ) -> None:
        """`apis` gives some of `APIS` a header and the value it must have; `control_token` is for what changes the server.

        Raises `ValueError` for other names of APIs, and an empty token.
        """
        self._apis = {api: (key.lower(), value) for api, (key, value) in (apis or {}).items()}
        unknown = sorted(set(self._apis) - set(APIS))
        if unknown:
            raise ValueError(f"unknown API '{unknown[0]}'; there are {', '.join(APIS)}")
        if control_token is not None and not control_token.strip():
            raise ValueError("the control token is empty")
        self._token = control_token

    def refuse(
        self,
        api: str,
        header: Callable[[str], str | None],
        *,
        is_change: bool = False,
        prefix: str = "",
        what: str = "API",
    ) -> Refusal | None:
        """None for a request that is welcome.

        `header` gives the value of one; `prefix` goes before the names of those that APIs ask for. `is_change` says
        that the request would load or unload models, or change shared memory, traces or logging.
        """
        wanted = self._apis.get(api)
        if wanted is not None:
            key, value = wanted
            if not _is_equal(header(prefix + key), value):
                return Refusal(
                    False, f"This {what} is restricted, expecting header '{prefix}{key}'"
                )
        if is_change and self._token is not None:
            scheme, _, token = (header("authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not _is_equal(token.strip(), self._token):
                return Refusal(
                    True, "changing the server asks for the header 'Authorization: Bearer <token>'"
                )
        return None


def _is_equal(given: str | None, wanted: str) -> bool:
    """In a time that says nothing of the wanted text."""
    return hmac.compare_digest((given or "").encode("utf-8", "replace"), wanted.encode())


class Origins:
    """Tells what programs ask for from what browsers ask for on behalf of strangers' pages."""

    def __init__(self, allowed: Collection[str] = (), *, is_loopback: bool = False) -> None:
        """`allowed` are origins such as `https://example.org` whose pages may use the server beside its own.

        `is_loopback` says that the server listens on this machine only.
        """
        self._allowed = frozenset(allowed)
        self._hosts = {_place_of(origin) for origin in allowed}
        self._is_loopback = is_loopback

    def is_foreign(self, header: Callable[[str], str | None]) -> bool:
        """Whether a page that is not this server's is behind a request.

        Programs other than browsers are never taken for foreign. A page of the server that a person opens is
        not, either, from wherever the link to it came: it shows nothing to others.
        """
        site, origin = header("sec-fetch-site"), header("origin")
        agent = header("user-agent") or ""
        if site is None and origin is None and not agent.startswith("Mozilla/"):
            return False
        host = (header("host") or "").lower()
        if origin in self._allowed or host in self._hosts:
            return False
        # A stranger's name may stand for this machine's loopback; an address or localhost cannot.
        if self._is_loopback and not _is_local(host):
            return True
        if site is not None and site not in ("same-origin", "none"):
            return header("sec-fetch-mode") != "navigate" or header("sec-fetch-dest") != "document"
        return origin is not None and (not host or _place_of(origin) != host)


def _place_of(origin: str) -> str:
    """Host and port; nothing for what is no origin, as `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_local(host: str) -> bool:
    try:
        name = urlsplit("//" + host).hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
