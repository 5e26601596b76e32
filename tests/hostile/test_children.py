"""Processes that a contained model starts: its error names all grants that they take, and with these they work."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import lesser_kernel
from tests.e2e.hosting import options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.e2e.test_children import CONFIG, LIBRARIES, found, skip_without, written
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.isolation import users
from moonpool.stub.sandbox.granted import closed_above

EPOLL = "epoll_create1,epoll_ctl,epoll_wait,epoll_pwait"
# Each makes 9.
USES = {
    **LIBRARIES,
    "manager": """
with context.Manager() as manager:
    found = manager.list([9])[0]
""",
    "program": """
import subprocess, sys
found = subprocess.run([sys.executable, "-c", "print(9)"], capture_output=True, text=True).stdout.strip()
""",
    "wrapped": """
import subprocess, sys
try:
    found = subprocess.run([sys.executable, "-c", "print(9)"], capture_output=True, text=True).stdout.strip()
except OSError as error:
    raise RuntimeError(f"CompilerError: PermissionError: {error}") from None
""",
    "epoll": """
import select
select.epoll().close()
found = 9
""",
    "uvloop": """
import asyncio, uvloop
found = uvloop.run(asyncio.sleep(0, 9))
""",
    "socket": """
import socket
socket.socket(socket.AF_UNIX).close()
found = 9
""",
    # As torch passes the tensors of its workers.
    "descriptor": """
from multiprocessing import reduction
def write(queue):
    fd = queue.get().detach()
    os.write(fd, b"9")
    os.close(fd)
read_fd, write_fd = os.pipe()
queue = context.SimpleQueue()
child = context.Process(target=write, args=(queue,))
child.start()
queue.put(reduction.DupFd(write_fd))
os.close(write_fd)
found = os.read(read_fd, 9).decode()
child.join()
os.close(read_fd)
""",
    "descriptor of a child": """
from multiprocessing import reduction
def pass_on(queue):
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"9")
    queue.put(reduction.DupFd(read_fd))
    taken.get()
queue, taken = context.SimpleQueue(), context.SimpleQueue()
child = context.Process(target=pass_on, args=(queue,))
child.start()
fd = queue.get().detach()
taken.put(None)
child.join()
found = os.read(fd, 9).decode()
os.close(fd)
""",
    "sqlite": """
import sqlite3, tempfile
with tempfile.TemporaryDirectory() as name:
    database = sqlite3.connect(f"{name}/a.db")
    database.execute("create table t (x)")
    database.execute("insert into t values (9)")
    database.commit()
    found = database.execute("select x from t").fetchone()[0]
    database.close()
""",
    "lockf": """
import fcntl, tempfile
with tempfile.TemporaryFile() as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    found = 9
""",
}
# With the method, and the calls that the first error has to name.
CASES = [
    ("process", "fork", "fork"),
    ("pool", "fork", "fork"),
    ("executor", "fork", "fork"),
    ("torch", "fork", "fork"),
    ("process", "spawn", "fork,execve"),
    ("executor", "spawn", "fork,execve"),
    ("process", "forkserver", "fork,execve,unix"),
    ("torch", "spawn", "fork,execve,unix"),
    ("torch", "forkserver", "fork,execve,unix"),
    ("manager", "fork", "fork,unix"),
    ("program", "fork", "fork,execve"),
    ("wrapped", "fork", "fork,execve"),
    ("epoll", "fork", EPOLL),
    ("uvloop", "fork", EPOLL),
    ("socket", "fork", "unix"),
]


def readable(folder: Path) -> Path:
    written(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable(tmp_path_factory.mktemp("children") / "model")


@pytest.fixture(scope="module")
def alone(runtime: moonpool.Runtime, folder: Path) -> str:
    """The model without a grant."""
    runtime.load("alone", folder, config=CONFIG | options(SANDBOX="strict"))
    return "alone"


def granted(runtime: moonpool.Runtime, folder: Path, calls: str) -> str:
    name = calls.replace(",", "-")
    if name not in runtime.models():
        config = CONFIG | options(SANDBOX="strict", SANDBOX_SYSCALLS=calls)
        runtime.load(name, folder, config=config)
    return name


@pytest.mark.promise(
    "Seeing sandboxes",
    "Where a library needs several grants to start processes, its first error names all of them, and they are enough.",
)
@pytest.mark.parametrize(("use", "method", "calls"), CASES)
def test_the_grants_that_an_error_names_are_enough(
    runtime: moonpool.Runtime, folder: Path, alone: str, use: str, method: str, calls: str
) -> None:
    skip_without(use)
    with pytest.raises(moonpool.ModelError) as caught:
        found(runtime, method, USES[use], alone)
    said = re.findall(r"MOONPOOL_SANDBOX_SYSCALLS=(\S+) would allow it", str(caught.value))
    assert said[:1] == [calls], str(caught.value)

    name = granted(runtime, folder, calls)
    assert found(runtime, method, USES[use], name) == "9"


WORKERS = """
import joblib
with joblib.Parallel(2) as parallel:
    pids = [set(parallel(joblib.delayed(os.getpid)() for _ in range(20))) for _ in range(10)]
    found = 9 if len(set.union(*pids)) <= 2 else pids
