"""Fixtures that use the libraries of clients once, as they open descriptors then and keep them."""

from __future__ import annotations

import contextlib

import pytest
import tritonclient.http
from tests.server.grpc.conftest import _grpc_is_there

__all__ = ["_gevent_is_there", "_grpc_is_there"]


@pytest.fixture(scope="session", autouse=True)
def _gevent_is_there() -> None:
    """Use tritonclient's library once."""
    with tritonclient.http.InferenceServerClient("127.0.0.1:1") as client, contextlib.suppress(OSError):
        client.is_server_live()
