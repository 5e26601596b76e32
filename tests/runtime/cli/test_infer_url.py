"""`moonpool infer --url`: one request to a server, over HTTP and gRPC."""

from __future__ import annotations

import http.server
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.benchmarks.conftest import Kserve, kserve
from tests.runtime.cli.shell import MODELS, CommandLine, write_kinds
from tests.server.running import RunningServer, running

from moonpool.runtime.cli.main import main

__all__ = ["kserve"]

SUMS = ("--input", "INPUT0=[[1,2,3,4]]", "--input", "INPUT1=[[5,6,7,8]]")
SHOWN = "OUTPUT0  FP32 [1,4]\n[[ 6.  8. 10. 12.]]\nOUTPUT1  FP32 [1,4]\n[[-4. -4. -4. -4.]]\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("add_sub", "crashes"):
        shutil.copytree(Path(MODELS) / name, repository / name, ignore=shutil.ignore_patterns("*.pyc"))
    write_kinds(repository)
    with running(repository, "--http-restricted-api=model-config:the-key=v", serves=["http", "grpc"]) as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: RunningServer) -> str:
    return f"{request.param}://127.0.0.1:{server.ports[request.param]}"


@pytest.mark.promise(
    "The command line",
    "`moonpool infer --url` asks any KServe v2 server over HTTP and gRPC, and refuses an answer "
    "that does not follow the protocol.",
)
def test_a_server_is_asked_as_a_repository_is(cli: CommandLine, url: str) -> None:
    ended = cli("infer", "add_sub", "--url", url, *SUMS)

    assert ended.stderr == ""
    assert ended.stdout == SHOWN


@pytest.mark.promise("The command line", "`moonpool infer` asks models of each kind, …")
def test_models_of_each_kind_are_asked(cli: CommandLine, url: str) -> None:
    there = ("--url", url, "--header", "the-key=v")
    for model in ("counts", "steps"):
        ended = cli("infer", model, *there, "--input", "X=[2]")
        assert ended.stdout == "response 1\nN  INT32 [1]\n[0]\nresponse 2\nN  INT32 [1]\n[1]\n"
    ended = cli("infer", "sums", *there, "--input", "X=[[5]]", "--json")
    assert ended.stdout == '{"Y": [[5]]}\n'
    part = ("sums", *there, "--input", "X=[[5]]", "--json", "--sequence", "7")
    assert cli("infer", *part, "--sequence-start").stdout == '{"Y": [[5]]}\n'
    ended = cli("infer", *part, "--sequence-end")
    assert ended.stderr == ""
    assert ended.stdout == '{"Y": [[10]]}\n'


def test_texts_go_in_and_come_out(cli: CommandLine, url: str) -> None:
    ended = cli("infer", "--url", url, "crashes", "--input", 'WISH=[["für Elise"]]', "--json")

    assert json.loads(ended.stdout) == {"ANSWER": [["alive: für Elise"]]}


def test_outputs_go_into_files(cli: CommandLine, url: str) -> None:
    np.save(cli.folder / "a.npy", np.ones((2, 4), np.float32))
    inputs = ("--input", "INPUT0=@a.npy", "--input", "INPUT1=@a.npy")
    ended = cli("infer", "add_sub", "--url", url, *inputs, "--output-dir", "out", "--version", "1")

    assert ended.returncode == 0, ended.stderr
    assert np.load(cli.folder / "out" / "OUTPUT0.npy").tolist() == [[2.0] * 4] * 2


def test_a_header_goes_along(cli: CommandLine, kserve: Kserve) -> None:
    command = ("infer", "add_sub", "--url", kserve.http.url, *SUMS)

    assert cli(*command).returncode == 0
    refused = cli(*command, "--header", "X-Secret=no")
    assert refused.returncode == 1
    assert "who are you?" in refused.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nope", *SUMS], "'nope'"),
        (["add_sub", "--input", "X=[1]"], "has no input 'X'"),
        (["add_sub", *SUMS[:2]], "INPUT1"),
        (["add_sub", *SUMS, "--version", "7"], "7"),
    ],
)
def test_a_refusal_of_the_server_is_shown(cli: CommandLine, url: str, words: list[str], error: str) -> None:
    ended = cli("infer", "--url", url, *words)

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert error in ended.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["m"], "say where the model is"),
        (["models", "m", "--url", "http://a"], "leave out the repository"),
        (["models", "m", "--header", "a=b"], "--header needs --url"),
        (["m", "--url", "ftp://a"], "must be http://HOST:PORT or grpc://HOST:PORT"),
        (["m", "--url", "http://a", "--backend-directory", "x"], "not for --url"),
        (["m", "--url", "http://a", "--sandbox", "strict"], "not for --url"),
        (["m", "--url", "http://a", "--model-option", "m:MOONPOOL_THREADS=1"], "not for --url"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(cli: CommandLine, words: list[str], error: str) -> None:
    ended = cli("infer", *words)

    assert ended.returncode == 2
    assert error in ended.stderr


def test_grpc_without_its_package_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)

    assert main(["infer", "m", "--url", "grpc://localhost:8001"]) == 1

    assert "needs the package grpcio" in (told := capsys.readouterr().err)
    assert "pip install 'grpcio>=1.60'" in told


OUTPUT = {"name": "Y", "datatype": "FP32", "shape": [2], "data": [1, 2]}


@pytest.fixture
def liar() -> Iterator[Any]:
    """A server that knows one model, and whose answer to a request is `liar.answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answer: object = None

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._say({"name": "m", "inputs": [{"name": "X", "datatype": "FP32", "shape": [1]}]})

        def do_POST(self) -> None:
            self._say(Handler.answer)

        def _say(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        Handler.url = f"http://127.0.0.1:{listening.server_port}"  # type: ignore[attr-defined]
        yield Handler
        listening.shutdown()
        thread.join()


def test_a_server_without_binary_tensors_is_understood(cli: CommandLine, liar: Any) -> None:
    liar.answer = {"outputs": [OUTPUT, {**OUTPUT, "name": "T", "datatype": "BYTES", "data": ["a", "ü"]}]}
    ended = cli("infer", "m", "--url", liar.url, "--input", "X=[1]", "--json")

    assert json.loads(ended.stdout) == {"Y": [1.0, 2.0], "T": ["a", "ü"]}


@pytest.mark.promise("The command line", "`moonpool infer --url` asks any KServe …")
@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"outputs": [1]},
        {"outputs": [{**OUTPUT, "datatype": "FP99"}]},
        {"outputs": [{**OUTPUT, "shape": [3]}]},
        {"outputs": [{**OUTPUT, "shape": [1 << 40]}]},
        {"outputs": [{**OUTPUT, "data": [[1], [1, 2]]}]},
        {"outputs": [{**OUTPUT, "parameters": {"binary_data_size": 1 << 40}}]},
        {"outputs": [{**OUTPUT, "datatype": "BYTES", "parameters": {"binary_data_size": 0}}]},
    ],
)
def test_an_answer_that_is_none_is_refused_in_a_sentence(cli: CommandLine, liar: Any, answer: object) -> None:
    liar.answer = answer
    ended = cli("infer", "m", "--url", liar.url, "--input", "X=[1]")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("moonpool: error: ")
