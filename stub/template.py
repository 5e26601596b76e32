"""A process that is no instance of its model, but has it imported, and forks the instances when it is asked to.

    runtime                                    template                         stub
    START (mode "template")         ──▶   import, perhaps initialize
                                    ◀──   LOADED
    FORK with descriptors           ──▶   fork                       ──▶   leave what is the template's
    a byte on one of them           ◀───────────────────────────────────   and the kernel's word for its pid
    SANDBOX, REGION, REGION, START  ◀──────────────────────────────────▶   the handshake of any stub

It has one thread, whose every fork is safe: no lock is held by a thread that the fork does not have. So it has none of
what makes a stub: it maps no region, and serves no request.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import traceback
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.codec import compile_checks, control_codec, encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.texts import beginning, end
from moonpool.stub import forked_libraries, host, logger, output
from moonpool.stub.boot import die_with_parent
from moonpool.stub.handshake import shake_hands
from moonpool.stub.inherited import Inherited, TemplateHost
from moonpool.stub.loader import LoadError
from moonpool.stub.model import Model, import_class
from moonpool.stub.sandbox import layers
from moonpool.stub.sandbox.applied import Applied

if TYPE_CHECKING:
    from typing import NoReturn

    from moonpool.ipc.policy import Policy
    from moonpool.stub.handshake import Handshake

# Both fit into a packet.
_LOGGED_BYTES, _FILE_BYTES = 8192, 1024


class Template:
    """The life of a template. Everything here runs on the only thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._codec = control_codec(Side.STUB)
        self._forks: set[int] = set()
        self._exit_codes: dict[int, int] = {}
        for fd, _, _ in handshake.announced.fds.values():
            os.close(fd)

    def run(self) -> Handshake:
        """Load the model and fork until FINALIZE, which ends the process. Returns in each fork, as it is to go on."""
        output.prepare()
        logger.set_levels(*self._handshake.start["log"])
        logger.set_sink(self._log)
        inherited = self._load()
        try:
            self._quieten()
            self._handshake.conversation.send(Kind.LOADED, self._facts())
            while True:
                handshake = self._next()
                if handshake is not None:
                    handshake.inherited = inherited
                    return handshake
        except PeerGone:
            os._exit(1)

    def _load(self) -> Inherited:
        start = self._handshake.start
        asked = TemplateHost()
        host.use(asked)
        try:
            model = Model(start, import_class(start))
            logger.adopt_logging()
            allow_threads = forked_libraries.compute_alone()
            if start["initializes"]:
                model.initialize()
                logger.adopt_logging()
        except LoadError as error:
            self._handshake.fail(error.stage, str(error), error.traceback)
        return Inherited(model, asked, allow_threads)

    def _quieten(self) -> None:
        """Let libraries end the threads that they end before a fork, so that those which remain can be counted.

        What is there now is shared: a collection of garbage is not to write to all of it, in every fork.
        """
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        compile_checks(Side.STUB)
        gc.collect()
        gc.freeze()

    def _facts(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "numpy": np.__version__,
        }

    def _log(self, level: int, message: str, file: str, line: int) -> None:
        text, where = beginning(message, _LOGGED_BYTES), end(file, _FILE_BYTES)
        self._handshake.control.send_waiting(encode(Kind.LOG, level, text, where, line))

    def _next(self) -> Handshake | None:
        """Wait for something to do, and do it; a handshake in a fork."""
        work, control = self._handshake.conversation.channel, self._handshake.control
        poll = select.poll()
        poll.register(work.fileno(), select.POLLIN)
        poll.register(control.fileno(), select.POLLIN)
        # What the runtime wants forked goes before its end.
        if control.fileno() not in [fd for fd, _ in poll.poll()]:
            self._end()
        packet, fds = control.receive_with_fds()
        fields = self._codec.decode(packet)
        if fields[0] == Kind.FORK:
            return self._fork(fields[1], fds)
        if fields[0] == Kind.REAP:
            self._tell_end(fields[1])
        elif fields[0] == Kind.LOGGING:
            logger.set_levels(*fields[1:])
        else:
            raise RemoteProtocolError(f"{Kind(fields[0]).name} is not for a template")
        return None

    def _end(self) -> NoReturn:
        # The model's `finalize` is for its instances.
        self._handshake.conversation.receive()
        sys.stdout.flush()
        sys.stderr.flush()
        self._handshake.conversation.send(Kind.FINALIZED, "", "")
        os._exit(0)

    # Forks

    def _fork(self, name: str, fds: list[int]) -> Handshake | None:
        self._reap()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._log(logger.ERROR, f"{name} cannot be forked: {error.strerror}", __file__, 0)
            pid = -1
        if pid:
            for fd in fds:
                os.close(fd)
            if pid > 0:
                self._forks.add(pid)
                self._exit_codes.pop(pid, None)
            return None
        try:
            return self._become(name, fds, parent_pid)
        except BaseException:  # it must not go on as the template
            try:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _become(self, name: str, fds: list[int], parent_pid: int) -> Handshake:
        """In a fork: be a process of its own."""
        work_fd, control_fd, calls_fd, output_fd, birth_fd = fds
        os.setsid()
        die_with_parent(parent_pid)
        mine = self._handshake
        for channel in (mine.conversation.channel, mine.control, mine.calls):
            channel.close()
        logger.set_sink(None)
        host.use(None)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        forked_libraries.reseed()
        with socket.socket(fileno=birth_fd) as birth:
            birth.send(b"\0")
        return shake_hands(name, work_fd, control_fd, calls_fd, apply=_confine)

    def _reap(self) -> None:
        """Reap the forks that have ended. No other children: they are the model's."""
        for pid in self._forks.copy():
            self._wait_for(pid, os.WNOHANG)

    def _wait_for(self, pid: int, options: int) -> None:
        ended, status = os.waitpid(pid, options)
        if ended:
            self._forks.discard(pid)
            self._exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def _tell_end(self, pid: int) -> None:
        if pid in self._forks:
            self._wait_for(pid, 0)
        code = self._exit_codes.pop(pid, 0)
        self._handshake.control.send_waiting(encode(Kind.EXITED, pid, code))


def _confine(policy: Policy) -> Applied:
    """In a fork, where the layers of the template hold, which the runtime knows."""
    if not policy.is_contained:
        return layers.apply(policy)
    layers.tighten(policy)
    return Applied()
