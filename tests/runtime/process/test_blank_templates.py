"""Blank templates that are not what they should be: the stub is started in the ordinary way, and nothing is left."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from moonpool.runtime.process import blank_templates
from moonpool.runtime.process.blank_templates import BlankTemplates, TemplatePool
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.reactor import Reactor

# A program in the place of the interpreter. It gets the arguments of a template.
FAKE = """#!{python} -IS
import json, os, signal, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[5]))


def ready(why="", file=os.__file__):
    channel.send(json.dumps([why, file]).encode())


def asked():
    data, fds, _, _ = socket.recv_fds(channel, 1000, 8)
    if not data:
        os._exit(0)
    for fd in fds:
        os.close(fd)
    return data.decode()


{does}
"""


class Fakes:
    """Starts stubs from templates that are programs of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reactor = Reactor()
        self.templates = BlankTemplates(self._reactor, TemplatePool())
        self.program = folder / "python"
        self._ends = [*socket.socketpair(), *socket.socketpair()]

    def does(self, what: str) -> None:
        self.program.write_text(FAKE.format(python=sys.executable, does=what))
        self.program.chmod(0o755)

    def fork(self, deadline: float | None = None, variables: dict[str, str] | None = None) -> ChildProcess | None:
        return self.templates.fork(
            str(self.program),
            {"PATH": os.environ["PATH"]} | (variables or {}),
            str(self._folder),
            "m_0",
            [end.fileno() for end in self._ends],
            deadline,
        )

    def close(self) -> None:
        self.templates.close()
        self._reactor.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    monkeypatch.setattr(blank_templates, "KEEP_S", 1000.0)
    fakes = Fakes(tmp_path)
    yield fakes
    fakes.close()


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("ready('it has 2 threads')", "it has 2 threads"),
        ("pass", "it ended"),
        ("channel.send(b'no JSON')", "Expecting value"),
        ("channel.send(b'[1, 2, 3]')", "too many values"),
    ],
)
def test_one_that_cannot_fork_is_asked_once(
    fakes: Fakes, does: str, why: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    fakes.does(f"open('begun', 'a').write('x')\n{does}")
    assert fakes.fork() is None
    assert fakes.fork() is None
    assert why in caplog.text
    assert (tmp_path / "begun").read_text() == "x"


def test_one_that_could_not_fork_is_tried_anew_however_often_it_is_asked(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blank_templates, "KEEP_S", 0.2)
    fakes.does("ready('not now')")
    assert fakes.fork() is None
    fakes.does(FORKS.format(clone=clone(), answer="channel.send(b'%d' % pid)"))
    process = wait_until(fakes.fork)
    assert process is not None
    process.kill()
    process.wait(60.0)
    process.close()


def test_an_interpreter_that_is_absent_is_for_the_start_to_tell(fakes: Fakes) -> None:
    assert fakes.fork() is None


def test_what_it_prints_goes_to_the_log(fakes: Fakes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fakes.does("print('from a sitecustomize', flush=True)\nready()\nasked()\nchannel.send(b'-11')")
    assert fakes.fork() is None
    assert "from a sitecustomize" in caplog.text


@pytest.mark.parametrize("answer", ["-11", "0"])
def test_a_fork_that_the_kernel_refuses_is_none(fakes: Fakes, answer: str) -> None:
    fakes.does(f"ready()\nwhile True:\n    asked()\n    channel.send(b'{answer}')")
    assert fakes.fork() is None
    assert fakes.fork() is None


@pytest.mark.parametrize("does", ["os._exit(1)", "channel.close(); time.sleep(1000)", "time.sleep(1000)"])
def test_one_that_does_not_answer_is_replaced_once(
    fakes: Fakes, does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blank_templates, "_FORK_S", 0.2)
    fakes.does(f"open('begun', 'a').write('x')\nready()\nasked()\n{does}")
    assert fakes.fork() is None
    assert (tmp_path / "begun").read_text() == "xx"


def test_one_that_is_not_ready_leaves_half_of_the_time(fakes: Fakes) -> None:
    fakes.does("time.sleep(1000)")
    before = time.monotonic()
    assert fakes.fork(before + 2.0) is None
    assert time.monotonic() >= before + 1.0
    # Another model may have more time.
    fakes.does(FORKS.format(clone=clone(), answer="channel.send(b'%d' % pid)"))
    process = fakes.fork()
    assert process is not None
    process.kill()
    process.wait(60.0)
    process.close()


def test_a_start_with_little_time_waits_for_no_template_that_is_not_there(fakes: Fakes, tmp_path: Path) -> None:
    forks = FORKS.format(clone=clone(), answer="channel.send(b'%d' % pid)")
    fakes.does(f"open('begun', 'a').write('x')\n{forks}")
    assert fakes.fork(time.monotonic() + 0.5) is None
    assert not (tmp_path / "begun").exists()
    for deadline in (None, time.monotonic()):  # one that is ready is used
        process = fakes.fork(deadline)
        assert process is not None
        process.kill()
        process.wait(60.0)
        process.close()
    assert (tmp_path / "begun").read_text() == "x"


FORKS = """
ready()
while True:
    asked()
    # As the real one: the child of its parent.
    import ctypes
    pid = ctypes.CDLL(None).syscall({clone}, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        time.sleep(1000)
    {answer}
"""


def clone() -> int:
    from moonpool.stub.sandbox.kernel import NUMBERS

    return NUMBERS["clone"]


def test_a_fork_is_a_child_of_this_process(fakes: Fakes) -> None:
    fakes.does(FORKS.format(clone=clone(), answer="channel.send(b'%d' % pid)"))
    process = fakes.fork()
    assert process is not None
    fakes.templates.close()
    assert process.wait(0) is None
    process.kill()
    assert process.wait(60.0) == -9
    process.close()
    assert fakes.fork() is None  # nothing is forked any more


def test_a_fork_whose_answer_nobody_read_is_ended(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(channel: socket.socket, name: str, _: list[int]) -> int | None:
        channel.send(name.encode())
        select.select([channel], [], [], 60.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(blank_templates._Template, "_ask", staticmethod(interrupted))
    answer = "open('pid', 'w').write(str(pid)); channel.send(b'%d' % pid)"
    fakes.does(FORKS.format(clone=clone(), answer=answer))
    with pytest.raises(KeyboardInterrupt):
        fakes.fork()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_the_one_that_was_not_used_for_longest_makes_room(fakes: Fakes, tmp_path: Path) -> None:
    fakes.does("open(f'begun{os.getpid()}', 'w')\nready()\nwhile True:\n    asked()\n    channel.send(b'-1')")
    for number in range(6):
        fakes.fork(variables={"NUMBER": str(number)})
    begun = [int(path.name.removeprefix("begun")) for path in tmp_path.glob("begun*")]
    assert len(begun) == 6
    wait_until(lambda: sum(os.path.exists(f"/proc/{pid}") for pid in begun) == 4)


def test_an_interpreter_that_was_replaced_has_another_template(fakes: Fakes, tmp_path: Path) -> None:
    does = "open('begun', 'a').write('x')\nready()\nwhile True:\n    asked()\n    channel.send(b'-1')"
    fakes.does(does)
    fakes.fork()
    fakes.fork()
    assert (tmp_path / "begun").read_text() == "x"
    fakes.program.unlink()
    fakes.does(does)
    fakes.fork()
    assert (tmp_path / "begun").read_text() == "xx"


def test_many_threads_share_one(fakes: Fakes, tmp_path: Path) -> None:
    fakes.does("open('begun', 'a').write('x')\n" + FORKS.format(clone=clone(), answer="channel.send(b'%d' % pid)"))
    found: list[ChildProcess | None] = []
    threads = [threading.Thread(target=lambda: found.append(fakes.fork())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processes = [process for process in found if process is not None]
    assert len({process.pid for process in processes}) == 8
    for process in processes:
        process.kill()
        process.wait(60.0)
        process.close()
    assert (tmp_path / "begun").read_text() == "x"
