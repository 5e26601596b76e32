"""Forks the instances of a model: a template imports the model once and serves no request itself.

    runtime                                    template                         stub
    START (mode "template")         ──▶   import, perhaps initialize
                                    ◀──   LOADED
    FORK with descriptors           ──▶   fork                       ──▶   close the channels of the template
    a byte on one of them           ◀───────────────────────────────────   with the pid, which the kernel adds
    SANDBOX, REGION, REGION, START  ◀──────────────────────────────────▶   the handshake of any stub

Theory of operation. A fork has only the thread that forked. A lock that another thread held at that moment would stay
locked in the fork for ever. So a template has one thread, and none of what starts threads: no control thread, no thread
that reports denials, no threads of PyTorch, no mapped regions. Some libraries end their threads right before a fork.
`_quieten` forks once before LOADED, so that the runtime, which counts the threads, sees only those that would stay.

The template does not handle signals differently from a stub. It reaps only the forks that it made (`_reap`), because
other children belong to the model. The runtime learns of an end from the pidfd and asks for the exit code with REAP.
FORK goes before FINALIZE when both wait to be read: what was asked for first still happens.

In a fork nothing may go back to the loop of the template, so whatever raises there ends the process. A fork first
leaves the session and the channels of the template, so the template and its siblings are out of reach. Then it sends a
byte with its credentials, which the kernel fills in: the runtime believes that pid and no other. Metrics that the model
made in the template exist only on paper: `TemplateHost` records them, and every fork repeats them at its own host.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from select import POLLIN
from select import poll as new_poll
from typing import Any, Callable, NoReturn

import numpy as np

from moonpool.ipc.codec import compile_checks, control_codec, encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.policy import Policy
from moonpool.stub import output, trackers
from moonpool.stub.handshake import Handshake, shake_hands
from moonpool.stub.loader import LoadError
from moonpool.stub.model import Inherited, Model, import_class
from moonpool.stub.pb_utils import host, logger
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.host import Host
from moonpool.stub.sandbox import layers
from moonpool.stub.sandbox.denials import denials
from moonpool.stub.sandbox.identity import die_with
from moonpool.stub.sandbox.outcome import Applied

# Python's own: gevent's wait for an event of its loop, which nobody runs here.
_fork, _waitpid = os.fork, os.waitpid


class TemplateHost(Host):
    """Hosts a model in a template. Records what the model does to metrics, so that each fork can repeat it."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._metrics = 0

    def new_metric(
        self, name: str, description: str, kind: int, labels: Mapping[str, str] | None, buckets: Sequence[float] | None
    ) -> int:
        self._calls.append(("new_metric", (name, description, kind, labels, buckets)))
        # The runtime numbers the metrics of a stub in the same way.
        self._metrics += 1
        return self._metrics

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self._calls.append(("change_metric", (metric, operation, value)))

    def drop_metric(self, metric: int) -> None:
        self._calls.append(("drop_metric", (metric,)))

    def refusal(self, doing: str) -> TritonModelException:
        return TritonModelException(
            f"Failed to {doing}: a template process has no runtime to ask; set MOONPOOL_PREFORK to imports, or to no."
        )

    def repeat(self, other: Host) -> None:
        """Repeat the recorded calls at another host. Raises TritonModelException."""
        for method, arguments in self._calls:
            do: Callable[..., object] = getattr(other, method)
            do(*arguments)


