"""Spares: contained models whose processes waited for them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.figures import command
from tests.e2e.hosting import Config, hosted, is_running, options, tensor
from tests.inside import registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.isolation import spares
from moonpool.runtime.isolation.spares import Spares
from moonpool.runtime.process.child import SpawnedProcess, boot_command
from moonpool.runtime.process.process_tree import children_of
from moonpool.runtime.process.spawner import where_processes_start

MODEL = """
import gc, json, os, random, signal, site, sys, tempfile, threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        do = pb_utils.get_input_tensor_by_name(requests[0], "DO").as_numpy()[0].decode()
        if do == "exit":
            os._exit(3)
        with open("/proc/self/maps") as file:
            maps = [line.split()[0] for line in file if "libpython" in line or "python3" in line or "libc.so" in line]
        home = os.environ["HOME"]
        said = {
            # These differ from process to process.
            "layout": maps[0],
            "object": id(np),
            "hash": hash("a"),
            "random": random.random(),
            "numpy": float(np.random.random()),
            "system": os.urandom(8).hex(),
            "scratch": home,
            # And these do not.
            "home is scratch": home == os.environ["TMPDIR"] == os.getcwd() == tempfile.gettempdir(),
            "of a user": [text.replace(home, "~") for text in (site.getuserbase(), site.getusersitepackages())],
            "variables": {k: v for k, v in os.environ.items() if k not in ("HOME", "TMPDIR", "PYTEST_CURRENT_TEST")},
            "test": os.environ.get("PYTEST_CURRENT_TEST"),
            "path": [text.replace(home, "~") for text in sys.path],
            "arguments": len(sys.argv),
            "own modules": sorted(name for name in sys.modules if "customize" in name),
            "signals": [getattr(signal.getsignal(number), "__name__", "") for number in (2, 10, 13, 17, 25)],
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "umask": os.umask(0o077),
            "collects": gc.isenabled(),
            "blas": float((np.ones((300, 300)) @ np.ones((300, 300))).sum()),
            "thread": threading.main_thread().native_id == os.getpid(),
            "open": sum(is_open(fd) for fd in range(1024)),
            "lines": [sys.stdout.line_buffering, sys.stdout.isatty()],
        }
        answer = np.array([json.dumps(said)], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", answer)])]


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
"""
SIGNATURE: Config = {"input": [tensor("DO", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
UNIQUE = ("layout", "object", "hash", "random", "numpy", "system", "scratch")
SPARE = b"moonpool_spare"
# The largest that a process with numpy is before it has a model.
MOST_BYTES = 96 << 20


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numpy start threads, which must be gone before the sandbox is on."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def runtime(file: Path) -> Iterator[moonpool.Runtime]:
    """A runtime with a spare, which a model has asked for."""
    with moonpool.Runtime(spares=1) as runtime:
        runtime.load("first", file, config=config())
        spare_of(runtime)
        yield runtime


def config(**more: object) -> Config:
    return SIGNATURE | options(**{"SANDBOX": "strict", **more})


def ask(runtime: moonpool.Runtime, name: str = "m", do: str = "") -> dict[str, Any]:
    said: dict[str, Any] = json.loads(runtime.infer(name, {"DO": [do]}, timeout_s=60.0)["SAID"][0])
    return said


def pool_of(runtime: moonpool.Runtime) -> Spares:
    return registry_of(runtime).stubs.spares


def ways(runtime: moonpool.Runtime) -> dict[str, int]:
    return registry_of(runtime).stubs.starts.counts()


def spare_of(runtime: moonpool.Runtime) -> int:
    """Wait until a runtime has a spare, and return its process."""
    pool = pool_of(runtime)

    def waiting() -> list[int]:
        return [] if pool.is_making else pool.waiting

    (pid,) = wait_until(waiting, what="a spare")
    return pid


def has_ready(runtime: moonpool.Runtime, count: int) -> bool:
    pool = pool_of(runtime)
    return not pool.is_making and len(pool.waiting) == count


def waiting_processes() -> list[int]:
    """The children of this process that wait for a model, or start to."""
    return [pid for pid in children_of(os.getpid()) if SPARE in command(pid).split(b"\0")]


def pid_of(runtime: moonpool.Runtime, name: str = "m") -> int:
    return int(runtime.instances(name)[0]["pid"] or 0)


@contextmanager
def loaded(runtime: moonpool.Runtime, file: Path, way: str, **more: object) -> Iterator[int]:
    """Load the model, see that its process came about in this way, and unload it in the end."""
    before = ways(runtime)[way]
    with hosted(runtime, "m", file, config(**more)):
        assert ways(runtime)[way] == before + 1
        yield pid_of(runtime)


@pytest.mark.promise(
    "Spares",
    "A model at `best-effort` or `strict` gets a process that has waited for it with numpy imported, and finds in it "
    "what it finds in one that was started for it.",
)
@pytest.mark.parametrize("level", ["strict", "best-effort"])
def test_a_spare_is_what_a_started_stub_is(runtime: moonpool.Runtime, file: Path, level: str) -> None:
    waited = spare_of(runtime)
    with loaded(runtime, file, "spare", SANDBOX=level) as pid:
        assert pid == waited
        taken, sandbox = ask(runtime), runtime.instances("m")[0]["sandbox"]
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert program[1].endswith(b"boot.py")
        assert program[2:4] == [b"triton_python_backend_stub", b"m_0"]
        assert os.getsid(pid) == os.getpgid(pid) == pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"
    with loaded(runtime, file, "exec", SANDBOX=level, PREFORK="no"):
        started, sandbox_of_started = ask(runtime), runtime.instances("m")[0]["sandbox"]

    for same in (taken, started):
        assert same["home is scratch"]
        for name in UNIQUE:
            del same[name]
    assert taken == started
    assert {**sandbox, "user": None} == {**sandbox_of_started, "user": None}


@pytest.mark.promise(
    "Spares",
    "No two models share a process, a parent beside the runtime, a layout of memory, a hash seed, a random state, a "
    "folder or a descriptor.",
)
def test_two_models_from_spares_share_nothing(runtime: moonpool.Runtime, file: Path) -> None:
    said = []
    for name in ("one", "two"):
        spare_of(runtime)
        runtime.load(name, file, config=config())
        said.append(ask(runtime, name))
    one, two = said

    assert ways(runtime)["spare"] == 2
    assert {name for name in UNIQUE if one[name] == two[name]} == set()
    status = Path(f"/proc/{pid_of(runtime, 'two')}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" in status


@pytest.mark.promise(
    "Spares",
    "A spare holds one thread, its standard descriptors and one socket, and less memory than any process with numpy; "
    "`moonpool_spares` counts them.",
)
def test_what_a_spare_holds_is_bounded_and_shown(runtime: moonpool.Runtime) -> None:
    pid = spare_of(runtime)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "\t" in line)

    assert status["Threads"].strip() == "1"
    assert int(status["VmRSS"].split()[0]) * 1024 < MOST_BYTES
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    # The files of a process that is not dumpable belong to root, whatever its user is.
    environ = Path(f"/proc/{pid}/environ")
    assert environ.stat().st_uid == Path("/proc/sys").stat().st_uid
    if os.geteuid() == 0:
        kinds = [os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")]
        assert sorted(kinds) == ["/dev/null", "pipe", "pipe", "socket"]
    else:
        with pytest.raises(PermissionError):
            environ.read_bytes()
    lines = runtime.metrics().splitlines()
    assert "moonpool_spares 1" in lines
    assert 'moonpool_starts_total{way="exec"} 1' in lines
    assert all(
        f'moonpool_start_phase_seconds_count{{phase="{phase}",way="exec"}} 1' in lines
        for phase in ("process", "sandbox", "model")
    )
    (resident,) = [line for line in lines if line.startswith("moonpool_spares_resident_memory_bytes ")]
    assert 0 < float(resident.split()[1]) < MOST_BYTES


@pytest.mark.promise(
    "Spares",
    "There is none before the first model at these levels, and never one with `MOONPOOL_SPARES=0`, `--spares=0` or "
    "`Runtime(spares=0)`.",
)
@pytest.mark.parametrize("off", [None, "variable", "argument"])
def test_where_there_are_none(file: Path, off: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_SPARES", "0" if off == "variable" else "2")
    with moonpool.Runtime(spares=0 if off == "argument" else None) as runtime:
        runtime.load("m", file, config=config(SANDBOX="standard" if off is None else "strict"))
        pool = pool_of(runtime)
        wait_until(lambda: not pool.is_making)
        assert not pool.waiting
        assert pool.count == (2 if off is None else 0)


def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_SPARES", "5")
    with pytest.raises(ValueError, match="MOONPOOL_SPARES must be a whole number from 0 to 4, not '5'"):
        moonpool.Runtime()
    with pytest.raises(ValueError, match="spares must be a whole number from 0 to 4, not 5"):
        moonpool.Runtime(spares=5)
    monkeypatch.setenv("MOONPOOL_SPARES", "")
    with moonpool.Runtime() as runtime:
        assert pool_of(runtime).count == 1


def test_there_may_be_several(file: Path) -> None:
    with moonpool.Runtime(spares=2) as runtime:
        runtime.load("m", file, config=config())
        wait_until(partial(has_ready, runtime, 2))
        for name in ("n", "o"):
            runtime.load(name, file, config=config())
        assert ways(runtime)["spare"] == 2


@pytest.mark.promise("Spares", "All spares of a runtime together are four at most.")
def test_those_of_the_last_kinds_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moonpool.Runtime(spares=1) as runtime:
        runtime.load("m", file, config=config())
        first = spare_of(runtime)
        for count in range(2, 6):
            monkeypatch.setenv("PYTHON_OF_A_TEST", str(count))
            runtime.load(f"m{count}", file, config=config())
            wait_until(partial(has_ready, runtime, min(count, 4)))
        wait_until(lambda: not is_running(first))


@pytest.mark.promise("Spares", "A spare ends with its runtime, also a killed one, and after ten minutes without use.")
def test_spares_that_nobody_uses_end(runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = spare_of(runtime)
    monkeypatch.setattr(spares, "KEEP_S", 0.0)
    # After a load, the runtime looks for them.
    runtime.load("m", file, config=config(SANDBOX="standard"))
    wait_until(lambda: not is_running(pid))
    assert not pool_of(runtime).waiting


def test_spares_end_with_a_killed_runtime(file: Path) -> None:
    program = (
        "import sys, time, moonpool\n"
        "runtime = moonpool.Runtime(spares=1)\n"
        f"runtime.load('m', {str(file)!r}, config={config()!r})\n"
        "pool = runtime._models.stubs.spares\n"
        "while pool.is_making or not pool.waiting:\n"
        "    time.sleep(0.01)\n"
        "print(*pool.waiting, flush=True)\n"
        "sys.stdin.read()\n"
    )
    paths = Path(moonpool.__file__).parents[1], Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # Not because it sees the end of its channel: the kernel ends it.
        os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not is_running(pid))


# What goes wrong


@pytest.mark.promise(
    "Spares", "A spare that was killed, stands still or is no good costs the start of a process, and no load fails."
)
def test_a_spare_that_was_killed_is_replaced(runtime: moonpool.Runtime, file: Path) -> None:
    pid = spare_of(runtime)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    with loaded(runtime, file, "exec"):
        assert ask(runtime)["blas"] == 300.0**3
    assert spare_of(runtime) != pid
    with loaded(runtime, file, "spare"):
        pass


@pytest.mark.promise("Spares", "A spare that was killed …")
@pytest.mark.parametrize("dies", [True, False])
def test_a_spare_that_does_not_answer_is_replaced(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    pid = spare_of(runtime)

    def stop(process: SpawnedProcess, _: int) -> None:
        """In place of the signal before the order: let it stand still, and die once it has the order."""
        os.kill(process.pid, signal.SIGSTOP)
        if dies:
            threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()

    with monkeypatch.context() as patches:
        patches.setattr(SpawnedProcess, "signal", stop)
        patches.setattr(spares, "_TAKE_S", 60.0 if dies else 0.2)
        runtime.load("m", file, config=config())
    assert ways(runtime) == {"spare": 0, "fork": 0, "exec": 2}
    assert not is_running(pid)
    assert ask(runtime)["blas"] == 300.0**3
    runtime.unload("m")


def test_a_spare_that_was_stopped_goes_on(runtime: moonpool.Runtime, file: Path) -> None:
    os.kill(spare_of(runtime), signal.SIGSTOP)
    with loaded(runtime, file, "spare"):
        pass


@pytest.mark.promise("Spares", "Once it has become the process of a model, its end is that of any other.")
def test_one_that_ends_in_the_handshake_fails_the_load(runtime: moonpool.Runtime, file: Path, tmp_path: Path) -> None:
    spare_of(runtime)
    ends = tmp_path / "ends.py"
    ends.write_text("import os\nos._exit(3)\n")
    with pytest.raises(moonpool.LoadFailed, match="exited with 3"):
        runtime.load("m", ends, config=config())
    assert ways(runtime)["spare"] == 1
    spare_of(runtime)
    with loaded(runtime, file, "spare"):
        pass


@pytest.mark.promise("Spares", "An instance that has died is restarted from a spare, too.")
def test_a_restart_takes_a_spare(runtime: moonpool.Runtime, file: Path) -> None:
    forgiving = {"RESTART_WINDOW_S": 0.001, "RESTART_BACKOFF_S": 0}
    with loaded(runtime, file, "spare", **forgiving) as before:
        waits = spare_of(runtime)
        with pytest.raises(moonpool.StubDied, match="exited with 3"):
            ask(runtime, do="exit")
        wait_until(lambda: pid_of(runtime) not in (0, before) and runtime.is_ready("m"))
        assert pid_of(runtime) == waits
        assert ways(runtime)["spare"] == 2


# Which spare


@pytest.mark.promise(
    "Spares",
    "A spare is used only where a process that is started now would inherit and read the same: variables, limits, "
    "processors, niceness, umask, and the files of numpy.",
)
@pytest.mark.parametrize("what", ["variable", "processors", "umask", "limit", "niceness"])
def test_what_a_process_would_inherit_differently(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    processors = where_processes_start(lambda: os.sched_getaffinity(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if what == "variable":
        monkeypatch.setenv("PYTHON_OF_A_TEST", "1")
    elif what == "processors":
        if len(processors) == 1:
            pytest.skip("this machine has one processor")
        where_processes_start(lambda: os.sched_setaffinity(0, {min(processors)}))
    elif what == "umask":
        umask = os.umask(0o027)
    elif what == "limit":
        lower = (8 << 20) - 4096 if soft == resource.RLIM_INFINITY else soft - 4096
        resource.setrlimit(resource.RLIMIT_STACK, (lower, hard))
    elif os.geteuid() != 0:
        pytest.skip("only root becomes less nice again")
    else:
        where_processes_start(lambda: os.nice(1))
    try:
        with loaded(runtime, file, "exec") as pid:
            if what == "processors":
                assert os.sched_getaffinity(pid) == {min(processors)}
    finally:
        where_processes_start(lambda: os.sched_setaffinity(0, processors))
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
        if what == "umask":
            os.umask(umask)
        if what == "niceness":
            where_processes_start(lambda: os.nice(-1))


@pytest.mark.promise("Spares", "A spare is used only …")
def test_another_numpy(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "numpy").symlink_to(Path(np.__file__).parent)
    libraries = Path(np.__file__).parents[1] / "numpy.libs"
    (packages / "numpy.libs").symlink_to(libraries)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    with moonpool.Runtime(spares=1) as runtime:
        runtime.load("first", file, config=config())
        before = spare_of(runtime)
        with loaded(runtime, file, "spare"):
            pass
        before = spare_of(runtime)
        (packages / "another.pth").write_text("")
        with loaded(runtime, file, "exec"):
            assert not is_running(before)


@pytest.mark.parametrize("more", [{"PREFORK": "no"}, {"CPUS": 0}, {"THREADS": 1}, {"MEMORY_LIMIT_BYTES": "200M"}])
def test_what_needs_a_process_of_its_own(runtime: moonpool.Runtime, file: Path, more: dict[str, object]) -> None:
    if more.get("CPUS") == 0:
        more = {"CPUS": min(os.sched_getaffinity(0))}
    waits = spare_of(runtime)
    with loaded(runtime, file, "exec", **more):
        assert waits in pool_of(runtime).waiting


def test_a_relative_path_is_that_of_the_model_s_folder(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, ["below", os.environ.get("PYTHONPATH")])))
    with loaded(runtime, file, "exec"):
        pass


@pytest.mark.promise(
    "Spares", "A model's own files are no part of a spare: its `.pth` and `sitecustomize` are never run there."
)
def test_files_of_a_model_are_not_run(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL)
    for where in (folder, folder / "1"):
        for name in ("sitecustomize.py", "usercustomize.py"):
            (where / name).write_text("raise SystemExit('run')\n")
        (where / "evil.pth").write_text("import sys; sys.exit('run')\n")
    for _ in range(2):
        spare_of(runtime)
        with loaded(runtime, folder, "spare"):
            assert ask(runtime)["own modules"] == ask(runtime, "first")["own modules"]


def test_a_spare_that_cannot_be_made_is_told_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(python: str, title: str, *more: Any) -> list[str]:
        return [*boot_command(python, title, *more)[:-1], "/no/msgpack"]

    monkeypatch.setattr("moonpool.runtime.isolation.spares.boot_command", broken)
    caplog.set_level("INFO", "moonpool")
    with moonpool.Runtime(spares=1) as runtime:
        for name in ("one", "two"):
            runtime.load(name, file, config=config())
            wait_until(lambda: "no process is kept ready" in caplog.text and not pool_of(runtime).is_making)
        assert ways(runtime)["exec"] == 2
    assert caplog.text.count("no process is kept ready for models in a sandbox: it ended; they start without one") == 1


@pytest.mark.promise("Spares", "Many loads leave no process, descriptor or folder behind.")
def test_many_loads_leave_nothing(file: Path) -> None:
    with moonpool.Runtime(spares=1) as runtime:
        runtime.load("first", file, config=config())
        spare_of(runtime)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(12):
            runtime.load("m", file, config=config())
            runtime.unload("m")
        spare_of(runtime)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert ways(runtime)["spare"] > 0


def test_a_load_waits_for_the_spare_in_the_making(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "SETTLE_S", 0.0)
    with loaded(runtime, file, "spare"):
        wait_until(waiting_processes, what="a process that will be a spare")
        runtime.load("n", file, config=config())
        assert ways(runtime)["spare"] == 2
    runtime.unload("n")
