"""Turns the options of a front end into JSON and back: the contents of SETTINGS."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moonpool.runtime.server.http.options import HttpLimits, HttpOptions
from moonpool.runtime.server.log import LogOptions

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc.options import GrpcOptions


def settings_of(
    http: HttpOptions | None,
    grpc: GrpcOptions | None,
    connections: int | None,
    folder: str,
    log: LogOptions,
) -> dict[str, Any]:
    """Return the contents of SETTINGS. `connections` is the bound of all ports together. The main process listens for requests that are passed on in `folder`, at `http` and `grpc`."""
    return {
        "http": None if http is None else _plain(asdict(http)),
        "grpc": None if grpc is None else _plain(asdict(grpc)),
        "connections": connections,
        "folder": folder,
        "log": asdict(log),
    }


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Replace values of types that JSON does not have."""
    plain = (str, int, float, bool, type(None), dict, tuple)
    return {
        name: value
        if isinstance(value, plain)
        else sorted(value)
        if isinstance(value, frozenset)
        else str(value)
        for name, value in options.items()
    }


def http_options(settings: dict[str, Any]) -> HttpOptions:
    """Return the options that the main process sent."""
    restricted = {api: (header, value) for api, (header, value) in settings["restricted"].items()}
    return HttpOptions(
        **{
            **settings,
            "restricted": restricted,
            "allowed_origins": frozenset(settings["allowed_origins"]),
            "limits": HttpLimits(**settings["limits"]),
        }
    )


def grpc_options(settings: dict[str, Any]) -> GrpcOptions:
    """Return the options that the main process sent."""
    from moonpool.runtime.server.grpc.options import GrpcOptions

    restricted = {api: (header, value) for api, (header, value) in settings["restricted"].items()}
    return GrpcOptions(**{**settings, "restricted": restricted})
