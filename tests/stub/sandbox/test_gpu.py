"""What a process may do that was given the device nodes of a GPU, tried with a device that every machine has."""

from __future__ import annotations

import pytest
from tests.stub.sandbox.children import Identity

from moonpool.stub.sandbox import landlock

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)

BEFORE = """
import fcntl, os, _thread
def control(request):
    with open("/dev/full", "rb") as device:
        fcntl.ioctl(device, request, b"")
"""
# As libc's pthread_setname_np does it.
NAME_OWN_THREAD = (
    "os.write(os.open(f'/proc/self/task/{_thread.get_native_id()}/comm', os.O_RDWR), b'cuda')"
)
MAKE_MEMFD = "os.memfd_create('cuda')"
# NV_ESC_CARD_INFO, UVM_INITIALIZE, UVM_RUN_TEST
DRIVER_CALLS = ("control(0xC90046C8)", "control(0x30000001)", "control(9)")
# TIOCSTI, FS_IOC_SETFLAGS
OTHER_CALLS = ("control(0x5412)", "control(0x40086602)")


def test_the_driver_of_a_gpu_can_work(identity: Identity) -> None:
    identity.needs_no_mounts()
    results = identity.attempt(
        identity.policy(devices=["/dev/full"]),
        NAME_OWN_THREAD,
        MAKE_MEMFD,
        *DRIVER_CALLS,
        before=BEFORE,
    )

    assert results[NAME_OWN_THREAD] == "ok 4"
    assert results[MAKE_MEMFD].startswith("ok")
    # The device does not know them; what the sandbox refuses is EPERM or EACCES.
    for call in DRIVER_CALLS:
        assert "[Errno 25]" in results[call], results


def test_a_gpu_opens_nothing_else(identity: Identity) -> None:
    identity.needs_no_mounts()
    others = (
        "open('/proc/self/oom_score_adj', 'w')",
        "open(f'/proc/self/task/{_thread.get_native_id()}/oom_score_adj', 'w')",
        "open(f'/proc/{os.getppid()}/comm', 'w')",
    )
    results = identity.attempt(
        identity.policy(devices=["/dev/full"]), *others, *OTHER_CALLS, before=BEFORE
    )

    for attempt in (*others, *OTHER_CALLS):
        assert "Error" in results[attempt], results


def test_without_a_gpu_there_is_none_of_it(identity: Identity) -> None:
    identity.needs_no_mounts()
    results = identity.attempt(
        identity.policy(), NAME_OWN_THREAD, MAKE_MEMFD, *DRIVER_CALLS, before=BEFORE
    )

    for attempt in (NAME_OWN_THREAD, MAKE_MEMFD, *DRIVER_CALLS):
        assert "Error" in results[attempt], results
