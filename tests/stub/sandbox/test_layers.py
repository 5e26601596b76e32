"""The layers on a real process: what a contained one can still do, and what not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.stub.sandbox.children import INSTANCE, Identity

from moonpool.stub.sandbox import kernel, landlock, rules

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)

LIMITS = {"open_files": 256, "tasks": 64, "file_bytes": 1 << 20, "memory_bytes": 4 << 30}


def denied(results: dict[str, object], *attempts: str) -> dict[str, object]:
    """Return the attempts that were not denied."""
    return {each: results[each] for each in attempts if "Error" not in str(results[each])[:32]}


@pytest.mark.promise(
    "Layers of the sandbox",
    "A strict instance has all layers, in order, and reports them. The kernel reports the same of its process.",
)
def test_a_strict_process_says_which_layers_it_has(identity: Identity) -> None:
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20, limits=LIMITS)
        results = identity.attempt(policy, "open('/proc/self/status').read()")

    names = [layer.partition(":")[0] for layer in results["on"]]
    expected = ["dies_with_runtime", "limits", "namespaces", "shared_memory", "own_user"]
    expected += ["no_capabilities", "no_new_privs", "not_dumpable", "landlock", "seccomp"]
    left_out = {sentence.partition(":")[0] for sentence in results["left_out"]}
    if "namespaces" in left_out:
        expected.remove("shared_memory")
    assert names == [name for name in expected if name not in left_out]
    assert left_out <= ({"namespaces"} if identity.is_root else {"namespaces", "own_user"})
    status = results["open('/proc/self/status').read()"]
    assert r"\nSeccomp:\t2" in status
    assert r"\nNoNewPrivs:\t1" in status
    assert r"\nCapEff:\t0000000000000000" in status
    if identity.is_root:
        assert rf"\nUid:\t{INSTANCE}\t{INSTANCE}\t{INSTANCE}\t{INSTANCE}\n" in status
        assert r"\nGroups:\t \n" in status
        assert r"\nCapBnd:\t0000000000000000" in status


@pytest.mark.promise(
    "Layers of the sandbox",
    "In the sandbox, threads, asyncio, memory maps, temporary files, SQLite without locks, time "
    "and signals to itself work as usual. numpy and PyTorch can be imported and compute.",
)
def test_a_strict_process_does_what_models_do(identity: Identity) -> None:
    attempts = [
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
        "import asyncio; asyncio.run(asyncio.to_thread(str))",
        "import tempfile; tempfile.TemporaryFile().write(b'x')",
        "import shutil, os; open('a', 'w').close(); shutil.copy2('a', 'b'); os.rename('b', 'c')",
        "os.listdir('.') == ['a', 'c'] or os.listdir('.') == ['c', 'a'] or 1 / 0",
        "import mmap; mmap.mmap(-1, 1 << 20)[0]",
        "import time, random; time.sleep(0.001); time.localtime(); random.random()",
        "import signal; signal.signal(signal.SIGUSR1, print); os.kill(os.getpid(), signal.SIGUSR1)",
        "import socket; a, b = socket.socketpair(); a.setblocking(False); a.send(b'x'); b.recv(1)",
        "import select, os; select.poll().register(os.pipe()[0])",
        "import resource; resource.getrusage(resource.RUSAGE_SELF); resource.getrlimit(resource.RLIMIT_AS)",
        "import faulthandler, ctypes, zoneinfo, sqlite3; sqlite3.connect('file:d?nolock=1', uri=True).execute('create "
        "table t (x)')",
        "import ssl, hashlib; ssl.create_default_context(); hashlib.sha256(b'x').digest()",
        "import uuid, platform, locale, getpass, logging; uuid.uuid4(); platform.platform(); uuid.uuid1()",
        "import multiprocessing, concurrent.futures; concurrent.futures.ThreadPoolExecutor(2).submit(str)",
        "open('/dev/null', 'w').write('x'); open('/dev/urandom', 'rb').read(1)",
        "open('/proc/self/maps').read(); open('/proc/meminfo').read(); open('/proc/cpuinfo').read()",
        "os.cpu_count(); os.sched_getaffinity(0); os.uname(); os.getloadavg",
        # Of the processors that a control group may use, in both versions.
        "names = ('cpu.max', 'cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us'); paths = [f'/sys/fs/cgroup/{name}' for "
        "name in names]",
        "for path in filter(os.path.exists, paths): open(path).read()",
        "os.fstat(0); os.isatty(0); os.set_blocking(os.pipe()[0], False)",
    ]
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20, limits=LIMITS)
        results = identity.attempt(policy, *attempts, before=f"import os; os.environ['TMPDIR'] = {scratch!r}")

    assert {each: results[each] for each in attempts if not results[each].startswith("ok")} == {}


@pytest.mark.promise(
    "Layers of the sandbox",
    "A strict instance reads only its interpreter, its environment, its model, granted paths "
    "and a fixed list of files without secrets. It writes only to its scratch folder.",
)
@pytest.mark.promise(
    "Layers of the sandbox",
    "It starts no process and no program, has no sockets except pairs of its own, and can "
    "signal, trace and limit only itself.",
)
def test_a_strict_process_does_not_do_what_attacks_do(identity: Identity) -> None:
    attempts = [
        "open('/etc/passwd').read()",
        "open('/etc/hostname').read()",
        "os.listdir('/')",
        "os.listdir('/home')",
        "os.listdir('/tmp')",
        "open('/tmp/moonpool-out', 'w')",
        "os.listdir('/proc')",
        f"open('/proc/{os.getpid()}/environ').read()",
        f"open('/proc/{os.getpid()}/cmdline').read()",
        f"os.listdir('/proc/{os.getpid()}/fd')",
        "open('/proc/self/environ').read()",
        "open('/proc/self/mem', 'r+b')",
        "open('/proc/self/oom_score_adj', 'w').write('0')",
        "os.chmod('/usr', 0o777)",
        "os.utime('/usr')",
        "os.truncate('/usr/bin/env', 0)",
        "os.symlink('/etc/passwd', 'link'); open('link').read()",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.kill(1, 0)",
        "os.setuid(0)",
        "os.setsid()",
        "os.memfd_create('x')",
        "os.setpriority(os.PRIO_PROCESS, 0, 1)",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CORE)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
        "os.mkfifo('fifo')",
        "kernel.prctl(1, 0)",
        "kernel.prctl(4, 1)",
        "kernel.call('io_uring_setup', 1, bytes(120))",
        "kernel.call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
        "kernel.call('landlock_create_ruleset', None, 0, 1)",
        "kernel.call('no such call')",
    ]
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20, limits=LIMITS)
        results = identity.attempt(policy, *attempts, before="import os")

    assert denied(results, *attempts) == {}


@pytest.mark.promise("Layers of the sandbox", "Files of `/proc` that it may read stay readable when memory is short.")
def test_files_that_the_kernel_could_forget_are_held(identity: Identity) -> None:
    # A rule of Landlock ends with the inode, and the kernel replaces those of /proc when memory is short.
    held = "sorted(os.path.basename(os.readlink(f'/proc/self/fd/{fd}')) for fd in range(3, 10))"

    results = identity.attempt(identity.policy(), held, before="import os")

    names = ["cpuinfo", "maps", "meminfo", "overcommit_memory", "stat", "statm", "status"]
    assert results[held] == f"ok {names}"


@pytest.mark.promise("Layers of the sandbox", "A system call that is not …")
@pytest.mark.parametrize("name", sorted(rules.KILLED))
def test_a_call_that_only_an_attack_makes_ends_a_real_process(code: Path, name: str) -> None:
    program = f"""
