"""A contained process can do the acts that it was granted, and no others."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.stub.sandbox.children import INSTANCE, Identity

from moonpool.ipc.policy import BEST_EFFORT, STRICT
from moonpool.stub.sandbox import landlock

if landlock.abi() < landlock.KNOWS_PORTS:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)


@contextmanager
def folder(identity: Identity, *, mode: int = 0o755) -> Iterator[Path]:
    """A folder of the instance's user, with a file in it."""
    owner = INSTANCE if identity.is_root else identity.uid
    with tempfile.TemporaryDirectory(prefix="moonpool-test-") as name:
        path = Path(os.path.realpath(name))
        path.chmod(mode)
        (path / "inside").mkdir()
        (path / "inside" / "file").write_text("content")
        (path / "other").write_text("secret")
        (path / "other").chmod(0o666)
        if os.geteuid() == 0:
            for each in (path / "inside", path / "inside" / "file"):
                os.chown(each, owner, owner)
        yield path


@pytest.mark.promise("Layers of the sandbox", "A strict instance reads only …")
def test_a_path_is_granted_to_be_read_alone(identity: Identity) -> None:
    with folder(identity) as path:
        inside = path / "inside"
        results = identity.attempt(
            identity.policy(granted=[(str(inside), False)]),
            f"open('{inside}/file').read()",
            f"open('{inside}/file', 'a')",
            f"open('{inside}/new', 'w')",
            f"open('{path}/other').read()",
        )
    allowed, *denied = list(results.values())[2:]

    assert allowed == "ok 'content'"
    assert [each for each in denied if not each.startswith(("PermissionError", "OSError"))] == []


@pytest.mark.promise("Layers of the sandbox", "A strict instance reads only …")
def test_one_file_is_granted_without_its_neighbours(identity: Identity) -> None:
    with folder(identity) as path:
        file = path / "inside" / "file"
        results = identity.attempt(
            identity.policy(granted=[(str(file), False)]), f"open('{file}').read()", f"open('{path}/other')"
        )

    assert results[f"open('{file}').read()"] == "ok 'content'"
    assert results[f"open('{path}/other')"].startswith("PermissionError")


def test_a_path_is_granted_to_be_written(identity: Identity) -> None:
    with folder(identity) as path:
        inside = path / "inside"
        results = identity.attempt(
            identity.policy(granted=[(str(inside), True)]),
            f"open('{inside}/file', 'a').write('!')",
            f"open('{inside}/new', 'w').write('x')",
            f"open('{path}/other', 'a')",
            f"os.rename('{inside}/new', '{path}/new')",
            before="import os",
        )
        content = (inside / "file").read_text(), (inside / "new").read_text()

    assert content == ("content!", "x")
    assert not results[f"open('{path}/other', 'a')"].startswith("ok")
    assert not results[f"os.rename('{inside}/new', '{path}/new')"].startswith("ok")


@pytest.mark.promise("Layers of the sandbox", "Links open nothing that was not granted.")
def test_a_link_inside_a_granted_folder_opens_nothing_outside(identity: Identity) -> None:
    with folder(identity) as path:
        link = path / "inside" / "link"
        link.symlink_to(path / "other")
        results = identity.attempt(identity.policy(granted=[(str(path / "inside"), False)]), f"open('{link}').read()")

    assert results[f"open('{link}').read()"].startswith("PermissionError")


@pytest.mark.promise(
    "Layers of the sandbox",
    "If a device is granted for writing, the requests of its driver (ioctl) are granted with "
    "it, and those of no other device.",
)
@pytest.mark.skipif(landlock.abi() < 5, reason="this Landlock does not know of devices")
def test_a_device_is_granted_with_what_its_driver_offers(identity: Identity) -> None:
    # The call asks how much entropy there is (RNDGETENTCNT), as every user may.
    attempt = "len(fcntl.ioctl(os.open('/dev/random', os.O_RDONLY), 0x80045200, bytes(4)))"
    before = "import fcntl, os"

    granted = identity.policy(granted=[("/dev/random", True)], syscalls=["ioctl"])
    not_granted = identity.policy(syscalls=["ioctl"])

    assert identity.attempt(granted, attempt, before=before)[attempt] == "ok 4"
    assert identity.attempt(not_granted, attempt, before=before)[attempt].startswith("Permission")


def connection(server: socket.socket) -> str:
    address = server.getsockname()
    return f"import socket; socket.create_connection({address}, 5)"


