"""Packages that only some uses of moonpool need, and the command that installs them."""

from __future__ import annotations

import shlex
import sys

# The same as `optional-dependencies` in pyproject.toml. Advice names the packages and not `moonpool[serve]`, because
# pip would look for moonpool on the index, and it may have been installed in another way.
EXTRAS = {
    "cloud": ("adlfs>=2024.7", "gcsfs>=2024.6", "huggingface_hub>=1", "s3fs>=2024.6"),
    "completion": ("argcomplete>=3.5",),
    "environments": ("uv>=0.5",),
    "grpc": ("grpcio>=1.60",),
    "loadgen": ("mlcommons-loadgen>=6",),
    "otel": ("opentelemetry-exporter-otlp-proto-http>=1.25", "opentelemetry-sdk>=1.25"),
    "parquet": ("pyarrow>=15",),
    "plot": ("matplotlib>=3.8",),
    "ray": ("grpcio>=1.60", "httptools>=0.6", "orjson>=3.10", "prometheus_client>=0.20", "ray[serve]>=2.54"),
    "serve": ("httptools>=0.6", "orjson>=3.10", "prometheus_client>=0.20", "uvloop>=0.21"),
}


def name_of(requirement: str) -> str:
    """Return a package's name without its versions."""
    return requirement.partition(">=")[0]


def how_to_install(extra: str, *names: str) -> str:
    """Return the command that installs the packages of an extra for this interpreter, or only those of `names`.

    It is quoted for a shell.
    """
    wanted = [each for each in EXTRAS[extra] if not names or name_of(each) in names]
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])
