"""`moonpool serve` as a process: its start, its signals and its end."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.grpc
from tests.server.repositories import BAD, ECHO, write
from tests.server.running import command, environment, running, starting
from tests.waiting import wait_until

SLOW_TO_LOAD = ECHO.replace(
    "class TritonPythonModel:",
    "print('loading for long', flush=True)\nimport time\ntime.sleep(1e9)\nclass TritonPythonModel:",
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", "good")
    return tmp_path / "models"


def test_it_serves_and_says_so_in_triton_s_words(models: Path) -> None:
    with running(models) as server:
        assert server.get("/v2/health/live")[0] == 200
        text = server.text()
    assert re.search(r"^\| good  \| 1       \| READY  \|$", text, re.MULTILINE)
    assert re.search(
        r"^I\d{4} [\d:.]{15} \d+ \w+\.py:\d+\] Started HTTPService at 127\.0\.0\.1:\d+$", text, re.MULTILINE
    )
    assert "Only this machine is served" in text


@pytest.mark.promise(
    "The server (`moonpool serve`)", "A server whose standard streams were closed serves, and ends in order."
)
def test_a_server_needs_no_standard_streams(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    closing = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash")
    with starting(models, f"--log-file={log}", before=closing) as server:
        server.log = log
        wait_until(lambda: log.exists() and "http" in server.ports, 60.0, "the server to start")
        server.wait_for("Ready")
        assert server.get("/v2/models/good/ready")[0] == 200
        server.tell(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.promise(
    "The server (`moonpool serve`)", "Clients that connect and stay leave models the descriptors that they need."
)
def test_clients_leave_models_the_descriptors_that_they_need(models: Path) -> None:
    few = ("bash", "-c", 'ulimit -n 256; exec "$@"', "bash")
    with starting(models, before=few) as server:
        server.wait_for("Ready")
        # HTTP gets 73, a quarter more is for refused connections and for metrics, and gRPC gets 36. That is half of
        # all.
        for what in ("http-max-connections is 16384", "grpc-max-connections is 8192"):
            room = 73 if what.startswith("http") else 36
            assert f"--{what}, and the limit of open files (ulimit -n) allows {room}\n" in server.text()
        _, shown = server.get("/v2/moonpool/overview")
        with contextlib.ExitStack() as stack:
            for port in ("http", "metrics"):
                address = "127.0.0.1", server.ports[port]
                for _ in range(200):
                    stack.enter_context(socket.create_connection(address))
            os.kill(shown["models"][0]["instances"][0]["pid"], signal.SIGKILL)
            server.wait_for("is not healthy")
            client = stack.enter_context(tritonclient.grpc.InferenceServerClient(server.grpc))
            wait_until(lambda: client.is_model_ready("good"), 60.0)
        assert "Too many open files" not in server.text()


@pytest.mark.promise(
    "Readiness",
    "If no instance serves a model, each time that a client asks for its readiness the answer "
    "is no, and the log has a line in Triton's words. When models ask, nothing is logged.",
)
def test_each_probe_of_an_instance_that_is_down_is_logged_in_todays_words(models: Path) -> None:
    config = models / "good" / "config.pbtxt"
    pause = 'parameters { key: "MOONPOOL_RESTART_BACKOFF_S" value: { string_value: "60" } }'
    config.write_text(f"{config.read_text()}\n{pause}\n")
    line = "Model 'good' version 1 is not ready: Stub process 'good_0_0' is not healthy."
    with running(models) as server:

        def process() -> int:
            _, shown = server.get("/v2/moonpool/overview")
            return int(shown["models"][0]["instances"][0]["pid"] or 0)

        first = process()
        os.kill(first, signal.SIGKILL)
        # The first restart follows at once, the second one after the pause.
        second = wait_until(lambda: process() not in (0, first) and process(), 60.0)
        wait_until(lambda: server.get("/v2/models/good/ready")[0] == 200, 60.0)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: server.get("/v2/models/good/ready")[0] != 200, 60.0)

        def count() -> int:
            # Lines come in their order, so those of all probes stand before this one.
            hangups = server.text().count("SIGHUP: ")
            server.tell(signal.SIGHUP)
            wait_until(lambda: server.text().count("SIGHUP: ") > hangups)
            return server.text().count(line)

        before = count()
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            for _ in range(3):
                assert server.get("/v2/models/good/ready")[0] == 400
                assert not client.is_model_ready("good")
        assert count() == before + 6


@pytest.mark.promise("Readiness", "If the file of a model is missing, the log has the line of Triton's stub.")
def test_a_model_file_that_is_missing_is_logged_in_tritons_words(models: Path) -> None:
    file = models / "good" / "1" / "model.py"
    with running(models, "--model-control-mode=explicit") as server:
        file.unlink()
        assert server.get("/v2/repository/models/good/load", "POST", b"{}")[0] != 200
        text = f"Failed to preinitialize Python stub: Python model file not found in '{file}'"
        server.wait_for(text)


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "SIGTERM and SIGINT end it in order, with exit code 0. A second one ends it at once, and its models with it.",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(models: Path, number: signal.Signals) -> None:
    with running(models) as server:
        server.tell(number)
        assert server.wait() == 0
        assert "unloading models" in server.text()


# The parent sets some signals, and becomes the given command.
BECOMES = """
import os, signal, sys
{}
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Signals end a server whose parent ignored or blocked them, and its log has the exit codes "
    "of stubs. A server that was started with SIGHUP ignored, as by `nohup`, goes on ignoring "
    "it.",
)
def test_it_can_be_ended_where_its_parent_blocked_the_signals(models: Path) -> None:
    blocks = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])"
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    before = [sys.executable, "-c", BECOMES.format(f"{blocks}; {ignores}")]
    for number in (signal.SIGTERM, signal.SIGINT):
        with running(models, before=before) as server:
            server.tell(number)
            assert server.wait() == 0


