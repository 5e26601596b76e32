"""A caller of `moonpool.run` that is interrupted at any moment, or ends, leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import asyncio, ctypes, logging, os, random, signal, sys, tempfile, threading, time, warnings
import moonpool
from moonpool.runtime.sandboxes import pool, worker
from moonpool.runtime.sandboxes.pool import close_pool

signal.signal(signal.SIGALRM, signal.default_int_handler)

def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found += open(f"/proc/self/task/{task}/children").read().split()
        except OSError:
            pass
    return found

def left():
    # The threads of the runtime itself stay.
    threads = [each.name for each in threading.enumerate() if each.name not in ("moonpool-spawner", "moonpool-log")]
    threads = [name for name in threads if not name.startswith(("MainThread", "moonpool-prints"))]
    return children() + threads + os.listdir("/dev/shm") + os.listdir(tempfile.gettempdir())

def finish():
    assert moonpool.run("40 + 2").unwrap() == 42
    close_pool()
    end = time.monotonic() + 60
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    print("left", left())
"""


def output_of(folder: Path, body: str, *arguments: str) -> str:
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", HEAD + body, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


RANDOM = """
random.seed(int(sys.argv[1]))
kind = sys.argv[2]
if kind != "cold":
    moonpool.run("1")
# Python's own: it says so if a destructor is interrupted, or asyncio while it makes or ends a loop.
def tell(found):
    if found.exc_type is not KeyboardInterrupt and "asyncio" not in str(getattr(found.object, "__module__", "")):
        sys.__unraisablehook__(found)

sys.unraisablehook = tell
warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
interrupted = 0
for _ in range(25):
    if kind == "cold":
        close_pool()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.5 if kind == "cold" else 0.05))
            if kind == "box":
                with moonpool.Sandbox() as box:
                    box.run("x = 1")
                    box.run("print(1)", on_output=lambda *_: time.sleep(0.002))
            elif kind == "task":
                asyncio.run(moonpool.arun("print(1)"))
            else:
                moonpool.run("print(1)", on_output=lambda *_: time.sleep(0.002))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
print("interrupted", interrupted)
finish()
"""


@pytest.mark.promise("Source", "A caller that is interrupted at any moment leaves no process, file or thread behind.")
@pytest.mark.parametrize("kind", ["cold", "warm", "box", "task"])
def test_a_signal_at_any_moment_leaves_nothing(kind: str, tmp_path: Path) -> None:
    output = output_of(tmp_path, RANDOM, str(os.getpid()), kind)

    assert output.endswith("left []\n"), output


CHOSEN = """
where = sys.argv[1]

def interrupt():
    if where.startswith("thrown"):
        # Python has a thread that is being started under its parent's number until it runs, and would throw there: then
        # `Thread.start` waits for ever. With this lock, none is started meanwhile.
        while True:
            with threading._active_limbo_lock:
                if not threading._limbo:
                    error = ctypes.py_object(KeyboardInterrupt)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim), error)
                    return
            time.sleep(0)
    else:
        os.kill(os.getpid(), signal.SIGINT)

def interrupting(act):
    def acts(*arguments, **named):
        interrupt()
        result = act(*arguments, **named)
        interrupt()
        return result
    return acts

class Stub(worker.SourceStub):
    def __init__(self, *arguments):
        interrupt()
        super().__init__(*arguments)
        interrupt()

def after(act, seconds):
    # So long after the call has begun.
    def acts(*arguments, **named):
        threading.Timer(seconds, interrupt).start()
        return act(*arguments, **named)
    return acts

signal.signal(signal.SIGINT, signal.default_int_handler)
victim = threading.get_ident()
options = {}
source, tell = "1", None
if where.endswith("spawn"):
    worker.SourceStub = Stub
elif where.endswith("start"):
    worker.SourceStub.start = interrupting(worker.SourceStub.start)
elif where.endswith("fork"):
    worker.SourceStub.fork = interrupting(worker.SourceStub.fork)
elif where.endswith("imports"):
    # The start takes for ever.
    options = {"imports": ["endless"], "paths": [sys.argv[2]], "options": {"EXECUTION_ENV_PATH": sys.prefix}}
    os.environ["PYTHONPATH"] = sys.argv[2] + ":" + os.environ.get("PYTHONPATH", "")
    worker.SourceStub.start = after(worker.SourceStub.start, 3)
elif where.endswith("at work"):
    source, tell = "print(1)\\nwhile True: pass", lambda *_: interrupt()
elif where.endswith("waits"):
    def begin() -> threading.Thread:
        return threading.Thread(target=moonpool.run, args=("while True: pass",), kwargs={"timeout_s": 100}, daemon=True)

    both = [begin() for _ in range(pool.MOST_WORKERS)]
    for each in both:
        each.start()
    while pool._pool is None or len(pool._pool._all) < pool.MOST_WORKERS or pool._pool._idle:
        time.sleep(0.01)
    pool.Pool.take = after(pool.Pool.take, 0.5)

outcomes = []
def go():
    global victim
    victim = threading.get_ident()
    try:
        moonpool.run(source, on_output=tell, timeout_s=100, **options)
        time.sleep(0.2)
    except KeyboardInterrupt:
        outcomes.append("interrupted")
    finally:
        victim = 0  # another thread may get this number

if where.startswith("thrown"):
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
else:
    try:
        go()
    except KeyboardInterrupt:  # a second one
        pass
interrupt = lambda: None
if where.endswith("waits"):
    close_pool()
print(outcomes)
finish()
"""
MOMENTS = ["spawn", "start", "fork", "imports", "at work", "waits"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("how", ["by a signal", "thrown"])
def test_an_exception_at_a_chosen_moment_leaves_nothing(how: str, moment: str, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    tmp_path.chmod(0o755)
    output = output_of(tmp_path, CHOSEN, f"{how} {moment}", str(tmp_path))

    assert output.endswith("left []\n"), output
    assert "interrupted" in output


DAEMONS = """
def go():
    while True:
        moonpool.run("print(1)", on_output=lambda *_: None).unwrap()

def keep():
    with moonpool.Sandbox() as box:
        while True:
            box.run("x = 1").unwrap()

for target in (go, go, go, keep):
    threading.Thread(target=target, daemon=True).start()
moonpool.run("1")
sys.stdout.write("end\\n")
"""


@pytest.mark.promise("Source", "Daemon threads that run source when the program ends, end without a word.")
def test_daemon_threads_end_quietly_with_the_program(tmp_path: Path) -> None:
    assert output_of(tmp_path, DAEMONS) == "end\n"
    assert os.listdir(tmp_path / "temporary") == []
