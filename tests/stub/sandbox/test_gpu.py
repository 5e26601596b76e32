"""Acts of a process with the device nodes of a GPU, tried with a device that every machine has."""

from __future__ import annotations

import errno

import pytest
from tests.stub.sandbox.children import Identity

from moonpool.stub.sandbox import landlock

pytestmark = pytest.mark.promise(
    "GPUs in the runtime",
    "A GPU adds only these to a sandbox: the ioctls of its driver, `memfd_create`, the "
    "names of a process's own threads, and a socket that accepts no connection.",
)

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)

BEFORE = """
import fcntl, os, socket, _thread
named = socket.socket
def control(request):
    with open("/dev/full", "rb") as device:
        fcntl.ioctl(device, request, b"")
"""
# libc's pthread_setname_np does this.
NAME_OWN_THREAD = "os.write(os.open(f'/proc/self/task/{_thread.get_native_id()}/comm', os.O_RDWR), b'cuda')"
MAKE_MEMFD = "os.memfd_create('cuda')"
# libcuda does this, and does not start without it.
LISTEN = "(s := named(socket.AF_UNIX, socket.SOCK_SEQPACKET), s.bind(f'\\0cuda-uvmfd-{os.getpid()}'), s.listen())"
# NV_ESC_CARD_INFO, UVM_INITIALIZE, UVM_RUN_TEST
DRIVER_CALLS = ("control(0xC90046C8)", "control(0x30000001)", "control(9)")
REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)
# TIOCSTI, FS_IOC_SETFLAGS
OTHER_CALLS = ("control(0x5412)", "control(0x40086602)")


def test_the_driver_of_a_gpu_can_work(identity: Identity) -> None:
    identity.needs_no_mounts()
    results = identity.attempt(
        identity.policy(devices=["/dev/full"]), NAME_OWN_THREAD, MAKE_MEMFD, LISTEN, *DRIVER_CALLS, before=BEFORE
    )

    assert results[NAME_OWN_THREAD] == "ok 4"
    for attempt in (MAKE_MEMFD, LISTEN):
        assert results[attempt].startswith("ok"), results
    # The device does not know these calls. A refusal of the sandbox would be EPERM or EACCES.
    for call in DRIVER_CALLS:
        assert "[Errno 25]" in results[call], results


def test_a_gpu_opens_nothing_else(identity: Identity) -> None:
    identity.needs_no_mounts()
    others = (
        "open('/proc/self/oom_score_adj', 'w')",
        "open(f'/proc/self/task/{_thread.get_native_id()}/oom_score_adj', 'w')",
        "open(f'/proc/{os.getppid()}/comm', 'w')",
        f"{LISTEN}[0].accept()",
        "named(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect('/run/service')",
        "named(socket.AF_UNIX, socket.SOCK_STREAM)",
        "named(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "named(socket.AF_INET, socket.SOCK_STREAM)",
    )
    results = identity.attempt(identity.policy(devices=["/dev/full"]), *others, *OTHER_CALLS, before=BEFORE)

    for attempt in (*others, *OTHER_CALLS):
        assert any(f"[Errno {number}]" in results[attempt] for number in REFUSED), results


def test_ports_and_a_gpu_go_together(identity: Identity) -> None:
    """Each table has rules for sockets; who has both may make those of both, and no others."""
    identity.needs_no_mounts()
    if landlock.abi() < landlock.KNOWS_PORTS:
        pytest.skip("this kernel's Landlock knows no ports")
    allowed = (LISTEN, "named(socket.AF_INET, socket.SOCK_STREAM)")
    refused = ("named(socket.AF_UNIX, socket.SOCK_STREAM)", "named(socket.AF_INET, socket.SOCK_DGRAM)")
    results = identity.attempt(identity.policy(devices=["/dev/full"], ports=[65000]), *allowed, *refused, before=BEFORE)

    for attempt in allowed:
        assert results[attempt].startswith("ok"), results
    for attempt in refused:
        assert "[Errno 1]" in results[attempt], results


def test_without_a_gpu_there_is_none_of_it(identity: Identity) -> None:
    identity.needs_no_mounts()
    results = identity.attempt(identity.policy(), NAME_OWN_THREAD, MAKE_MEMFD, LISTEN, *DRIVER_CALLS, before=BEFORE)

    for attempt in (NAME_OWN_THREAD, MAKE_MEMFD, LISTEN, *DRIVER_CALLS):
        assert "Error" in results[attempt], results