import sys, types, os
package = sys.modules["moonpool"] = types.ModuleType("moonpool")
package.__path__ = [sys.argv[1]]
from moonpool.ipc import syscalls
from moonpool.stub.sandbox import identity, kernel, rules, seccomp
identity.forbid_new_privileges()
identity.forbid_looking_inside()
allowed = rules.allowed(pid=os.getpid())
seccomp.install(seccomp.program(os.uname().machine, allowed, rules.KILLED, rules.ABSENT))
print("on", flush=True)
if {name!r} not in kernel.NUMBERS:
    os.kill(os.getpid(), 31)
kernel.call({name!r}, -1, -1, -1, -1, -1)
"""
    ended = Identity(os.geteuid(), sys.executable, code).run(program, str(code))

    assert (ended.stdout, ended.returncode) == ("on\n", -31)


@pytest.mark.promise(
    "Layers of the sandbox",
    "From version 9 of Landlock on, a contained process reaches no socket by its path, and rights of versions that "
    "moonpool does not know are named.",
)
@pytest.mark.parametrize(("version", "rights"), [(1, 13), (3, 15), (7, 16), (9, 17), (10, 17), (99, 17)])
def test_landlock_takes_all_rights_that_the_kernel_knows(
    version: int, rights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def call(*arguments: Any) -> int:
        asked.append(arguments)
        # The ruleset, which `restrict` closes.
        return os.open("/dev/null", os.O_RDONLY) if len(asked) == 1 else 0

    monkeypatch.setattr(kernel, "call", call)
    landlock.restrict(version, [("/", landlock.CHANGE | landlock.READ)], [])
    handled = int.from_bytes(asked[0][1][:8], "little")
    assert handled == (1 << rights) - 1
    assert not (landlock.CHANGE | landlock.READ | landlock.USE_DEVICE) >> 16


# Makes the kernel's version of Landlock the one after the table's last.
YOUNG_KERNEL = """
from moonpool.stub.sandbox import landlock
landlock.NEWEST = landlock.abi() - 1
"""
TRIAL = f"""
import sys, types
package = sys.modules["moonpool"] = types.ModuleType("moonpool")
package.__path__ = [sys.argv.pop(1)]
{YOUNG_KERNEL}
from moonpool.stub.sandbox import trial
trial.main()
"""


@pytest.mark.promise("Layers of the sandbox", "From version 9 of Landlock on …")
def test_a_version_of_landlock_that_moonpool_does_not_know_is_named(identity: Identity) -> None:
    version = landlock.abi()
    with identity.scratch() as scratch:
        policy = identity.policy(scratch=scratch, scratch_bytes=1 << 20, limits=LIMITS)
        results = identity.attempt(policy, before=YOUNG_KERNEL)
        tried = identity.run(TRIAL, str(identity.folder), "landlock", policy.to_json())

    unknown = (
        f"what Landlock of version {version} can do beyond version {version - 1}, the last that this moonpool knows"
    )
    assert unknown in results["left_out"]
    assert f"landlock:{version}" in results["on"]
    assert f"nothing that is newer than version {version - 1}" in json.loads(tried.stdout)["detail"]
