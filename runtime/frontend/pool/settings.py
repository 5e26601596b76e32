"""What a front end is to listen on, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moonpool.runtime.frontend.http.options import HttpLimits, HttpOptions

if TYPE_CHECKING:
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.server.log_lines import LogOptions


def settings_of(
    http: HttpOptions | None, grpc: GrpcOptions | None, folder: str, log: LogOptions
) -> dict[str, Any]:
    """`folder` is where the main process listens for what front ends pass on, at `http` and `grpc`."""
    return {
        "http": None if http is None else _plain(asdict(http)),
        "grpc": None if grpc is None else _plain(asdict(grpc)),
        "folder": folder,
        "log": asdict(log),
    }


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Without what JSON does not have."""
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
    """The options again."""
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
    """The options again."""
    from moonpool.runtime.frontend.grpc.options import GrpcOptions

    restricted = {api: (header, value) for api, (header, value) in settings["restricted"].items()}
    return GrpcOptions(**{**settings, "restricted": restricted})
