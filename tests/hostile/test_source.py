"""Hostile source: what a run tries against the one after it, its template, the runtime and the machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.chaos.figures import children_of, command
from tests.e2e.hosting import is_running
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.sandboxes.pool import MOST_WORKERS, close_pool

SECRET = "a9f3c1e7d2"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_pool()


def value(source: str, **inputs: object) -> object:
    return moonpool.run(source, inputs, timeout_s=20).unwrap()


@pytest.mark.promise(
    "Source", "A run finds nothing of the runs before it: no file, no memory, no variable, no process."
)
def test_a_run_finds_nothing_of_the_one_before() -> None:
    value(
        "import builtins, os, sys, types\n"
        "builtins.mark = secret; os.environ['MARK'] = secret; sys.modules['mark'] = types.ModuleType('mark')\n"
        "open('file', 'w').write(secret); os.makedirs('out/' + 'd/' * 200)\n"
        "os.makedirs('closed'); os.chmod('closed', 0)\n"
        "open('/dev/shm/file', 'w').write(secret); os.chmod('.', 0); print(secret)",
        secret=SECRET,
    )
    left = value(
        "import builtins, os, sys\n"
        "marked = [hasattr(builtins, 'mark'), 'MARK' in os.environ, 'mark' in sys.modules]\n"
        "[*marked, os.listdir('.'), os.listdir('/dev/shm')]"
    )

    assert left == [False, False, False, ["out"], []]


def test_a_run_has_state_of_its_own() -> None:
    """Although all are forked from one process, which has run moonpool's own source to be quick."""
    look = (
        "import linecache, os, random, sys, threading, numpy as np\n"
        "answers = []\nthread = threading.Thread(target=answers.append, args=(1,))\nthread.start()\nthread.join()\n"
        "threads = [answers, threading.active_count(), threading.current_thread() is threading.main_thread()]\n"
        "names = sorted(name for name in globals() if not name.startswith('__'))\n"
        "lines = [name for name in linecache.cache if name.startswith('<source')]\n"
        "[random.random(), np.random.random(), os.urandom(8).hex()], threads, names, lines, os.listdir()"
    )
    first, second = (moonpool.run(look, timeout_s=20).unwrap() for _ in range(2))

    assert not set(first[0]) & set(second[0])
    names = ["answers", "linecache", "np", "os", "random", "sys", "thread", "threading", "threads"]
    assert first[1:] == second[1:] == [[[1], 1, True], names, ["<source>"], ["out"]]


def test_the_template_never_has_source_or_inputs() -> None:
    """Look through its memory from outside, as root may."""
    for _ in range(3):
        done = moonpool.run(f"note = '{SECRET}' * 1000; x.sum(); print(note); note", {"x": np.ones(100_000)})
        assert done.error is None

    def all_are_clean() -> bool:
        pids = [pid for template, runs in templates().items() for pid in (template, *runs)]
        return not any(SECRET.encode() in memory_of(pid) for pid in pids)

    # The process of the last run may be about to end, and each after it is forked from the template.
    wait_until(all_are_clean)


def templates() -> dict[int, list[int]]:
    """Return the processes that fork runs, each with those that it has forked, once there are such."""

    def found() -> dict[int, list[int]]:
        made = {}
        for pid in children_of(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"\0sandbox_" in command(pid) and (runs := children_of(pid)):
                    made[pid] = runs
        return made

    return wait_until(found)


def kill_templates() -> None:
    killed = templates()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for template, runs in killed.items() for pid in (template, *runs)))


def memory_of(pid: int) -> bytes:
    """Read all private memory of a process that may be written to. Skips the test if this user may not look."""
    parts = []
    try:
        with open(f"/proc/{pid}/mem", "rb") as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if re.match(r"\S+ rw.p", line):
                    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                    memory.seek(begin)
                    try:
                        parts.append(memory.read(end - begin))
                    except OSError:
                        continue
    except PermissionError:
        pytest.skip("only root may look into a contained process")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""
    return b"".join(parts)