@pytest.mark.promise(
    "Layers of the sandbox",
    "An instance can connect to granted TCP ports only, without UDP and without "
    "listeners. Without a granted port there is no network, even if sockets were granted.",
)
def test_a_port_is_granted_and_no_other(identity: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        results = identity.attempt(
            identity.policy(ports=[one.getsockname()[1]]),
            connection(one),
            connection(two),
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "import socket; socket.socket(socket.AF_UNIX)",
            "import socket; socket.create_server(('127.0.0.1', 0))",
            "import socket; socket.socket().listen()",
            f"import socket; socket.socket().sendto(b'x', 0x20000000, {two.getsockname()})",
        )
    assert not any("+net" in layer for layer in results.pop("on"))
    del results["left_out"]

    allowed, *denied = results.values()
    assert allowed == "ok None"
    assert [each for each in denied if not each.startswith("PermissionError")] == []


@pytest.mark.promise("Layers of the sandbox", "An instance can connect to granted …")
def test_without_ports_there_is_no_network_even_for_one_who_has_sockets(identity: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = connection(server)
        results = identity.attempt(identity.policy(syscalls=["socket", "connect"]), attempt)

    assert results[attempt].startswith(("PermissionError", "OSError"))


def test_system_calls_are_granted_by_name(identity: Identity) -> None:
    results = identity.attempt(
        identity.policy(syscalls=["memfd_create", "sched_setaffinity"]),
        "os.memfd_create('x') and None",
        "os.sched_setaffinity(0, os.sched_getaffinity(0))",
        "os.fork()",
        before="import os",
    )

    assert list(results.values())[2:4] == ["ok None", "ok None"]
    assert results["os.fork()"].startswith("PermissionError")


@pytest.mark.promise("Layers of the sandbox", "`fork`, `execve` and other calls are …")
@pytest.mark.promise("Layers of the sandbox", "If no private user is available, …")
@pytest.mark.parametrize("level", [STRICT, BEST_EFFORT])
def test_an_unknown_system_call_is_refused_by_name(identity: Identity, level: str) -> None:
    """The level best_effort refuses it too: a bad name is no reason to go without the filter."""
    results = identity.attempt(identity.policy(level=level, syscalls=["levitate"]))

    assert results["refused"] == (
        f"seccomp: there is no system call levitate on {os.uname().machine}; take it out of MOONPOOL_SANDBOX_SYSCALLS"
    )


@pytest.mark.promise(
    "Layers of the sandbox",
    "`fork`, `execve` and other calls are granted by name, and `/dev/shm` for the locks "
    "of processes. Programs that are started stay in the sandbox, and a model may not run "
    "files that it wrote. An unknown name is refused.",
)
def test_processes_of_its_own_are_granted_as_fork(identity: Identity) -> None:
    results = identity.attempt(
        identity.policy(syscalls=["fork"]),
        "os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8",
        "os.execv('/bin/true', ['true'])",
        before="import os",
    )

    assert results["os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8"] == "ok 3"
    assert results["os.execv('/bin/true', ['true'])"].startswith("PermissionError")


@pytest.mark.promise("Layers of the sandbox", "`fork`, `execve` and other calls are …")
def test_pools_of_processes_need_shared_memory_beside_fork(identity: Identity) -> None:
    pool = "pool()"
    before = """
import multiprocessing
def pool():
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return workers.map(abs, [-1])
"""

    granted = identity.policy(syscalls=["fork"], granted=[("/dev/shm", True)])
    without = identity.policy(syscalls=["fork"])

    assert identity.attempt(granted, pool, before=before)[pool] == "ok [1]"
    assert "Error" in identity.attempt(without, pool, before=before)[pool]


@pytest.mark.promise("Layers of the sandbox", "`fork`, `execve` and other calls are …")
def test_programs_are_granted_as_execve_and_stay_inside(identity: Identity) -> None:
    run = "subprocess.run(['/bin/sh', '-c', 'echo $0; cat /etc/passwd'], capture_output=True).stdout"
    with identity.scratch() as scratch:
        results = identity.attempt(
            identity.policy(syscalls=["fork", "execve"], scratch=scratch, scratch_bytes=1 << 20),
            run,
            "shutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o700); subprocess.run(['./sh', '-c', ':'])",
            before="import os, shutil, subprocess",
        )

    assert results[run] == "ok b'/bin/sh\\n'"
    # It may not run a program that it wrote itself.
    assert list(results.values())[3].startswith("PermissionError")
