"""Fixtures of the tests of the load generator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from moonpool.benchmarks.generator.grpc import session_maker
from moonpool.runtime.client.request import Endpoint
from moonpool.runtime.server.grpc import MissingHttp2


def has_nghttp2() -> bool:
    """Tell if there can be load over gRPC."""
    try:
        session_maker()
    except MissingHttp2:
        return False
    return True


needs_nghttp2 = pytest.mark.skipif(not has_nghttp2(), reason="load over gRPC needs nghttp2")


class Kserve(NamedTuple):
    """The endpoints of the small server."""

    http: Endpoint
    grpc: Endpoint

    def endpoint(self, scheme: str) -> Endpoint:
        return self.http if scheme == "http" else self.grpc


@pytest.fixture(scope="session")
def kserve() -> Iterator[Kserve]:
    """A server that is not moonpool's."""
    command = [sys.executable, str(Path(__file__).with_name("kserve.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdin is None or process.stdout is None:
        pytest.fail("the server of the tests has no pipes")
    http, grpc = map(int, process.stdout.readline().split())
    yield Kserve(Endpoint("http", "127.0.0.1", http), Endpoint("grpc", "127.0.0.1", grpc))
    process.stdin.close()
    process.stdout.close()
    process.wait(60)