@pytest.mark.promise(
    "Source", "A run reaches neither its template nor another run: no signal, no memory, no descriptor."
)
def test_a_run_reaches_no_other_process() -> None:
    with moonpool.Sandbox() as box:
        box.run("kept = 1")
        source = """
import os, signal, ctypes, errno
refused = []
def trial(act, *arguments):
    try:
        act(*arguments)
        refused.append(False)
    except OSError:
        refused.append(True)
for pid in (os.getppid(), 1, -1, 0, 2, 3, 4, 5):
    if pid != os.getpid():
        trial(os.kill, pid, signal.SIGKILL)
trial(os.fork)
trial(os.posix_spawn, '/bin/true', ['true'], {})
trial(os.execv, '/bin/true', ['true'])
trial(open, f'/proc/{os.getppid()}/mem', 'rb')
trial(open, f'/proc/{os.getppid()}/environ', 'rb')
trial(os.pidfd_open, os.getppid())
trial(os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
trial(__import__('resource').prlimit, os.getppid(), __import__('resource').RLIMIT_CPU, (1, 1))
refused
"""
        assert set(value(source)) == {True}  # type: ignore[call-overload]
        assert box.run("kept").unwrap() == 1


def test_calls_of_attacks_end_the_run_alone() -> None:
    done = moonpool.run("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)")

    assert str(done.error) == "Killed: the process made a system call that only an attack makes, and was ended"
    assert value("1") == 1


def test_a_run_has_three_descriptors_of_others() -> None:
    kinds = value(
        "import os, stat\n"
        "found = []\n"
        "for fd in range(300):\n"
        "    try: mode = os.fstat(fd).st_mode\n"
        "    except OSError: continue\n"
        "    kind = 'socket' if stat.S_ISSOCK(mode) else 'pipe' if stat.S_ISFIFO(mode) else oct(stat.S_IFMT(mode))\n"
        "    found.append(kind)\n"
        "found"
    )

    # Its input, its output twice, its channel, and the file for the answer.
    assert kinds == [oct(0o020000), "pipe", "pipe", "socket", oct(0o100000)]


ANSWERS = {
    "garbage": "b'\\xc1' * 100",
    "nothing": "b''",
    "long": "b'x' * 40000",
    "fields": "pack([pack({'value': 1}), 0, 0, 0])",
    "place": "pack([b'', 1 << 40, 1 << 40, 1 << 20])",
    "never written": "pack([b'', 0, 1 << 20, 1 << 20])",
    "size": "pack([b'', 0, 8, 1 << 60])",
    "file": "pack([pack({'value': 1, 'is_repr': False, 'error': None, 'files': {'../x': b''}}), 0, 0, 0])",
    "link": "pack([pack({'value': 1, 'is_repr': False, 'error': None, 'files': {'a/./b': b''}}), 0, 0, 0])",
    "error": "pack([pack({'value': 1, 'is_repr': False, 'error': 5, 'files': {}}), 0, 0, 0])",
    "limit": "pack([pack({'value': 1, 'is_repr': 1, 'error': None, 'files': {}}), 0, 0, 0])",
}


@pytest.mark.parametrize("packet", ANSWERS.values(), ids=ANSWERS)
def test_a_forged_answer_is_an_error(packet: str) -> None:
    done = moonpool.run(
        f"import os, socket\nfrom moonpool.ipc.codec import pack_with as pack\n"
        f"try: socket.socket(fileno=3).send({packet})\nexcept OSError: pass\nimport time; time.sleep(1)\nos._exit(0)",
        timeout_s=10,
    )

    assert done.error is not None
    assert done.error.type in ("BrokenAnswer", "ProcessEnded")
    assert done.value is None
    assert done.files == {}


