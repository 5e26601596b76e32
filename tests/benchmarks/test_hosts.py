"""The parts of hosts: a server's process, the model in another host's process, what adapters need."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_until

from moonpool.benchmarks.hosts.hosted import read, written
from moonpool.benchmarks.hosts.hosts import HOSTS, copy_of_model, needs_of
from moonpool.benchmarks.hosts.process import ServerProcess, Unavailable, held_ports, port_of
from moonpool.runtime.client.control_client import HttpControlClient
from moonpool.runtime.client.request import Endpoint, Question, QuestionTensor

PATIENCE_S = 60.0


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_all_that_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    # It starts a process that leaves its session, ignores what asks it to end, and outlives it.
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
    noted = tmp_path / "pid"
    command = [sys.executable, "-c", program, str(noted)]
    server = ServerProcess("it", command, None, tmp_path / "log", lambda: noted.exists() and noted.read_text() != "")
    pids = server.pid, int(noted.read_text())
    assert not any(map(gone, pids))
    server.close()

    assert gone(pids[0])
    wait_until(lambda: gone(pids[1]) or is_zombie(pids[1]), PATIENCE_S, "the other one to end")


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no port for me')"]
    with pytest.raises(Unavailable, match="it ended with 1: no port for me"):
        ServerProcess("it", command, None, tmp_path / "log", lambda: False)
    with pytest.raises(Unavailable, match=r"it does not start: .*nowhere"):
        ServerProcess("it", ["/nowhere"], None, tmp_path / "log", lambda: False)


@pytest.mark.parametrize("option", ["SO_REUSEADDR", "SO_REUSEPORT"])
def test_a_server_may_listen_at_a_port_that_is_held(option: str) -> None:
    [held] = held_ports(1)
    program = f"""
import socket, sys
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.{option}, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
"""
    with held:
        subprocess.run([sys.executable, "-c", program, str(port_of(held))], check=True)


def test_a_body_is_read_and_written_as_the_protocol_has_it() -> None:
    arrays = {"X": np.arange(6, dtype=np.float32).reshape(2, 3), "TEXT": np.array([["ä", "b" * 300]], object)}
    tensors = [
        QuestionTensor.of(name, "BYTES" if array.dtype == object else "FP32", array) for name, array in arrays.items()
    ]
    endpoint = Endpoint("http", "a", 1)
    body = Question("m", "", tensors).as_http(endpoint).partition(b"\r\n\r\n")[2]
    found = read(body)

    assert found["X"].tolist() == arrays["X"].tolist()
    assert found["TEXT"].tolist() == [["ä".encode(), b"b" * 300]]
    # A long head is read, too.
    many = {f"{'X' * 400}{number}": np.zeros(1, np.int32) for number in range(50)}
    tensors = [QuestionTensor.of(name, "INT32", array) for name, array in many.items()]
    body = Question("m", "", tensors).as_http(endpoint).partition(b"\r\n\r\n")[2]
    assert list(read(body)) == list(many)
    assert written("m", found).startswith(b'{"model_name": "m", "outputs": [{"name": "X", "datatype"')


def test_an_answer_is_understood_without_the_length_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    body = written("m", {"Y": np.array([1, 200], np.uint8)})
    client = HttpControlClient(Endpoint("http", "a", 1), (), 1.0)
    monkeypatch.setattr(client, "_ask", lambda *_: ({}, body))
    [output] = client.infer(Question("m", "", [QuestionTensor.of("X", "INT8", np.zeros(1, np.int8))]))

    assert output.array().tolist() == [1, 200]


def test_every_host_pins_the_version_that_it_was_tried_with() -> None:
    with_programs = {*HOSTS} - {"moonpool", "triton", "processpool"}
    assert len(with_programs) > 3
    for name in with_programs:
        assert re.match(rf"{name}(\[\w+\])?==\d", needs_of(name)[0])


def test_a_copy_of_a_model_has_so_many_instances(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("")
    (folder / "config.pbtxt").write_text('backend: "python" instance_group [ { count: 1 }, { count: 2 } ]')
    copy_of_model(folder, tmp_path / "n", 3)
    copy_of_model(folder, tmp_path / "o", None)

    text = (tmp_path / "n" / "config.pbtxt").read_text()
    assert re.findall(r"count: (\d+)", text) == ["3"]
    assert (tmp_path / "o" / "config.pbtxt").read_text() == (folder / "config.pbtxt").read_text()
    assert os.listdir(tmp_path / "n" / "1") == ["model.py"]
