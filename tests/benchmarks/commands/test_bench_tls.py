"""`moonpool bench` over TLS, with and without certificates of clients, and streams of events over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.benchmarks.commands.test_bench_serve import COUNTS, COUNTS_CONFIG
from tests.runtime.cli.shell import MODELS, CommandLine, write_model
from tests.server.certificates import self_signed
from tests.server.running import RunningServer, running

QUICK = ("--concurrency", "2", "--seconds", "0.05", "--warm-up", "0", "--windows", "3")
FAILS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            error = pb_utils.TritonError("no luck today")
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([], error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
ECHO_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


class Secure(NamedTuple):
    """A server with TLS at both ports, which asks gRPC's clients for certificates, and the files."""

    server: RunningServer
    certificate: Path
    key: Path

    def url(self, scheme: str) -> str:
        return f"{scheme}s://localhost:{self.server.ports[scheme]}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = self_signed(folder)
    repository = folder / "models"
    repository.mkdir()
    (repository / "add_sub").symlink_to(MODELS / "add_sub")
    write_model(repository, "counts", COUNTS, COUNTS_CONFIG)
    write_model(repository, "echo", ECHO, ECHO_CONFIG)
    write_model(repository, "fails", FAILS, COUNTS_CONFIG)
    flags = [f"--http-server-cert={certificate}", f"--http-server-key={key}"]
    flags += [f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    flags += ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={certificate}"]
    with running("--model-repository", repository, *flags) as server:
        yield Secure(server, certificate, key)


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Servers are measured over TLS, with a certificate of the client if they ask for one, and not if theirs is not "
    "trusted.",
)
def test_a_server_is_measured_over_tls(cli: CommandLine, secure: Secure) -> None:
    ca, ours = ("--ca", secure.certificate), ("--client-certificate", secure.certificate)
    for scheme, more in (("http", ()), ("grpc", (*ours, "--client-key", secure.key))):
        bench = ("bench", "add_sub", "--url", secure.url(scheme), *QUICK, "--save", scheme)
        ended = cli(*bench, *ca, *more)
        assert ended.returncode == 0, ended.stderr
        [point] = json.loads((cli.folder / scheme / "add_sub.json").read_text())["series"]
        assert point["failed"] == 0
        assert point["requests"] == point["server"]["requests"] > 0

        ended = cli(*bench, "--overwrite")
        assert ended.returncode == 1
        assert "no server answers at" in ended.stderr


def test_large_tensors_travel_over_tls(cli: CommandLine, secure: Secure) -> None:
    ended = cli(
        "bench", "echo", "--url", secure.url("http"), "--ca", secure.certificate, *QUICK, "--shape", "X=600000",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr


def test_files_that_are_no_certificates_are_refused(cli: CommandLine, secure: Secure) -> None:
    (cli.folder / "bad.pem").write_text("nothing")
    for scheme in ("http", "grpc"):
        ended = cli("bench", "add_sub", "--url", secure.url(scheme), "--ca", "bad.pem")

        assert ended.returncode == 1
        assert "no certificates can be read from bad.pem" in ended.stderr
        ended = cli("bench", "add_sub", "--url", secure.url(scheme), "--client-certificate", "bad.pem")
        assert ended.returncode == 1
        assert "from bad.pem" in ended.stderr
        assert "--client-key" in ended.stderr


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Streams are measured over HTTP, too: the time to the first response, and those between responses.",
)
def test_streams_of_events_have_first_responses_and_later_ones(cli: CommandLine, secure: Secure) -> None:
    bench = ("--url", secure.url("http"), "--ca", secure.certificate, "--streaming", *QUICK)
    ended = cli("bench", "counts", *bench, "--input", "COUNT=[5]", "--save", ".")

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "counts.json").read_text())["series"]
    assert point["responses"] == 5 * point["requests"] > 0
    assert point["first_response_us"]["p50"] <= point["latency_us"]["max"]
    assert point["between_responses_us"]["p50"] is not None

    ended = cli("bench", "fails", *bench, "--input", "COUNT=[5]")
    assert ended.returncode == 1
    assert "no luck today" in ended.stderr