SENDS = """
import os, socket, struct, time
from moonpool.ipc.codec import Extension, pack
def send(value, memory=0, error=b"\\xc0"):
    document = b"\\x84" + pack("value") + value + pack("is_repr") + b"\\xc2" + pack("error") + error
    document += pack("files") + b"\\x80"
    fd = next(fd for fd in range(4, 30) if os.fstat(fd).st_size > 1 << 20)
    os.pwrite(fd, document + bytes(memory), 0)
    size = len(document) + memory
    socket.socket(fileno=3).send(pack([b"", 0, len(document), size]))
    time.sleep(10)
"""
BOMBS = {
    # Each takes all of the memory.
    "one part, many times": "send(pack([Extension(2, struct.pack('=QQ', 0, 16 << 20))] * 4000), 16 << 20)",
    # Numbers with one hash, of which a dictionary takes the square of their count in time.
    "keys of one hash": (
        "many = range(9, 200_000)\n"
        "keys = (pack(Extension(3, (n * ((1 << 61) - 1)).to_bytes(12, 'little'))) for n in many)\n"
        "send(b'\\xdf' + struct.pack('>I', len(many)) + b''.join(key + b'\\xc0' for key in keys))"
    ),
    "complex keys": "send(b'\\x81' + pack(Extension(4, bytes(16))) + b'\\xc0')",
    "a class of msgpack": "send(bytes.fromhex('d6ff00000000'))",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_an_answer_takes_no_more_than_it_has(bomb: str) -> None:
    done = moonpool.run(SENDS + bomb, timeout_s=20)

    assert done.error is not None
    assert done.error.type == "BrokenAnswer", done
    assert "is not an answer" in done.error.message


CALLS = """
import os, socket, struct, time
from moonpool.ipc.codec import Extension, pack_with as pack
channel = socket.socket(fileno=3)
def call(value, memory=0):
    document = pack(value)
    channel.send(b"\\xc1" + pack([document, 0, len(document), memory]))
"""
# What a run may send in place of a call, and whether it gets an answer to it.
FORGED = {
    "another name": ("call(['run', ['rm'], {}])", True),
    "many arguments": ("call(['f', list(range(1000)), {}])", True),
    "an attribute": ("call(['__class__', [], {}])", True),
    "arguments of no name": ("call(['f', [], {5: 1}])", False),
    "no list": ("call({'f': 1})", False),
    "more": ("call(['f', [], {}, 1])", False),
    "a name that is not a text": ("call([['f'], [], {}])", False),
    "memory that was not written": ("call(['f', [], {}], 1 << 20)", False),
    "memory that there is not": ("call(['f', [], {}], 1 << 60)", False),
    "a class of msgpack": ("channel.send(b'\\xc1' + pack([bytes.fromhex('d6ff00000000'), 0, 6, 0]))", False),
    "deep": ("channel.send(b'\\xc1' + pack([b'\\x91' * 500 + b'\\x01', 0, 501, 0]))", False),
    "nothing": ("channel.send(b'\\xc1')", False),
    "a flood that reads nothing": ("while True: call(['f', [], {}])", False),
}


@pytest.mark.promise("Source", "Of its caller's functions, source can do nothing but call those that it was given.")
@pytest.mark.parametrize(("forged", "is_answered"), FORGED.values(), ids=FORGED)
def test_a_forged_call_reaches_no_other_function(forged: str, is_answered: bool) -> None:
    called: list[object] = []

    def f(*arguments: object) -> None:
        called.append(arguments)

    source = f"{CALLS}{forged}\nlen(channel.recv(40000)) > 0"
    done = moonpool.run(source, functions={"f": f}, timeout_s=20)

    if is_answered:
        assert done.unwrap() is True
        assert called in ([], [tuple(range(1000))])
    else:
        assert done.error is not None
        assert done.error.type == "BrokenAnswer", done
    assert value("1") == 1


def test_a_call_without_functions_is_no_answer() -> None:
    done = moonpool.run(f"{CALLS}call(['f', [], {{}}])\ntime.sleep(9)", timeout_s=20)

    assert done.error is not None
    assert done.error.type == "BrokenAnswer"


def test_texts_of_an_error_are_bounded() -> None:
    error = "pack({'type': 'T', 'message': '\\x1b' * 2_000_000, 'traceback': '\\n' * 2_000_000, 'limit': ''})"
    done = moonpool.run(f"{SENDS}send(b'\\xc0', error={error})", timeout_s=20)

    assert done.error is not None
    assert done.error.type == "T"
    assert len(done.error.message) + len(done.error.traceback) < 1_000_000


def test_a_sandbox_that_lies_once_harms_itself_alone() -> None:
    with moonpool.Sandbox() as box:
        answer = "pack([pack({'value': 'lie', 'is_repr': False, 'error': None, 'files': {}}), 0, 0, 0])"
        box.run(
            "import socket\nfrom moonpool.ipc.codec import pack_with as pack\n"
            f"end = socket.socket(fileno=3)\nfor _ in range(5): end.send({answer})"
        )
        assert box.run("1").value in ("lie", 1)
        assert value("1") == 1


def test_errors_and_output_are_harmless_to_terminals() -> None:
    done = moonpool.run(
        "class E\u0301(Exception): pass\nprint('\\x1b]0;title\\x07')\nraise E\u0301('\\x1b[2J\\r\\u202e')"
    )

    assert done.error is not None
    for text in (done.stdout, done.error.message, done.error.traceback):
        assert not set(text) & set("\x1b\x07\r\u202e")
    done = moonpool.run("type('x' * 100000 + '\\x1b', (Exception,), {'__str__': lambda self: 1 / 0})() and None")
    done = moonpool.run("raise type('x' * 100000 + '\\x1b', (Exception,), {'__str__': lambda self: 1 / 0})()")
    assert done.error is not None
    assert len(done.error.type) <= 200
    # Files and streams take no half of a pair.
    done = moonpool.run("class A:\n    def __repr__(self): raise ValueError('\\ud800')\nraise ValueError('\\ud800')")
    assert done.error is not None
    assert str(done.error).encode() == b"ValueError: \\ud800"


def test_deep_and_odd_values_come_as_texts_or_errors() -> None:
    for source in (
        "x = []\nfor _ in range(10**5): x = [x]\nx",
        "x = {}\nx['x'] = x\nx",
        "class D(dict):\n    def items(self): raise SystemExit\nD()",
        "class A(list):\n    def __len__(self): return 1 << 62\nA()",
        "import numpy as np\nnp.array([object()])",
        "import numpy as np\nnp.zeros(3, 'O,i4')",
        "[0] * 2_000_000",
        "'x' * (40 << 20)",
    ):
        done = moonpool.run(source, timeout_s=60)
        assert done.is_repr or done.error is not None, source
    assert value("float('nan')") != value("float('nan')")
    # What travels has a text.
    for number in ("10 ** 4290", "-(10 ** 4290)", "10 ** 4301", "10 ** 5000"):
        assert str(moonpool.run(number).value)
    assert value("10 ** 400, {1: 2, None: 3, 1.5: 4, True: 5}, '\\ud800'") == [
        10**400,
        {1: 5, None: 3, 1.5: 4},
        "\ud800",
    ]


def test_source_that_harms_a_compiler_harms_the_run_alone() -> None:
    for source in (
        "(" * 100_000,
        "-" * 1_000_000 + "1",
        "x" * 10_000_000 + " = 1",
        "\0",
        "\ud800",
        "[" * 90 + "]" * 90,
    ):
        moonpool.run(source, timeout_s=60)
    assert value("2") == 2


def test_a_template_that_dies_is_replaced() -> None:
    assert value("1") == 1
    kill_templates()

    assert value("2") == 2
    with moonpool.Sandbox() as box:
        box.run("x = 1")
        kill_templates()
        assert str(box.run("x").error).startswith("Closed: ")
        assert box.run("1").state_lost


@pytest.mark.promise("Source", "A thousand runs leave no process, descriptor, folder, thread or user behind.")
def test_a_thousand_runs_leave_nothing_behind() -> None:
    none = all_that_there_is()
    source = "import os; open('out/x', 'w').write('x'); open('/dev/shm/x', 'w').write('x'); print(f(n)); os.getuid()"
    users = set()
    for number in range(1000):
        done = moonpool.run(source, {"n": number}, functions={"f": str}, timeout_s=60)
        assert done.stdout == f"{number}\n"
        users.add(done.unwrap())
    assert len(users) <= MOST_WORKERS
    # What the workers have, who wait for more. What other tests have left may go meanwhile.
    assert all(len(found - none[kind]) < 100 for kind, found in all_that_there_is().items())
    close_pool()
    wait_until(lambda: not any(found - none[kind] for kind, found in all_that_there_is().items()))


def all_that_there_is() -> dict[str, set[Any]]:
    return {
        # How many there are is what counts: their numbers are used again.
        "descriptors": set(range(len(os.listdir("/proc/self/fd")))),
        "folders": set(Path(tempfile.gettempdir()).glob("moonpool-*")),
        "memory": set(os.listdir("/dev/shm")),
        "threads": {each.name for each in threading.enumerate() if not each.name.startswith("moonpool-log")},
        "processes": set(children_of(os.getpid())),
    }
