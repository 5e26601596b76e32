"""The packages that only some uses of moonpool need, and the command that installs them."""

from __future__ import annotations

import shlex
import sys

# As `optional-dependencies` in pyproject.toml. Advice names the packages and not `moonpool[serve]`: it has to work however
# moonpool was installed, and pip would look for moonpool on the index.
EXTRAS = {
    "completion": ("argcomplete>=3.5",),
    "otel": ("opentelemetry-exporter-otlp-proto-http>=1.25", "opentelemetry-sdk>=1.25"),
    "plot": ("matplotlib>=3.8",),
    "serve": (
        "httptools>=0.6",
        "orjson>=3.10",
        "prometheus_client>=0.20",
        "starlette>=0.40",
        "uvloop>=0.21",
    ),
}


def name_of(requirement: str) -> str:
    """The package's name, from its name and its versions."""
    return requirement.partition(">=")[0]


def how_to_install(extra: str) -> str:
    """The command that installs what an extra needs into this very interpreter, quoted for a shell."""
    return shlex.join([sys.executable, "-m", "pip", "install", *EXTRAS[extra]])