"""


@pytest.mark.promise("Seeing sandboxes", "Where a library needs several grants …")
def test_workers_of_joblib_also_need_their_own_files_where_psutil_is_installed(
    runtime: moonpool.Runtime, folder: Path, alone: str
) -> None:
    """Without them a worker ends after its first task, and another one takes its place, or the call fails."""
    pytest.importorskip("joblib")
    pytest.importorskip("psutil")
    with pytest.raises(moonpool.ModelError) as caught:
        found(runtime, "spawn", USES["joblib"], alone)
    said = r"MOONPOOL_SANDBOX_PATHS=ro:/proc and MOONPOOL_SANDBOX_SYSCALLS=fork,execve would allow"
    assert re.search(said, str(caught.value)), str(caught.value)

    given = options(SANDBOX="strict", SANDBOX_SYSCALLS="fork,execve", SANDBOX_PATHS="ro:/proc")
    runtime.load("measures", folder, config=CONFIG | given)
    assert found(runtime, "spawn", USES["joblib"], "measures") == "9"
    assert found(runtime, "spawn", WORKERS, "measures") == "9"


SEES = """
found = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
found = found if os.getpid() not in found or max(found) > 99 else 9
"""


@pytest.mark.promise(
    "Layers of the sandbox",
    "A model that may start processes has a /proc of its own where the kernel allows it: no other process is there, "
    "also if the model may read it.",
)
def test_proc_has_the_processes_of_the_model_alone(runtime: moonpool.Runtime, folder: Path) -> None:
    given = options(SANDBOX="strict", SANDBOX_SYSCALLS="fork", SANDBOX_PATHS="ro:/proc")
    runtime.load("sees", folder, config=CONFIG | given)
    assert found(runtime, "fork", SEES, "sees") == "9"


def test_an_error_names_the_calls_that_the_model_has_already(runtime: moonpool.Runtime, folder: Path) -> None:
    """The value of an option replaces the one before."""
    with pytest.raises(moonpool.ModelError) as caught:
        found(runtime, "fork", USES["program"], granted(runtime, folder, "unix"))
    assert "MOONPOOL_SANDBOX_SYSCALLS=unix,fork,execve would allow it" in str(caught.value)


FILE_OF_A_LIBRARY = """
names = {"__name__": "joblib.externals.loky"}
exec("def look(): open('/etc/passwd')", names)
names["look"]()
"""


def test_the_file_that_a_library_was_refused_is_named_and_not_what_its_processes_take(
    runtime: moonpool.Runtime, alone: str
) -> None:
    with pytest.raises(moonpool.ModelError) as caught:
        found(runtime, "fork", FILE_OF_A_LIBRARY, alone)
    assert "MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it" in str(caught.value)


REFUSED_IN_A_CHILD = """
def refused(_):
    import socket
    try:
        socket.socket(socket.AF_UNIX)
    except OSError:
        signal.pause()
