"""`moonpool serve` and its options, as a process: their sources, their effects, and wrong ones."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.server.certificates import self_signed
from tests.server.repositories import BAD, ECHO, write
from tests.server.running import running, starting
from tests.waiting import wait_until

from moonpool.runtime.cli.main import main
from moonpool.runtime.server.listening import CannotListen

EXPLICIT = "--model-control-mode=explicit"
KEYS = ("--openai-restricted-api", "inference,health", "key", "a value")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", "good")
    return tmp_path / "models"


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Return exit code and stderr of a server that cannot start."""

    def said(*arguments: object, **variables: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            try:
                code = main(["serve", *map(str, arguments)])
            except SystemExit as ended:
                code = int(ended.code or 0)
        return code, capsys.readouterr().err

    return said


@pytest.mark.promise("The server (`moonpool serve`)", "An option that is misspelt or …")
def test_a_command_line_that_is_wrong_says_what_is_meant(models: Path, said: Said) -> None:
    wrong = {
        ("--http-prot=1",): 'did you mean "--http-port"?',
        ("--http-por=1",): "unrecognized arguments",
        ("--http-port=x",): "--http-port: must be a port",
        ("--load-model=good",): (
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        ),
        (EXPLICIT, "--load-model=good", "--load-model=*"): (
            "Wildcard model name '*' must be the ONLY startup model if specified at all."
        ),
        ("--openai-port=0", "--allow-openai=false"): "--openai-port serves nothing",
        ("--openai-restricted-api", "inference", "key"): "expected 3 arguments",
        ("--openai-restricted-api", "inference,unknown", "key", "value"): "Unknown API 'unknown'",
        ("--openai-restricted-api", "inference,inference", "key", "value"): (
            "restricted api 'inference' can not be specified in multiple config groups"
        ),
        (*KEYS, "--openai-restricted-api", "health,metrics", "other", "value"): (
            "restricted api 'health' can not be specified in multiple config groups"
        ),
        ("--allow-http=false", "--allow-grpc=false"): "nothing to serve with",
        ("--http-port=8001", "--grpc-port=8001"): "--http-port and --grpc-port are both 8001",
        ("--http-port=8000", "--openai-port=8000"): "--http-port and --openai-port are both 8000",
        ("--http-server-cert=x",): "needed both",
        ("--trace-config=nonsense=1",): "--trace-config",
        ("--metrics-config=nonsense=1",): "--metrics-config",
        ("--http-restricted-api=healthy:a=b",): "unknown API 'healthy'",
        ("--control-token-file=/nowhere/token",): "/nowhere/token: No such file",
        ("--log-file=/nowhere/log",): "--log-file: /nowhere/log: No such file",
        ("--trace-config=level=TIMESTAMPS",): "(triton,file=PATH)",
    }
    for arguments, what in wrong.items():
        code, text = said(models, *arguments)
        assert (code, what in text) == (2, True), text
    code, text = said()
    assert (code, "name a model repository" in text) == (2, True), text


@pytest.mark.promise(
    "The server (`moonpool serve`)", "An error about a certificate, a key or an address names its flag or its port."
)
def test_errors_about_certificates_name_their_flags(models: Path, tmp_path: Path, said: Said) -> None:
    key, certificate = self_signed(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = self_signed(tmp_path / "other")
    empty = tmp_path / "empty"
    empty.touch()
    of_grpc = ("--grpc-use-ssl-mutual=true", f"--grpc-root-cert={empty}")
    wrong = {
        ("http", tmp_path / "none", key): f"--http-server-cert: {tmp_path}/none: No such file",
        ("http", certificate, tmp_path): f"--http-server-key: {tmp_path}: Is a directory",
        ("http", empty, key): f"--http-server-cert ({empty}) and --http-server-key ({key}) must be",
        ("grpc", certificate, other): "a certificate and its private key in PEM form",
        ("grpc", certificate, key): f"--grpc-root-cert ({empty}) must be a certificate in PEM form",
    }
    for (protocol, first, second), what in wrong.items():
        pair = (f"--{protocol}-server-cert={first}", f"--{protocol}-server-key={second}")
        code, text = said(models, *pair, *(of_grpc if protocol == "grpc" else ()))
        assert (code, what in text) == (2, True), text


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.EADDRINUSE, "share a port if all of them have --reuse-http-port=true"),
        (errno.EACCES, "take a port from 1024 on"),
        (errno.EADDRNOTAVAIL, "0.0.0.0 is all that it has"),
    ],
)
def test_a_port_that_is_refused_is_an_error_with_a_cure(number: int, cure: str) -> None:
    said = str(CannotListen("http", "192.0.2.1", 80, OSError(number, os.strerror(number))))

    assert said.startswith(f"cannot listen at 192.0.2.1, port 80 (http): {os.strerror(number)}; ")
    assert cure in said


