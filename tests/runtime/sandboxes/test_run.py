"""`moonpool.run`: values, errors, output, files and limits of source in a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import moonpool
from moonpool.runtime.process import parallel
from moonpool.runtime.sandboxes.pool import MOST_WORKERS, the_pool

SCALE = 3


def scaled(x: float, by: float = SCALE) -> float:
    """Uses a constant of this file."""
    return x * by


async def awaits(x: float) -> float:
    return x + 1


BORN = time.time()


def tells_its_birth() -> float:
    return BORN


@pytest.mark.promise("Source", "`moonpool.run` returns the value of the last expression, or of a function.")
def test_the_value_is_that_of_the_last_expression_or_of_the_function() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    assert moonpool.run("1 + 1").unwrap() == 2
    assert moonpool.run("y = 5").unwrap() is None
    assert moonpool.run("").unwrap() is None
    np.testing.assert_array_equal(moonpool.run("x.T * n", {"x": x, "n": 2}).unwrap(), x.T * 2)
    assert moonpool.run("x += 1\nfloat(x.sum())", {"x": x}).unwrap() == 21
    assert x.sum() == 15
    assert moonpool.run(scaled, {"x": 2}).unwrap() == 6
    assert moonpool.run(awaits, {"x": 2}).unwrap() == 3
    assert moonpool.run("__name__, [*map(str, (1, 2))]").unwrap() == ["__main__", ["1", "2"]]
    shown = moonpool.run("object()")
    assert shown.is_repr
    assert shown.value.startswith("<object object at")
    odd = moonpool.run("class A:\n  def __repr__(self): raise ValueError\nA()")
    assert (odd.is_repr, odd.value) == (True, "<A, whose repr raised ValueError>")


def test_a_constant_of_a_function_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moonpool.run(scaled, {"x": 2}).unwrap() == 6
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 4)
    with pytest.raises(moonpool.LoadFailed, match="it uses 'SCALE', which was changed after it was set"):
        moonpool.run(scaled, {"x": 2})


def test_a_function_that_needs_what_does_not_travel_is_refused() -> None:
    with pytest.raises(moonpool.LoadFailed, match="it uses 'BORN', whose value is the result of running code"):
        moonpool.run(tells_its_birth)
    with pytest.raises(moonpool.LoadFailed, match="not at the top level"):
        moonpool.run(lambda: 1)
    with pytest.raises(moonpool.InvalidRequest, match="class object does not travel"):
        moonpool.run("1", {"x": object()})


def test_errors_are_data() -> None:
    done = moonpool.run("def f():\n    return 1 / 0\nf()")

    assert done.error is not None
    assert str(done.error) == "ZeroDivisionError: division by zero"
    assert 'File "<source>", line 2, in f' in done.error.traceback
    assert "run.py" not in done.error.traceback
    assert done.error.limit == ""
    with pytest.raises(moonpool.SandboxError, match="division by zero") as raised:
        done.unwrap()
    assert raised.value.result is done
    for source, kind in [("def f(:", "SyntaxError"), ("1\0", None), ("raise KeyboardInterrupt", "KeyboardInterrupt")]:
        error = moonpool.run(source).error
        assert error is not None
        assert kind in (None, error.type)
    assert moonpool.run("import sys; sys.exit()").error is None
    assert str(moonpool.run("import sys; sys.exit('no')").error) == "SystemExit: no"
    assert str(moonpool.run("import os; os._exit(3)").error).startswith("ProcessEnded: the process ended with code 3")
    done = moonpool.run("import ctypes; ctypes.string_at(0)")
    assert str(done.error) == "Killed: the process was killed by SIGSEGV"
    assert 'File "<source>", line 1' in done.stderr


def test_output_is_handed_over_as_it_comes_and_bounded() -> None:
    pieces: list[tuple[str, str]] = []
    done = moonpool.run(
        "import os, sys\nprint('one')\nprint('two \\x1b[1m é', file=sys.stderr)\nos.write(1, b'\\xff\\n')",
        on_output=lambda text, stream: pieces.append((text, stream)),
    )

    assert done.stdout == "one\n\\xff\n"
    assert done.stderr == "two \\x1b[1m é\n"
    assert "".join(text for text, stream in pieces if stream == "stdout") == done.stdout
    assert "".join(text for text, stream in pieces if stream == "stderr") == done.stderr
    flood = moonpool.run("for n in range(300): print(str(n % 10) * 9_999)").stdout
    assert flood.startswith("0" * 9_999)
    assert flood.endswith("9" * 9_999 + "\n")
    assert len(flood) < (1 << 20) + 100
    assert "\n… (1951424 bytes are left out) …\n" in flood


def test_files_go_in_and_come_out(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("from a path")
    source = """