child = context.Process(target=refused, args=(1,))
child.start()
child.join()
found = 9
"""


@pytest.mark.promise(
    "Seeing sandboxes",
    "What a process that a model started was refused is counted for the instance, and named where a batch then exceeds "
    "its time.",
)
def test_what_a_child_was_refused_is_named_at_the_deadline(runtime: moonpool.Runtime, folder: Path) -> None:
    granted = options(SANDBOX="strict", SANDBOX_SYSCALLS="fork")["parameters"]
    limit = options(EXECUTE_TIMEOUT_S=0.2)["parameters"]
    runtime.load("late", folder, config=CONFIG | {"parameters": granted})
    try:
        text = f"fork\n{REFUSED_IN_A_CHILD}"
        asked = runtime.submit("late", {"X": [text]})
        denials = hosted_in(runtime, "late").model.denials
        wait_until(lambda: denials.counts("late_0")["socket"] == 1, 60.0)
        # The refusal is as old as the batch, and not younger than its limit.
        (refused,) = denials.latest("late_0")
        wait_until(lambda: time.time() * 1000 - refused.last_ms > 400, 60.0)
        runtime.load("late", folder, config=CONFIG | {"parameters": granted | limit})
        with pytest.raises(moonpool.ExecuteTimedOut) as caught:
            asked.result(60.0)
        assert "make a socket of Unix: MOONPOOL_SANDBOX_SYSCALLS=unix would allow it" in str(caught.value)
    finally:
        runtime.unload("late")


@pytest.mark.promise("Layers of the sandbox", "A model that may fork passes descriptors between its processes …")
@pytest.mark.parametrize("use", ["descriptor", "descriptor of a child"])
def test_a_child_and_the_model_pass_descriptors_to_each_other(
    runtime: moonpool.Runtime, folder: Path, use: str
) -> None:
    assert found(runtime, "fork", USES[use], granted(runtime, folder, "fork")) == "9"


@pytest.mark.promise("Seeing sandboxes", "Where a library needs several grants …")
@pytest.mark.parametrize("use", ["sqlite", "lockf"])
def test_beside_the_grant_of_processes_locks_on_files_take_one_too(
    runtime: moonpool.Runtime, folder: Path, alone: str, use: str
) -> None:
    """Without processes such locks keep nobody out, and need no grant."""
    assert found(runtime, "fork", USES[use], alone) == "9"
    with pytest.raises(moonpool.ModelError) as caught:
        found(runtime, "fork", USES[use], granted(runtime, folder, "fork"))
    assert "MOONPOOL_SANDBOX_SYSCALLS=fork,locks would allow it" in str(caught.value)

    assert found(runtime, "fork", USES[use], granted(runtime, folder, "fork,locks")) == "9"


@pytest.mark.promise("Lifecycle", "Shared memory and semaphores that a model made …")
def test_a_child_shares_the_memory_of_the_model(runtime: moonpool.Runtime, folder: Path) -> None:
    code = """
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=8)
def write(name):
    same = shared_memory.SharedMemory(name)
    same.buf[0] = 9
    same.close()
child = context.Process(target=write, args=(block.name,))
child.start()
child.join()
found = block.buf[0]
block.close()
block.unlink()
"""
    assert found(runtime, "fork", code, granted(runtime, folder, "fork")) == "9"


WITHOUT_NAMESPACES = f"""
import sys
import moonpool
from tests.e2e.test_children import found
config = {CONFIG!r}
for sandbox in ({options(SANDBOX="strict")!r}, {options(SANDBOX="strict", SANDBOX_PATHS="rw:/dev/shm")!r}):
    with moonpool.Runtime() as runtime:
        runtime.load("alone", sys.argv[1], config=config | sandbox)
        for code in (
            "lock = context.Lock(); lock.acquire(); found = 9",
            "queue = context.Queue(); queue.put(9); found = queue.get()",
            "from multiprocessing import shared_memory; shared_memory.SharedMemory(sys.argv[2], create=True, size=8)".replace("sys.argv[2]", repr(sys.argv[2])),
        ):
            try:
                print(found(runtime, "fork", code, "alone"))
            except moonpool.ModelError as error:
                print(str(error).partition("\\n")[0].partition("refused it: ")[2])
"""


def test_without_mounts_of_its_own_it_takes_grants(folder: Path, is_root: bool) -> None:
    """The last one needs another process as well."""
    if is_root and closed_above(os.path.realpath(sys.base_prefix), users.LAST):
        pytest.skip("without mounts its user could not reach this interpreter")
    program = [sys.executable, "-c", WITHOUT_NAMESPACES, str(folder), f"moonpool_hostile_{os.getpid()}"]
    paths = [str(Path(__file__).parents[2]), *sys.path]
    ended = subprocess.run(
        lesser_kernel.command(program, unshare=errno.EPERM),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )

    # It was made before its error, and what removes such blocks is what was refused.
    Path("/dev/shm", program[-1]).unlink(missing_ok=True)
    path = "MOONPOOL_SANDBOX_PATHS=rw:/dev/shm would allow it"
    calls = "MOONPOOL_SANDBOX_SYSCALLS=fork,execve would allow it"
    both = f"{path.removesuffix(' would allow it')} and {calls}"
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("[")]
    assert lines == [path, path, both, "9", "9", calls], ended.stderr