def test_mistakes_in_other_places_are_named(models: Path, tmp_path: Path, said: Said) -> None:
    file = tmp_path / "server.toml"
    file.write_text("http-port = 'x'")
    code, text = said(models, "--config", file)
    assert (code, f"{file}: http-port: must be a port" in text) == (2, True), text
    code, text = said(models, MOONPOOL_SERVE_HTTP_PORT="x")
    assert (code, "MOONPOOL_SERVE_HTTP_PORT: must be a port" in text) == (2, True), text
    code, text = said(models, MOONPOOL_SERVE_HTP_PORT="1")
    what = 'MOONPOOL_SERVE_HTP_PORT: there is no such option; did you mean "HTTP_PORT"?'
    assert (code, what in text) == (2, True), text
    code, text = said(tmp_path / "missing")
    assert (code, "there is no directory" in text) == (1, True), text


def test_a_package_that_is_missing_is_named(models: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    code, text = said(models)
    assert code == 1
    # The command works as it is pasted, whether or not the index has a moonpool.
    assert "the package uvloop is not installed: " in text
    assert re.search(r" -m pip install .*'httptools>=.* 'uvloop>=", text)
    assert "moonpool[" not in text


def test_options_come_from_a_file_and_the_environment(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f"model-repository = [{json.dumps(str(models))}]\nid = 'from the file'")
    variables = {"MOONPOOL_SERVE_CONFIG": str(file), "MOONPOOL_SERVE_LOG_FORMAT": "json"}
    with running("--allow-grpc=false", variables=variables, serves=["http"]) as server:
        lines = [json.loads(line) for line in server.text().splitlines()]
    assert any("from the file" in line["text"] for line in lines)
    assert {line["level"] for line in lines} == {"info"}


@pytest.mark.promise("The server (`moonpool serve`)", "Every flag of tritonserver is known: …")
def test_options_without_effect_are_logged_once(models: Path) -> None:
    flags = ("--backend-config=python,shm-default-byte-size=1", "--backend-config=python,x=y")
    with running(models, *flags) as server:
        lines = [line for line in server.text().splitlines() if "has no effect" in line]
    assert len(lines) == 1
    assert re.match(r"W\d{4} .*\] --backend-config has no effect here: ", lines[0])


def test_a_backend_directory_that_is_absent_is_a_warning(models: Path, tmp_path: Path) -> None:
    with running(models, f"--backend-directory={tmp_path}/none") as server:
        lines = [line for line in server.text().splitlines() if "backend directory" in line]
    assert len(lines) == 1
    assert re.match(rf"W\d{{4}} .*\] there is no backend directory {tmp_path}/none: ", lines[0])


def test_the_log_goes_to_a_file(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with starting(models, f"--log-file={path}") as server:
        wait_until(lambda: path.exists() and "] Ready" in path.read_text(), 60.0)
        server.tell(signal.SIGTERM)
        assert server.wait() == 0
        assert server.text() == ""


def test_services_can_be_left_out(models: Path) -> None:
    with running(models, "--allow-grpc=false", "--allow-metrics=false", serves=["http"]) as server:
        assert set(server.ports) == {"http"}
    with running(models, "--allow-http=false", serves=["grpc"]) as server:
        assert "http" not in server.ports


def test_a_repository_is_polled_when_it_is_time_and_at_a_hangup(models: Path) -> None:
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with running(models, *flags) as server:
        write(models, "second")
        server.wait_for("successfully loaded 'second'")
        shutil.rmtree(models / "good")
        server.wait_for("'good' was removed from the repository: unloading")
    with running(models, "--model-control-mode=poll", "--repository-poll-secs=3600") as server:
        write(models, "third", BAD)
        server.tell(signal.SIGHUP)
        server.wait_for("load failed for model 'third'")
        write(models, "third")
        server.tell(signal.SIGHUP)
        server.wait_for("successfully loaded 'third'")


def test_a_hangup_does_nothing_in_other_modes(models: Path) -> None:
    with running(models) as server:
        server.tell(signal.SIGHUP)
        server.wait_for("nothing is polled with --model-control-mode=none")


def test_models_are_loaded_at_the_start_as_the_mode_says(models: Path) -> None:
    for name in ("second", "third"):
        write(models, name)
    with running(models, EXPLICIT) as server:
        assert "successfully loaded" not in server.text()
    with running(models, EXPLICIT, "--load-model=good", "--load-model=third") as server:
        loaded = re.findall(r"successfully loaded '(\w+)'", server.text())
        assert sorted(loaded) == ["good", "third"]
    with running(models, EXPLICIT, "--load-model=*") as server:
        assert len(re.findall("successfully loaded", server.text())) == 3


NOWHERE = "model not found in any model repository"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("nope", ("failed to poll model 'nope': " + NOWHERE,)),
        ("..", (NOWHERE, "at least one version must be available under the version policy")),
        ("../../etc/passwd", (NOWHERE, "Poll failed for model directory '../../etc/passwd'")),
        ("", ("Invalid model name",)),
        ("\n\t", (NOWHERE,)),
    ],
)
def test_a_model_that_is_nowhere_ends_the_start(models: Path, name: str, texts: tuple[str, ...]) -> None:
    with starting(models, EXPLICIT, f"--load-model={name}") as server:
        assert server.wait() == 1
        assert [text for text in texts if text not in server.text()] == []


