"""Forks stubs that have not begun: a blank template has numpy and the stub's modules, and has never run code of a
model.

    runtime                                    template                          stub
                                    ◀──   ["", file of numpy], or [why it cannot fork, ""]
    name, variables, 4 descriptors  ──▶   fork                        ──▶   leave the template's session and channel
                                    ◀──   the pid, or minus an errno
    SANDBOX, REGION, REGION, START  ◀──────────────────────────────────▶   the handshake of any stub

Theory of operation. A fork is to be what a process that the runtime started would be, only sooner. So it is a child of
the runtime and not of the template (CLONE_PARENT): the runtime can wait for it, the kernel ends it with the runtime,
and the end of the template does not touch it. `os.fork` cannot do that. `_fork_beside` makes the system call itself,
with the functions that `os.fork` calls before and after. It lacks what the C library does in its `fork`, of which three
things matter. The library keeps the number of the thread, so the kernel writes the new one to the same place. The
kernel forgets where a process lists the robust locks that it holds, which others get when it dies, so a fork says it
again. And libraries may have asked to be called at a fork, as OpenBLAS does, to end its threads: `quieten` forks once
in the ordinary way, after which they have none. A template that still has another thread, or does not know these places
(`_Places`), says so, and is not used.

In a fork nothing may go back to the loop of the template, so whatever raises there ends the process. The packets
between runtime and template are few and short, and both ends are moonpool's own code; a model never has this channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import threading
import traceback

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import compile_checks
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.messages import Side
from moonpool.stub import loop as loop  # imported here, so that forks need not
from moonpool.stub.sandbox.identity import die_with
from moonpool.stub.sandbox.kernel import NUMBERS
from moonpool.stub.template import take_over

# Loaded here, so that forks need not.
if is_wanted():
    load_if_there("moonpool.stub.peers._stub_calls")

_TITLE = b"triton_python_backend_stub"
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x00200000, 0x01000000
_FLAGS = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
_PR_GET_TID_ADDRESS = 40
# Where /proc/self/stat has the addresses of the command line, counted from the field after the name.
_ARGUMENTS = slice(45, 47)
# Holds the interpreter's lock during the call: a fork must not begin by waiting for it.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class CannotFork(Exception):
    """Says why this process is no good as a template."""


def fork_for(channel_fd: int, parent_pid: int) -> tuple[str, list[int]]:
    """Fork for the runtime until it closes the channel, which ends the process.

    Returns only in forks: the name, and the descriptors of the work, control and calls channels.
    """
    channel = Channel.of_descriptor(channel_fd)
    folder = os.getcwd()
    try:
        quieten()
        places = _Places()
        channel.send_waiting(json.dumps(["", np.__file__]).encode())
        while True:
            packet, fds = channel.receive_with_fds()
            try:
                pid = _fork_beside(places)
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                name, variables = json.loads(packet)
                return _become(name, variables, fds, parent_pid, folder, channel)
            channel.send_waiting(b"%d" % pid)
            for fd in fds:
                os.close(fd)
    except CannotFork as error:
        channel.send_waiting(json.dumps([str(error), ""]).encode())
    except PeerGone:
        pass
    os._exit(0)


def quieten() -> None:
    """Get rid of threads before the first fork. Raises `CannotFork`.

    Freezes all objects: forks share the pages, and a collection of garbage in each would write to all of them.
    `boot.py` has switched the collector off until now, which saves the start some milliseconds.
    """
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise CannotFork(f"it has {len(threads)} threads, and only one would be in a fork")
    compile_checks(Side.STUB)
    gc.freeze()
    gc.enable()


class _Places:
    """Knows where the C library keeps what a fork needs. Raises `CannotFork` if that cannot be found out."""

    def __init__(self) -> None:
        address, head, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        if not {"clone", "get_robust_list", "set_robust_list"} <= NUMBERS.keys():
            raise CannotFork("the system calls of this machine are not known")
        if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0):
            raise CannotFork("the kernel does not say where the number of a thread lies")
        number = address.value
        if not number or ctypes.c_int.from_address(number).value != os.getpid():
            raise CannotFork("the C library keeps the number of a thread elsewhere")
        # The number of the thread.
        self.number: int = number
        # The list of robust locks and its size; nowhere, if the library keeps none.
        asked = (ctypes.c_long(0), ctypes.byref(head), ctypes.byref(size))
        if _libc.syscall(ctypes.c_long(NUMBERS["get_robust_list"]), *asked):
            raise CannotFork("the kernel does not say where the locks of a thread are listed")
        words = (NUMBERS["set_robust_list"], head.value or 0, size.value)
        self.set_locks = [ctypes.c_ulong(word) for word in words]


def _fork_beside(places: _Places) -> int:
    """Fork like `os.fork`, but make the child a child of this process's parent. Raises OSError."""
    # The last two arguments are in another order on some machines. The other one is not looked at.
    words = (NUMBERS["clone"], _FLAGS, 0, 0, places.number, places.number)
    arguments = [ctypes.c_ulong(word) for word in words]
    call, python = _libc.syscall, ctypes.pythonapi
    after_in_child, after_in_parent = python.PyOS_AfterFork_Child, python.PyOS_AfterFork_Parent
    python.PyOS_BeforeFork()
    # Nothing but the call itself: the interpreter holds locks now.
    pid: int = call(*arguments)
    if pid == 0:
        after_in_child()
        call(*places.set_locks)
        return 0
    after_in_parent()
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def _become(
    name: str, variables: dict[str, str | None], fds: list[int], parent_pid: int, folder: str, channel: Channel
) -> tuple[str, list[int]]:
    """Become a process of its own, in a fork: leave the session, the channel and the output of the template."""
    try:
        os.setsid()
        die_with(parent_pid)
        channel.close()
        *fds, output_fd = fds
        # The folder may have been made anew since the template was started.
        os.chdir(folder)
        take_over(output_fd, variables)
        with contextlib.suppress(AttributeError):
            # The interpreter keeps the kernel's number of the thread as it was in the template.
            threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError, IndexError):
            rename(name)
        return name, fds
    except BaseException:  # the fork must not go on as the template
        try:
            traceback.print_exc()
        finally:
            os._exit(1)


def rename(name: str) -> None:
    """Write the command line of a stub with this name over the one of the template, in the same memory."""
    with open("/proc/self/stat", "rb") as file:
        begin, end = map(int, file.read().rpartition(b")")[2].split()[_ARGUMENTS])
    with open("/proc/self/cmdline", "rb") as file:
        program = file.read().split(b"\0")[:2]
    line = b"\0".join([*program, _TITLE, name.encode()])
    size = end - begin
    if size > 0:
        ctypes.memmove(begin, line[: size - 1].ljust(size, b"\0"), size)
