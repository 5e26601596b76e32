"""The life of a loaded stub: load the model, execute batch after batch, finalize."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.stub import host, logger, output, pb_utils
from moonpool.stub.calls import Calls
from moonpool.stub.coroutines import Coroutines
from moonpool.stub.execute import RELEASE_RESCHEDULE
from moonpool.stub.forks import Door
from moonpool.stub.lent_region import CutShort
from moonpool.stub.loader import LoadError
from moonpool.stub.model import load_model
from moonpool.stub.peer import Peer
from moonpool.stub.peers import Peers
from moonpool.stub.readiness import Readiness
from moonpool.stub.report import describe, traceback_of
from moonpool.stub.stub_host import StubHost

if TYPE_CHECKING:
    from typing import Any

    from moonpool.stub.answer import Answer
    from moonpool.stub.handshake import Handshake
    from moonpool.stub.model import Model
    from moonpool.stub.request import InferenceRequest

_EXECUTE = int(Kind.EXECUTE)


class Stub:
    """One model instance. Everything here runs on the main thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        # Before the control channel may tell of others.
        logger.set_levels(*handshake.start["log"])
        self._handshake = handshake
        start = handshake.start
        self._main = main = Peer(handshake.conversation, handshake.control, start, is_main=True)
        for region_id, (fd, size_bytes, writer) in handshake.announced.fds.items():
            main.regions.add_first(region_id, size_bytes, fd, writer)
        self._peers = Peers(main, start)
        self._coroutines = Coroutines(start["concurrent_batches"])
        self._readiness = Readiness(start["instance"], main.control.send, self._coroutines.wait_for)
        main.control.listen(main.regions, main.cancel, self._handle)
        os.register_at_fork(after_in_child=self._peers.leave_to_parent)
        self._calls = Calls(handshake.calls, main.regions)
        self._host = StubHost(self._calls, main.regions, main.control, start["instance"])
        host.use(self._host)
        Door(self._calls.disown)

    def _handle(self, fields: list[Any], fds: list[int]) -> None:
        """What the runtime says beside requests and memory. On the control thread."""
        kind = fields[0]
        if kind == Kind.READY:
            self._readiness.ask(fields[1])
        elif kind == Kind.LOGGING:
            logger.set_levels(*fields[1:])
        elif kind == Kind.PEER and self._handshake.start["shared"]:
            self._peers.add(*fds)
        else:
            raise RemoteProtocolError(f"{Kind(kind).name} came after the handshake")

    def run(self) -> None:
        """Load, serve until FINALIZE, and end the process."""
        start = self._handshake.start
        output.prepare()
        logger.set_sink(self._main.control.log)
        try:
            model = load_model(start, self._main.regions, self._handshake.inherited)
        except LoadError as error:
            self._handshake.fail(error.stage, str(error), error.traceback)
        try:
            if start["mode"] == "complete":
                self._main.conversation.send(Kind.COMPLETED, model.complete())
            else:
                self._readiness.check = model.is_ready
                self._main.conversation.send(Kind.LOADED, self._facts())
                self._host.serves = True
                self._serve(model)
                self._host.serves = False
            self._finalize(model)
        except LoadError as error:
            self._handshake.fail(error.stage, str(error), error.traceback)
        except PeerGone:
            os._exit(1)

    def _facts(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "has_is_ready": self._readiness.check is not None,
        }

    def _serve(self, model: Model) -> None:
        """Execute batch after batch, until FINALIZE."""
        peer, peers = self._main, self._peers
        if self._handshake.start["shared"]:
            while all(self._serve_one(model, each) for each in peers.ready()):
                pass
            return
        receive, regions, arena = peer.conversation.receive, peer.regions, peer.regions.arena
        batch, responses = peer.batch, peer.responses
        while True:
            # As `Peer.needs_care` has it, without a call for each batch.
            if arena.has_grown or batch.kept or responses.replies or regions.devices is not None:
                peers.ready()
            message = receive()
            if message[0] != _EXECUTE:
                return
            self._execute(model, peer, message)

    def _serve_one(self, model: Model, peer: Peer) -> bool:
        """Execute the batch that a peer has sent; False after FINALIZE."""
        try:
            message = peer.conversation.receive()
            if message[0] == _EXECUTE:
                pb_utils.use_memory(peer.regions)
                if self._handshake.start["tells_begin"]:
                    peer.control.send(Kind.BEGUN, message[1])
                self._execute(model, peer, message)
            elif not peer.is_main:
                raise RemoteProtocolError("FINALIZE is not for a front end to say")
        except MoonpoolError as error:
            if peer.is_main:
                raise
            self._peers.drop(peer, error)
            return True
        return bool(message[0] == _EXECUTE)

    def _execute(self, model: Model, peer: Peer, message: list[Any]) -> None:
        """Execute a batch, and answer."""
        answer = peer.answer
        try:
            requests = peer.open(message)
        except CutShort:
            # Had the client cut its memory a moment later, the kernel would have sent this. The runtime knows its meaning.
            signal.raise_signal(signal.SIGBUS)
            raise
        try:
            # Of its list, as of everything else that it is given, a model may make what it likes.
            returned = model.execute(requests[:])
            if type(returned) is CoroutineType:
                self._start(model, answer, returned, requests)
            else:
                answer.take(requests, model.responses(returned, requests))
            del returned
        except BaseException as error:  # a model may raise anything, SystemExit included
            answer.fail(requests, self._report(model, error))
        del requests
        if self._main.control.metric_changes.are_made:
            self._main.control.metric_changes.flush()
        fields = peer.give()
        if peer.responses.is_forked:
            sys.stderr.write("A process that the model forked came back from execute and ends.\n")
            os._exit(1)
        peer.conversation.send(*fields)
        if self._calls.let_go:
            self._calls.tidy()

    def _report(self, model: Model, error: BaseException) -> str:
        """What the clients of a batch are told; the log gets the traceback as well."""
        message = model.failure(describe(error))
        self._main.control.log(logger.ERROR, f"{message}\n{traceback_of(error)}", __file__, 0)
        return message

    # Coroutines

    def _start(
        self,
        model: Model,
        answer: Answer,
        coroutine: CoroutineType[Any, Any, object],
        requests: list[InferenceRequest],
    ) -> None:
        """Let the responses come when a coroutine of the model has ended."""
        for request in requests:
            request.reply()
        self._coroutines.start(coroutine, partial(self._ended, model, requests[:]))
        answer.leave_open(requests)

    def _ended(
        self,
        model: Model,
        requests: list[InferenceRequest],
        returned: object,
        error: BaseException | None,
    ) -> None:
        """On the thread of the coroutines: answer what is not answered yet."""
        try:
            responses = [] if error else model.responses(returned, requests)
        except MoonpoolError as invalid:
            error = invalid
        if error is not None:
            message = self._report(model, error)
            for request in requests:
                request.reply().fail(message)
            return
        for request, response in zip(requests, responses):
            if response is not None:
                request.reply().finish(response)
            elif request._release_flags == RELEASE_RESCHEDULE:
                request.reply().reschedule()

    def _finalize(self, model: Model) -> None:
        self._coroutines.stop()
        if self._handshake.start["mode"] == "serve":
            message = traceback = ""
            try:
                model.finalize()
            except BaseException as error:
                message, traceback = describe(error), traceback_of(error)
        else:
            self._main.conversation.receive()
            message = traceback = ""
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        self._peers.finish()
        self._main.conversation.send(Kind.FINALIZED, message, traceback)
        # Not sys.exit: threads that the model left behind would keep the process.
        os._exit(0)
