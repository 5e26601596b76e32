"""Forks the processes in which source runs. The template itself never sees any of it.

    runtime                                    template                     run
    START (mode "source")           ──▶   import numpy and this
                                    ◀──   LOADED
    FORK: a channel, two pipes      ──▶   fork                     ──▶   leave the template, put on the second filter
    a byte with the pid             ◀──────────────────────────────────
    source, inputs, files           ──────────────────────────────────▶   execute
    value, error, files             ◀──────────────────────────────────
    SIGKILL                         ──────────────────────────────────▶
    REAP                            ──▶   reap, empty the folders
                                    ◀──   EXITED

Theory of operation. A run must find nothing of the one before it. So runs of one template never exist at the same time,
and what a run sends or gets goes past the template, over descriptors of its own: the template's memory, of which each
run is a copy, has nothing of any run. A run has no descriptor of the template, of which a flag or an offset would be
shared. It starts no process and signals none but itself (`layers.tightening`), so when it has been killed and reaped,
nothing of it is left but files, which the template removes before it answers.

A template that cannot remove them ends, and everything else ends with it.

What a run costs is above all the memory that it writes to: the kernel copies each page at the first write, and Python
counts references to whatever it uses. So the template does what it can for all of its forks, once: it runs sources of
moonpool's own (`run.rehearse`), and frees memory. A fork uses few objects until it is confined. If nobody waits for it
then, it rehearses, too, and so has its pages before its source comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import sys
import threading
from typing import NoReturn

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import Kind
from moonpool.ipc.source.folders import empty
from moonpool.stub import output, trackers
from moonpool.stub.handshake import Handshake
from moonpool.stub.pb_utils import logger
from moonpool.stub.sandbox import layers
from moonpool.stub.sandbox.identity import die_with
from moonpool.stub.sandbox.mounts import LAYER, SHARED_MEMORY
from moonpool.stub.source import run
from moonpool.stub.template import Template, reseed

# The descriptors of a run, beside those of its input and output.
_CHANNEL_FD, _HANDSHAKE_FD, _FREE_FD = 3, 4, 5
# Higher than all of these.
_APART_FD = 16


class SourceTemplate(Template):
    """Runs the template. Everything happens on the only thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        super().__init__(handshake)
        policy = handshake.policy
        # A run starts no processes, and shares its folder with those that come after it.
        self._policy = policy.changed(forks=False, shares_scratch=True, syscalls=[])
        self._tighten = layers.tightening(self._policy)
        self._end_of_fds = os.sysconf("SC_OPEN_MAX")
        layers_on = handshake.start.get("layers", ())
        self._folders = [policy.scratch] if policy.scratch else []
        if LAYER in layers_on:
            self._folders.append(os.path.realpath(SHARED_MEMORY))

    def serve(self) -> NoReturn:
        """Fork until FINALIZE, which ends the process."""
        output.prepare()
        run.prepare()
        logger.set_levels(*self._handshake.start["log"])
        trackers.settle(self._policy, self._handshake.start.get("layers", ()))
        self._import(self._handshake.start["imports"])
        try:
            self._quieten()
            self._handshake.conversation.send(Kind.LOADED, self._facts())
            while True:
                self._next()
        except PeerGone:
            os._exit(1)

    def _import(self, names: list[str]) -> None:
        name = ""
        try:
            for name in names:
                __import__(name)
        except Exception as error:  # a module may raise anything
            self._handshake.fail("imports", f"{name} cannot be imported: {error!r:.1000}")

    def _quieten(self) -> None:
        """Do what each fork would have to do, and make the memory smaller that each has to map."""
        if self._folders:
            run.rehearse(run.REHEARSALS)
            self._empty()
        _forget_threads()
        super()._quieten()
        _trim()

    def _become(self, name: str, fds: list[int], parent_pid: int) -> NoReturn:  # noqa: ARG002
        """Become a process of its own, in a fork, and run what comes."""
        channel_fd, output_fd, error_fd, handshake_fd = fds
        os.setsid()
        die_with(parent_pid)
        os.dup2(output_fd, 1)
        os.dup2(error_fd, 2)
        # Apart first, as they may have each other's numbers.
        channel_fd = fcntl.fcntl(channel_fd, fcntl.F_DUPFD_CLOEXEC, _APART_FD)
        handshake_fd = fcntl.fcntl(handshake_fd, fcntl.F_DUPFD_CLOEXEC, _APART_FD)
        os.dup2(channel_fd, _CHANNEL_FD, inheritable=False)
        os.dup2(handshake_fd, _HANDSHAKE_FD, inheritable=False)
        # Of the template, too. Its objects for them stay as they are, as long as this process lives.
        os.closerange(_FREE_FD, self._end_of_fds)
        reseed()
        self._tighten()
        channel = Channel.of_descriptor(_CHANNEL_FD)
        os.write(_HANDSHAKE_FD, b"\0")
        os.close(_HANDSHAKE_FD)
        if not channel.wait_until(0):
            # Nobody waits. A run writes to some 200 pages for the first time, which is half of its time.
            run.rehearse()
        run.SourceRun().serve(channel)

    def _send_end(self, pid: int) -> None:
        """Reap a run, remove what it left in the folders, and say that it has ended."""
        if pid in self._forks:
            self._wait_for(pid, 0)
        self._empty()
        super()._send_end(pid)

    def _empty(self) -> None:
        try:
            for folder in self._folders:
                empty(folder)
        except OSError as error:
            sys.stderr.write(f"the folders of a run cannot be emptied: {error}\n")
            os._exit(1)


def _forget_threads() -> None:
    """Have `threading` do nothing in forks: the template has no thread that would be missing there.

    It costs a fork a third of the pages that it writes to until it runs something.
    """
    hook = getattr(threading, "_after_fork", None)
    if hook is not None:
        for hooks in gc.get_referrers(hook):
            if type(hooks) is list:
                hooks.remove(hook)


def _trim() -> None:
    """Give the kernel memory that the C library holds and nobody uses, if the library can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
