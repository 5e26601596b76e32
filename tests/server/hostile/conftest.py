"""A server that all hostile clients share. Each must leave it as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.hostile.figures import Figures
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

from moonpool.runtime.conformance import comparing
from moonpool.runtime.conformance.tensors import GOOD, tensor
from moonpool.runtime.conformance.wire import infer, send

MODELS = comparing.EXPECTED.with_name("models")
ONE = {"inputs": [tensor("IN_FP32", [1])]}
BODY_BYTES = 4 << 20
INFLATED_BYTES = 8 << 20
# Pools and caches may keep so much after use.
SPARE_DESCRIPTORS, SPARE_THREADS, SPARE_BYTES = 32, 40, 96 << 20


class Target:
    """Run the server, and note what it holds before the first hostile client."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.http_port = server.ports["http"]
        self.grpc_port = server.ports["grpc"]
        self.answers()
        self.at_rest = Figures.of(server.process.pid)

    def answers(self) -> None:
        """Check that it answers a client soon."""
        for request in (infer("add_sub", GOOD), infer("every", ONE)):
            reply = send(self.http_port, request)
            assert reply.status == 200, reply

    def is_at_rest(self) -> None:
        """Check that it holds nothing more, and is the same process."""
        before, pid = self.at_rest, self.server.process.pid

        def rests() -> bool:
            # A stub releases blocks with the next request only.
            self.answers()
            now = Figures.of(pid)
            return (
                now.processes == before.processes
                and now.descriptors <= before.descriptors + SPARE_DESCRIPTORS
                and now.threads <= before.threads + SPARE_THREADS
                and now.resident_bytes <= before.resident_bytes + SPARE_BYTES
            )

        wait_until(rests, 60.0, f"{before}, where there was {Figures.of(pid)}")
        assert "Traceback" not in self.server.text(), self.server.text()[-4000:]


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    repository = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("hostile") / "repository"))
    flags = [f"--load-model={name}" for name in ("add_sub", "every", "repeat", "says", "told")]
    limits = [f"--http-max-body-bytes={BODY_BYTES}", f"--http-max-inflated-bytes={INFLATED_BYTES}"]
    with running(repository, "--model-control-mode=explicit", *flags, *limits) as server:
        yield Target(server)


@pytest.fixture
def target(shared: Target) -> Iterator[Target]:
    """Give a test the server, and check afterwards that it is well."""
    yield shared
    shared.is_at_rest()
