"""Decides who may use an API: restricted APIs ask for a header, changes for a token, and pages of other sites are
refused.

Pure. The caller gives the headers of a request, by lower-case name.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

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
"""The APIs, by Triton's names."""
OPENAI_APIS = ("inference", "model-repository", "metrics", "health")
"""The groups of OpenAI's API, by the names of Triton's front end for it."""
GRPC_PREFIX = "triton-grpc-protocol-"
"""The prefix of header names in gRPC's metadata."""
# Types of bodies that a page of any site can send without a preflight: those of forms and of simple requests.
_FORM_TYPE = "application/x-www-form-urlencoded"
_SIMPLE_TYPES = ("text/plain", "multipart/form-data")
# Host and port, in lower case.
_PLACE = re.compile(
    r"(?:(?P<name>[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)|\[(?P<ipv6>[0-9a-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?"
)
_MOST_PORT = 65535


class Refusal(NamedTuple):
    """The reason for refusing a request."""

    is_unknown: bool
    """The client has not said who it is (401), rather than lacking the right (403)."""
    text: str


class Restriction:
    """Refuses requests that lack the header of an API or the token for changes."""

    def __init__(
        self,
        apis: Mapping[str, tuple[str, str]] | None = None,
        control_token: str | None = None,
        openai_apis: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """`apis` gives some of `APIS` a header and its value, and `openai_apis` some of `OPENAI_APIS`. `control_token`
        is for requests that change the server.

        Raises `ValueError` for other names of APIs, and an empty token.
        """
        self._apis = _lowered(apis or {}, APIS)
        self._openai_apis = _lowered(openai_apis or {}, OPENAI_APIS)
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
        """Return the reason for refusing a request; None to serve it.

        `header` returns the value of a header. `prefix` goes before the names of those that APIs ask for. `is_change`
        says that the request would load or unload models, or change shared memory, traces or logging.
        """
        wanted = self._apis.get(api)
        if wanted is not None:
            key, value = wanted
            if not _is_equal(header(prefix + key), value):
                return Refusal(False, f"This {what} is restricted, expecting header '{prefix}{key}'")
        if is_change and self._token is not None:
            scheme, _, token = (header("authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not _is_equal(token.strip(), self._token):
                return Refusal(True, "changing the server asks for the header 'Authorization: Bearer <token>'")
        return None

    def refuse_openai(self, api: str, header: Callable[[str], str | None]) -> Refusal | None:
        """Return the reason for refusing a request for one of `OPENAI_APIS`; None if it has the header that this asks
        for.
        """
        wanted = self._openai_apis.get(api)
        if wanted is None or _is_equal(header(wanted[0]), wanted[1]):
            return None
        return Refusal(True, f"This API is restricted, expecting header '{wanted[0]}' with valid value")


def _lowered(apis: Mapping[str, tuple[str, str]], known: Collection[str]) -> dict[str, tuple[str, str]]:
    unknown = sorted(set(apis) - set(known))
    if unknown:
        raise ValueError(f"unknown API '{unknown[0]}'; there are {', '.join(known)}")
    return {api: (key.lower(), value) for api, (key, value) in apis.items()}


def _is_equal(given: str | None, wanted: str) -> bool:
    """Compare in a time that does not depend on the wanted text."""
    return hmac.compare_digest((given or "").encode("utf-8", "replace"), wanted.encode())


class Origins:
    """Tells requests of programs and of the server's own page from those of other pages in a browser."""

    def __init__(self, allowed: Collection[str] = (), *, is_loopback: bool = False) -> None:
        """`allowed` are origins such as `https://example.org` whose pages may use the server beside its own.

        `is_loopback` says that the server listens on this machine only. Raises `ValueError` for an origin that
        no browser would send.
        """
        wrong = next((origin for origin in allowed if not _place_of(origin)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r:.80} is not an origin such as https://example.org")
        self._allowed = frozenset(allowed)
        self._hosts = {_place_of(origin) for origin in allowed}
        self._is_loopback = is_loopback

    def is_foreign(self, header: Callable[[str], str | None], *, opens_page: bool = False) -> bool:
        """Return whether a page of another site sent a request.

        Programs other than browsers are never foreign. `opens_page` says that the request only reads a page for people,
        which a browser may open from a link on any site.
        """
        if not _is_browser(header):
            return False
        site, origin = header("sec-fetch-site"), header("origin")
        if origin in self._allowed:
            return False
        host = (header("host") or "").lower()
        # An attacker's name may resolve to this machine's loopback; an address or localhost cannot.
        if self._is_loopback and not _is_local(host) and host not in self._hosts:
            return True
        # Every browser sends Origin with a POST of another site's page, even with a form's. It is checked before
        # Sec-Fetch-Mode, because a form of a foreign page is a navigation, too.
        if origin is not None and (not host or _place_of(origin) != host):
            return True
        if site is None or site in ("same-origin", "none"):
            return False
        is_link = header("sec-fetch-mode") == "navigate" and header("sec-fetch-dest") == "document"
        return not (opens_page and is_link)


def refused_type(header: Callable[[str], str | None]) -> str | None:
    """Return the content type of a request if nothing may be changed by a body of this type, else None.

    These are the types that a page of any site can send without asking first. curl and Triton's client in C++
    mark whatever they send as a form's, so that type is refused only where a browser sends it.
    """
    given = (header("content-type") or "").partition(";")[0].strip().lower()
    if given in _SIMPLE_TYPES or (given == _FORM_TYPE and _is_browser(header)):
        return given
    return None


def _is_browser(header: Callable[[str], str | None]) -> bool:
    # Old browsers send neither of the first two with a link, or over plain HTTP to another machine.
    return (
        header("sec-fetch-site") is not None
        or header("origin") is not None
        or (header("user-agent") or "").startswith("Mozilla/")
    )


def _place_of(origin: str) -> str:
    """Return host and port of an origin, as in the header Host; "" for anything else, such as `null`."""
    scheme, separator, place = origin.partition("://")
    is_one = separator and scheme in ("http", "https") and _parts_of(place) is not None
    return place if is_one else ""


def _parts_of(host: str) -> re.Match[str] | None:
    """Parse the value of a header Host, in lower case. None unless it is exactly a host, with or without a port."""
    found = _PLACE.fullmatch(host)
    return None if found is None or int(found["port"] or 0) > _MOST_PORT else found


def place_of_host(host: str) -> str | None:
    """Return the name or the address in a header Host, with brackets for IPv6; None if there is none."""
    found = _parts_of(host.lower())
    if found is None:
        return None
    return found["name"] or f"[{found['ipv6']}]"


def _is_local(host: str) -> bool:
    """Return whether a host is localhost or an address. Neither can be an attacker's name."""
    found = _parts_of(host)
    if found is None:
        return False
    name = found["name"]
    if name is not None and (name == "localhost" or name.endswith(".localhost")):
        return True
    try:
        if name is None:
            IPv6Address(found["ipv6"])
        else:
            IPv4Address(name)
    except ValueError:
        return False
    return True