@pytest.mark.promise("The server (`moonpool serve`)", "Signals end a server whose parent …")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_stays_ignored_where_the_parent_ignored_it(models: Path, is_ignored: bool) -> None:
    disposition = "signal.SIG_IGN" if is_ignored else "signal.SIG_DFL"
    program = BECOMES.format(f"signal.signal(signal.SIGHUP, {disposition})")
    with running(models, before=[sys.executable, "-c", program]) as server:
        status = Path(f"/proc/{server.process.pid}/status").read_text()

    mask = int(re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    assert bool(mask & 1 << signal.SIGHUP - 1) == is_ignored


@pytest.mark.promise(
    "The server (`moonpool serve`)", "If a port is taken, the server ends with exit code 1 before it loads a model."
)
@pytest.mark.promise("The server (`moonpool serve`)", "An error about a certificate, a …")
def test_a_port_that_is_taken_is_told_before_any_model_is_loaded(models: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("http", "grpc", "metrics"):
            with starting(models, f"--{flag}-port={port}") as server:
                assert server.wait() == 1
                assert str(port) in server.text()
                assert "loaded" not in server.text()


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A model that cannot be loaded ends the start with exit code 1, unless `--exit-on-error=false` is given.",
)
@pytest.mark.promise(
    "The model repository of a server",
    "If a model of a repository cannot be loaded, the message says how to load the "
    "others: on the command line, and in a program.",
)
def test_a_model_that_cannot_be_loaded_ends_it_unless_that_is_wanted(models: Path) -> None:
    write(models, "bad", BAD)
    with starting(models) as server:
        assert server.wait() == 1
        assert "creating server: Internal - failed to load all models" in server.text()
        assert re.search(
            r"^\| bad   \| 1       \| UNAVAILABLE: Internal: ValueError: boom", server.text(), re.MULTILINE
        )
        assert re.search(
            r"To serve the others, add --exit-on-error=false; to load no others, "
            r"--model-control-mode=explicit --load-model=good\.$",
            server.text(),
            re.MULTILINE,
        )
    with running(models, "--exit-on-error=false"):
        pass
    with running(models, "--model-control-mode=explicit", "--load-model=good"):
        pass


@pytest.mark.promise(
    "The model repository of a server",
    "The log says `Ready` as soon as readiness says so, and not before. Until then it says that "
    "the server listens, and which models are missing and why.",
)
def test_it_says_ready_when_readiness_says_so_and_not_before(models: Path) -> None:
    write(models, "bad", BAD)
    flags = ("--exit-on-error=false", "--model-control-mode=poll", "--repository-poll-secs=0")
    with running(models, *flags) as server:
        assert server.get("/v2/health/ready")[0] == 400
        assert re.search(
            r"^W.*\] Listening, but not ready: model 'bad' version 1 is not: Internal: ValueError: boom\. "
            r"With --strict-readiness=false, models that could not be loaded do not count\.$",
            server.text(),
            re.MULTILINE,
        )
        assert "] Ready" not in server.text()
        write(models, "bad")
        server.tell(signal.SIGHUP)
        server.wait_for("] Ready\n")
        assert server.get("/v2/health/ready")[0] == 200
    assert server.process.returncode == 0
    with running(models, "--exit-on-error=false") as server:
        assert server.get("/v2/health/ready")[0] == 200
        assert "] Ready\n" in server.text()
        assert "not ready" not in server.text()


@pytest.mark.promise("The model repository of a server", "The log says `Ready` as soon …")
def test_it_says_ready_with_models_missing_if_readiness_does_not_count_them(models: Path) -> None:
    write(models, "bad", BAD)
    with running(models, "--exit-on-error=false", "--strict-readiness=false") as server:
        assert server.get("/v2/health/ready")[0] == 200
        assert "] Ready\n" in server.text()


@pytest.mark.promise("The model repository of a server", "If a model of a repository …")
def test_a_configuration_that_cannot_be_used_keeps_no_server_from_being_ready(models: Path) -> None:
    (models / "all" / "1").mkdir(parents=True)
    (models / "all" / "config.pbtxt").write_text('platform: "nonsense"')
    with starting(models) as server:
        assert server.wait() == 1
        assert "unexpected platform type 'nonsense' for all" in server.text()
        assert "To serve the others, add --exit-on-error=false" in server.text()
    with running(models, "--exit-on-error=false") as server:
        # As in Triton, a model whose configuration cannot be used does not count.
        assert server.get("/v2/health/ready")[0] == 200
        assert "] Ready\n" in server.text()
        assert server.get("/v2/models/good/ready")[0] == 200


@pytest.mark.promise("The server (`moonpool serve`)", "A load that never ends does not keep the server from ending.")
def test_a_load_does_not_keep_it_from_ending(models: Path) -> None:
    write(models, "slow", SLOW_TO_LOAD)
    with starting(models) as server:
        server.wait_for("] loading for long")
        server.tell(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A server whose log nobody reads, such as a pipe that is full, serves, and ends in order.",
)
def test_a_server_whose_log_nobody_reads_serves_and_ends(models: Path, tmp_path: Path) -> None:
    # More than a pipe holds.
    write(models, "loud", ECHO.replace("return", "print(('x' * 100 + chr(10)) * 900)\n        return"))
    pipe, said = tmp_path / "pipe", b""
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def is_ready() -> bool:
        nonlocal said
        with contextlib.suppress(BlockingIOError):
            said += os.read(fd, 65536)
        return b"] Ready" in said

    try:
        into_pipe = ("bash", "-c", f'exec "$@" 2> {shlex.quote(str(pipe))}', "bash")
        with starting(models, before=into_pipe) as server:
            wait_until(is_ready)
            server.log.write_bytes(said)
            body = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
            for _ in range(3):
                status, answer = server.get("/v2/models/loud/infer", "POST", body)
                assert status == 200, answer
            server.tell(signal.SIGTERM)
            assert server.wait() == 0
    finally:
        os.close(fd)


@pytest.mark.promise(
    "The server (`moonpool serve`)", "A terminal shows which models are loading, among the lines of the log."
)
def test_a_terminal_shows_what_is_being_loaded(models: Path) -> None:
    ours, theirs = pty.openpty()
    data = b""
    try:
        flags = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        with subprocess.Popen(
            command(models, *flags),
            stdin=subprocess.DEVNULL,
            stderr=theirs,
            env=environment({"TERM": "xterm", "NO_COLOR": ""}),
        ) as process:
            os.close(theirs)
            # The end of the last process that has the other end is an error here.
            with contextlib.suppress(OSError):
                while part := os.read(ours, 65536):
                    was_ready = b"] Ready" in data
                    data += part
                    if b"] Ready" in data and not was_ready:
                        process.send_signal(signal.SIGTERM)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert "good_0_0 starting…".encode() in data
    assert re.search(rb"good_0_0 \x1b\[32mready\x1b\[0m [0-9.]+ s\r\n", data)
    assert re.search(rb"I\d{4} .*\] Started HTTPService at ", data)