import os
os.makedirs("out/below")
open("out/below/sum.txt", "w").write(open("in.csv").read() + open("a/b.txt").read())
os.symlink("/etc/hostname", "out/link")
os.mkdir("out/empty")
open("not_out.txt", "w").write("x")
os.getcwd() == os.environ["HOME"]
"""
    done = moonpool.run(source, files={"in.csv": b"1,2\n", "a/b.txt": tmp_path / "b.txt"})

    assert done.unwrap() is True
    assert done.files == {"below/sum.txt": b"1,2\nfrom a path"}
    assert moonpool.run("import os; os.listdir('.'), os.listdir('/dev/shm')").unwrap() == [["out"], []]
    for name in ("../x", "/x", "a/../../x", "a\nb", "", "a//b", "x" * 1000):
        with pytest.raises(ValueError, match="files must be"):
            moonpool.run("1", files={name: b""})
    with pytest.raises(
        ValueError, match="files must be a map without 'out', the folder for files that the source writes, not 'out'"
    ):
        moonpool.run("1", files={"out": b""})
    for names in (["a", "a/b"], ["a/b/c", "a/b"], ["out", "out/x"]):
        with pytest.raises(
            ValueError, match=r"'out', the folder|in which no file is also a folder, as '(a|a/b)' is, not 'a/b"
        ):
            moonpool.run("1", files=dict.fromkeys(names, b""))
    with pytest.raises(ValueError, match=r"files\[x\] must be bytes, a text, or a Path"):
        moonpool.run("1", files={"x": 5})  # type: ignore[dict-item]


@pytest.mark.promise("Source", "A run that never ends, allocates or floods ends with one error that names the limit.")
@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("while True: pass", "timeout_s"),
        ("import signal; signal.pause()", "timeout_s"),
        ("import os, signal\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)", "timeout_s"),
        ("x = [bytearray(1 << 20) for _ in range(1000)]", "memory"),
        ("import numpy as np; np.ones(1 << 40)", "memory"),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()", "tasks"),
        ("files = []\nwhile True: files.append(open('/dev/null'))", "open_files"),
        ("open('x', 'wb').write(bytes(8 << 20))", "files_bytes"),
        ("for n in range(99): open(f'out/{n}', 'wb').write(bytes(1 << 20))", "files_bytes"),
        ("open('out/x', 'wb').truncate(3 << 20)\nopen('out/y', 'wb').truncate(3 << 20)", "files_bytes"),
        ("import numpy as np; np.ones(8 << 20, np.uint8)", "files_bytes"),
    ],
)
def test_limits_have_names(source: str, limit: str) -> None:
    timeout_s = 1 if limit == "timeout_s" else 100
    done = moonpool.run(source, timeout_s=timeout_s, memory="200M", tasks=8, open_files=32, files_bytes="4M")

    assert done.error is not None
    assert done.error.limit == limit
    assert moonpool.run("1", files_bytes="4M").unwrap() == 1


def test_an_error_has_room_beside_files_that_take_all() -> None:
    source = "open('out/x', 'wb').write(bytes(4 << 20))\nraise ValueError('y' * 10_000) from KeyError('z' * 30_000)"
    done = moonpool.run(source, files_bytes="4M")

    assert done.error is not None
    assert done.error.message == "y" * 10_000
    assert len(done.error.traceback) > 30_000
    assert done.files == {"x": bytes(4 << 20)}


def test_usage_is_measured() -> None:
    usage = moonpool.run("import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass").usage

    assert usage.cpu_s > 0.15
    assert usage.wall_s >= usage.cpu_s
    assert usage.memory_bytes > 10 << 20


def test_options_are_checked() -> None:
    for options, text in [
        ({"timeout_s": -1}, "timeout_s must be"),
        ({"memory": "x"}, "memory must be"),
        ({"tasks": 0}, "tasks must be"),
        ({"sandbox": "off"}, "sandbox must be strict or best-effort"),
        ({"imports": ["os; x"]}, "imports must be names of modules"),
        ({"paths": "/data"}, "paths must be a list of texts"),
    ]:
        with pytest.raises(ValueError, match=text):
            moonpool.run("1", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="there is no option 'timeout'"):
        moonpool.run("1", timeout=3)  # type: ignore[call-arg]
    with pytest.raises(moonpool.MoonpoolError, match="no such option"):
        moonpool.run("1", options={"MOONPOOL_NOTHING": "1"})
    with pytest.raises(moonpool.LoadFailed, match="no_such_module cannot be imported"):
        moonpool.run("1", imports=["no_such_module"])
    with pytest.raises(moonpool.InvalidRequest, match="source must be a text or a function"):
        moonpool.run(5)  # type: ignore[arg-type]


def test_a_granted_folder_can_be_read_and_modules_are_imported_before(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "x.txt").write_text("granted")
    (tmp_path / "x.txt").chmod(0o644)
    source = f"import sys; 'fractions' in sys.modules, open('{tmp_path}/x.txt').read()"

    assert moonpool.run(source, paths=[str(tmp_path)], imports=["fractions"]).unwrap() == [True, "granted"]
    assert str(moonpool.run(source).error).startswith("PermissionError")


def test_what_an_import_prints_is_not_on_the_standard_output() -> None:
    program = "import moonpool; print(moonpool.run('print(1); 2', imports=['this']).value)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)

    assert ended.stdout == "2\n"
    assert "The Zen of Python" in ended.stderr


def test_an_environment_of_its_own_runs_the_source() -> None:
    done = moonpool.run("import sys; sys.prefix", environment=sys.prefix, timeout_s=60)

    assert done.unwrap() == os.path.realpath(sys.prefix)
    with pytest.raises(moonpool.BadEnvironment, match="Failed to get the canonical path"):
        moonpool.run("1", environment="/no/such/environment")
    with pytest.raises(moonpool.BadEnvironment, match="--index-url"):
        moonpool.run("1", environment=["numpy", "--index-url=http://127.0.0.1"])


@pytest.mark.parametrize("name", ["run", "arun", "Sandbox", "Runtime"])
def test_what_a_hosted_process_does_not_have_is_told(name: str) -> None:
    for source, kind in [
        (f"import moonpool; moonpool.{name}", "Attribute"),
        (f"from moonpool import {name}", "Import"),
    ]:
        error = moonpool.run(source).error
        assert str(error).startswith(f"{kind}Error: moonpool.{name} belongs to the program that hosts models")
    source = f"import moonpool; hasattr(moonpool, '{name}'), hasattr(moonpool, 'nothing'), moonpool.nothing"
    assert str(moonpool.run(source).error) == "AttributeError: module 'moonpool' has no attribute 'nothing'"


def test_a_model_may_run_source_in_a_program_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import subprocess, sys, numpy as np\nfrom moonpool import Batch, Float32\n"
        "def run(X: Float32[Batch]) -> Float32[Batch]:\n"
        "    command = [sys.executable, '-m', 'moonpool', 'run', '-']\n"
        "    done = subprocess.run(command, input='40 + 2', text=True, capture_output=True, check=True)\n"
        "    return X * np.float32(done.stdout)\n"
    )
    with moonpool.Runtime() as runtime:
        runtime.load(
            "m", f"{tmp_path}/m.py:run", config={"parameters": {"MOONPOOL_SANDBOX": {"string_value": "standard"}}}
        )
        assert runtime.infer("m", {"X": np.ones((1, 1), np.float32)})["OUTPUT0"] == 42


def test_an_open_sandbox_takes_no_process_from_runs() -> None:
    all_at_work = threading.Barrier(MOST_WORKERS)

    def go(_: int) -> object:
        # Each goes on when all have printed.
        tell, source = lambda *_: all_at_work.wait(100), "print(1, flush=True); 2"
        return moonpool.run(source, on_output=tell, timeout_s=100).unwrap()

    with moonpool.Sandbox() as box, ThreadPoolExecutor(MOST_WORKERS) as threads:
        box.run("kept = 3")
        assert list(threads.map(go, range(MOST_WORKERS))) == [2] * MOST_WORKERS
        assert box.run("kept").unwrap() == 3
        assert len(the_pool()) == MOST_WORKERS + 1
    assert len(the_pool()) == MOST_WORKERS


def test_many_threads_share_few_processes() -> None:
    results: list[object] = []

    def go(number: int) -> None:
        results.extend(moonpool.run("n * 2", {"n": number * 10 + each}).unwrap() for each in range(3))

    threads = [threading.Thread(target=go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    wanted = [2 * (number * 10 + each) for number in range(8) for each in range(3)]
    assert sorted(results) == wanted  # type: ignore[type-var]
    assert len(the_pool()) <= MOST_WORKERS


def test_without_a_thread_to_spare_the_caller_makes_the_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moonpool.run("1").unwrap() == 1

    def refuse(_: object) -> None:
        raise moonpool.OutOfThreads("none")

    monkeypatch.setattr(parallel, "start_thread_safely", refuse)
    pieces: list[str] = []
    assert (
        moonpool.run("print(f(1)); 2", functions={"f": str}, on_output=lambda text, _: pieces.append(text)).unwrap()
        == 2
    )
    assert pieces == ["1\n"]
    with moonpool.Sandbox() as box:
        assert box.run("3").unwrap() == 3


def test_an_event_loop_runs_on_and_a_cancelled_run_is_killed() -> None:
    asyncio.run(runs_and_cancels())


async def runs_and_cancels() -> None:
    values = await asyncio.gather(*(moonpool.arun("n", {"n": number}) for number in range(4)))
    assert [each.value for each in values] == [0, 1, 2, 3]
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(_: str, __: str) -> None:
        loop.call_soon_threadsafe(begun.set)

    task = asyncio.create_task(moonpool.arun("print(1)\nwhile True: pass", timeout_s=100, on_output=tell))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await moonpool.arun("1")).value == 1


def test_a_fork_of_the_program_has_processes_of_its_own() -> None:
    assert moonpool.run("1").unwrap() == 1
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if moonpool.run("2").unwrap() == 2 else 1
            from moonpool.runtime.sandboxes.pool import close_pool

            close_pool()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert moonpool.run("3").unwrap() == 3