class Template:
    """Runs a template. Everything happens on the only thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._codec = control_codec(Side.STUB)
        self._forks: set[int] = set()
        self._exit_codes: dict[int, int] = {}
        for fd, _, _ in handshake.announced.fds.values():
            os.close(fd)

    def run(self) -> tuple[Handshake, Inherited]:
        """Load the model and fork until FINALIZE, which ends the process. Returns only in forks, which serve then."""
        output.prepare()
        logger.set_levels(*self._handshake.start["log"])
        logger.set_sink(self._log)
        layers = self._handshake.start.get("layers", ())
        denials.watch(self._handshake.policy, layers)
        trackers.settle(self._handshake.policy, layers)
        inherited = self._load()
        self._send_denials()
        try:
            self._quieten()
            self._handshake.conversation.send(Kind.LOADED, self._facts())
            while True:
                handshake = self._next()
                if handshake is not None:
                    return handshake, inherited
        except PeerGone:
            os._exit(1)

    def _load(self) -> Inherited:
        start = self._handshake.start
        asked = TemplateHost()
        host.use(asked)
        try:
            model = Model(start, import_class(start))
            logger.adopt_logging()
            allow_threads = _compute_alone()
            if start["initializes"]:
                model.initialize()
        except LoadError as error:
            self._send_denials()
            self._handshake.fail(error.stage, str(error), error.traceback)
        return Inherited(model, partial(_catch_up, asked, allow_threads))

    def _send_denials(self) -> None:
        """Report the denials, without the thread that does it in other stubs."""
        packet = denials.take()
        if packet:
            self._handshake.control.send_waiting(packet)

    def _quieten(self) -> None:
        """Fork once, before which libraries end their threads, so that the runtime can count those that remain.

        Freezes all objects: forks share the pages, and a collection of garbage in each would write to all of them.
        """
        pid = _fork()
        if not pid:
            os._exit(0)
        _waitpid(pid, 0)
        compile_checks(Side.STUB)
        gc.collect()
        gc.freeze()

    def _facts(self) -> dict[str, object]:
        return {"pid": os.getpid(), "python": sys.version.split()[0], "numpy": np.__version__}

    def _log(self, level: int, message: str, file: str, line: int) -> None:
        packet = encode(*logger.log_message(level, message, file, line))
        self._handshake.control.send_waiting(packet)

    def _next(self) -> Handshake | None:
        """Wait for a message and handle it. Returns a handshake in a fork, None in the template."""
        work, control = self._handshake.conversation.channel, self._handshake.control
        poll = new_poll()
        poll.register(work.fileno(), POLLIN)
        poll.register(control.fileno(), POLLIN)
        # FORK on the control channel goes before FINALIZE on the work channel.
        if control.fileno() not in [fd for fd, _ in poll.poll()]:
            self._end()
        packet, fds = control.receive_with_fds()
        fields = self._codec.decode(packet)
        if fields[0] == Kind.FORK:
            return self._fork(fields[1], fds)
        if fields[0] == Kind.REAP:
            self._send_end(fields[1])
        elif fields[0] == Kind.LOGGING:
            logger.set_levels(*fields[1:])
        else:
            raise RemoteProtocolError(f"{Kind(fields[0]).name} is not for a template")
        return None

    def _end(self) -> NoReturn:
        # Without the model's `finalize`, which only instances call.
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
            pid = _fork()
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
        except BaseException:  # the fork must not go on as the template
            try:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _leave(self, parent_pid: int) -> None:
        """Leave the session, the channels and the log of the template, in a fork."""
        os.setsid()
        die_with(parent_pid)
        mine = self._handshake
        for channel in (mine.conversation.channel, mine.control, mine.calls):
            channel.close()
        logger.set_sink(None)

    def _become(self, name: str, fds: list[int], parent_pid: int) -> Handshake:
        """Become a process of its own, in a fork: leave the session, the channels and the output of the template."""
        work_fd, control_fd, calls_fd, output_fd, handshake_fd = fds
        self._leave(parent_pid)
        host.use(None)
        trackers.forget()
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        reseed()
        with socket.socket(fileno=handshake_fd) as handshake:
            handshake.send(b"\0")
        return shake_hands(name, work_fd, control_fd, calls_fd, apply=_confine)

    def _reap(self) -> None:
        """Reap the forks that have ended. Other children belong to the model."""
        for pid in self._forks.copy():
            self._wait_for(pid, os.WNOHANG)

    def _wait_for(self, pid: int, options: int) -> None:
        ended, status = _waitpid(pid, options)
        if ended:
            self._forks.discard(pid)
            self._exit_codes[pid] = os.waitstatus_to_exitcode(status)

    def _send_end(self, pid: int) -> None:
        if pid in self._forks:
            self._wait_for(pid, 0)
        code = self._exit_codes.pop(pid, 0)
        self._handshake.control.send_waiting(encode(Kind.EXITED, pid, code))


def _confine(policy: Policy) -> Applied:
    """Put on a fork only what it does not inherit from the template, whose layers the runtime has checked."""
    if not policy.is_contained:
        return layers.apply(policy)
    layers.tighten(policy)
    return Applied()


def _catch_up(asked: TemplateHost, allow_threads: Callable[[], object]) -> None:
    """Let libraries have threads again, and repeat at the host of this fork what the template's host recorded.

    Raises `LoadError`.
    """
    allow_threads()
    try:
        asked.repeat(host.current())
    except TritonModelException as error:
        raise LoadError("initialize", str(error)) from error


def _compute_alone() -> Callable[[], object]:
    """Keep PyTorch from starting threads, which forks would lack. Returns a function that allows them again."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _nothing
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    return partial(torch.set_num_threads, count)


def take_over(output_fd: int, variables: Mapping[str, str | None]) -> None:
    """Give a process that has waited for a model the output and the variables of its stub."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    for name, value in variables.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    # Something may have been installed since the process was started.
    importlib.invalidate_caches()
    reseed()


def reseed() -> None:
    """Give a fork its own random numbers. Python's `random` reseeds itself after a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))


def _nothing() -> None:
    """Allow nothing: PyTorch is not imported."""