@pytest.mark.promise("OpenAI", "`--openai-port` serves this API alone, with …")
@pytest.mark.parametrize("place", ["command line", "environment"])
def test_the_port_for_openai_s_api(models: Path, place: str) -> None:
    flags = ("--allow-http=false", "--allow-grpc=false", "--openai-port=0")
    variables = {"MOONPOOL_SERVE_OPENAI_RESTRICTED_API": " ".join(KEYS[1:])} if place == "environment" else None
    more = () if variables else KEYS
    with running(models, *flags, *more, variables=variables, serves=["openai"]) as server:
        assert set(server.ports) == {"openai", "metrics"}
        for headers, status in (({}, 401), ({"key": "a value"}, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", server.ports["openai"], timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", "/health/ready", headers=headers)
                assert connection.getresponse().status == status
        assert "a value" not in server.text()


def test_two_repositories_are_served_as_one(models: Path, tmp_path: Path) -> None:
    for name in ("good", "third"):
        write(tmp_path / "more", name)
    flags = (f"--model-repository={tmp_path / 'more'}", "--exit-on-error=false")
    with running(models, *flags) as server:
        assert re.findall(r"successfully loaded '(\w+)'", server.text()) == ["third"]
        assert "failed to poll model 'good': not unique across all" in server.text()


def test_a_load_that_failed_is_tried_again_as_often_as_wanted(models: Path, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    write(models, "moody", f"open({str(tries)!r}, 'a').write('x')\n{BAD}")
    with starting(models, "--model-load-retry-count=2", "--sandbox=off") as server:
        assert server.wait() == 1
    assert os.path.getsize(tries) == 3


def test_prints_of_a_model_are_lines_of_the_log(models: Path) -> None:
    write(models, "loud", ECHO + "\nprint('hello', flush=True)\n")
    with running(models) as server:
        server.wait_for("[loud_0_0] hello\n")
        assert re.search(r"^I\d{4} .*\d+\] \[loud_0_0\] hello$", server.text(), re.MULTILINE)
