"""The life of a loaded stub: load the model, execute batch after batch, finalize."""

from __future__ import annotations

import atexit
import gc
import os
import select
import sys
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.ipc.messages import MAX_PLACES_IN_PACKET, Kind
from moonpool.stub import host, logger, output
from moonpool.stub.answer import Answer
from moonpool.stub.batch import Batch
from moonpool.stub.calls import Calls
from moonpool.stub.control import Control
from moonpool.stub.coroutines import Coroutines
from moonpool.stub.execute import RELEASE_RESCHEDULE
from moonpool.stub.forks import Door
from moonpool.stub.loader import LoadError
from moonpool.stub.model import load_model
from moonpool.stub.placement import Placer
from moonpool.stub.readiness import Readiness
from moonpool.stub.regions import Regions
from moonpool.stub.report import describe, traceback_of
from moonpool.stub.responses import Responses
from moonpool.stub.stub_host import StubHost

if TYPE_CHECKING:
    from typing import Any

    from moonpool.stub.handshake import Handshake
    from moonpool.stub.model import Model
    from moonpool.stub.request import InferenceRequest

_EXECUTE = int(Kind.EXECUTE)
_ANSWER = int(Kind.ANSWER)
# How long an idle stub keeps memory that it grew by, and how often it looks whether the model has let
# go of requests that it answered later.
_KEEP_S = 5.0
_LOOK_S = 0.25


class Stub:
    """One model instance. Everything here runs on the main thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        # Before the control channel may tell of others.
        logger.set_levels(*handshake.start["log"])
        self._handshake = handshake
        self._conversation = handshake.conversation
        self._control = Control(handshake.control)
        self._regions = Regions(self._control.send)
        for region_id, (fd, size_bytes, writer) in handshake.announced.fds.items():
            self._regions.add_first(region_id, size_bytes, fd, writer)
        self._conversation.use_overflow(self._regions)
        placer = Placer(self._regions, handshake.start)
        self._responses = Responses(placer, self._control, handshake.start)
        self._batch = Batch(self._regions, self._responses, handshake.start)
        self._answer = Answer(placer, self._batch)
        self._coroutines = Coroutines(handshake.start["concurrent_batches"])
        # The batch that is executing, for the control thread; and the cancellations that overtook theirs.
        self._executing: tuple[int, list[InferenceRequest]] = (0, [])
        self._cancelled: set[tuple[int, int]] = set()
        self._readiness = Readiness(
            handshake.start["instance"], self._control.send, self._coroutines.wait_for
        )
        self._control.listen(self._regions, self._cancel, self._readiness.ask)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._calls = Calls(handshake.calls, self._regions)
        self._host = StubHost(
            self._calls,
            self._regions,
            self._control,
            handshake.start["instance"],
        )
        host.use(self._host)
        Door(self._calls.disown)

    def run(self) -> None:
        """Load, serve until FINALIZE, and end the process."""
        start = self._handshake.start
        output.prepare()
        logger.set_sink(self._control.log)
        try:
            model = load_model(start, self._regions)
        except LoadError as error:
            self._handshake.fail(error.stage, str(error), error.traceback)
        try:
            if start["mode"] == "complete":
                self._conversation.send(Kind.COMPLETED, model.complete())
            else:
                self._readiness.check = model.is_ready
                self._conversation.send(Kind.LOADED, self._facts())
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
            "layers": ",".join(self._handshake.layers),
            "has_is_ready": self._readiness.check is not None,
        }

    def _serve(self, model: Model) -> None:
        receive, send = self._conversation.receive, self._conversation.send
        calls = self._calls
        while True:
            if self._regions.arena.has_grown or self._batch.kept or self._responses.are_open:
                self._wait_idle()
            message = receive()
            if message[0] != _EXECUTE:
                return
            answer = self._execute(model, message)
            if self._responses.is_forked:
                sys.stderr.write(
                    "A process that the model forked came back from execute and ends.\n"
                )
                os._exit(1)
            send(_ANSWER, *answer)
            if calls.let_go:
                calls.tidy()

    def _wait_idle(self) -> None:
        """Wait for work; while none comes, give back memory: what the stub grew by, and requests.

        Word of what is free again may come only now, and to another thread. What the model dropped may
        be in a cycle, to which an idle process would not come by itself.
        """
        poll = select.poll()
        poll.register(self._conversation.channel.fileno(), select.POLLIN)
        idle_s = 0.0
        while self._regions.arena.has_grown or self._batch.kept or self._responses.are_open:
            wait_s = _LOOK_S if self._batch.kept or self._responses.are_open else _KEEP_S
            if poll.poll(wait_s * 1000):
                return
            if idle_s == 0.0:
                gc.collect(1)  # the young ones: the others may take long
            elif idle_s < _KEEP_S <= idle_s + wait_s:
                gc.collect()
            idle_s += wait_s
            while places := self._batch.let_go_late(MAX_PLACES_IN_PACKET):
                self._control.send(Kind.RELEASE, places)
            if idle_s >= _KEEP_S:
                self._regions.retire_idle()

    def _leave_to_parent(self) -> None:
        """In a process that the model forked: the runtime speaks with the one process only."""
        self._responses.is_forked = True

    def _execute(self, model: Model, message: list[Any]) -> tuple[object, ...]:
        batch, answer = self._batch, self._answer
        _, batch_id, released, blocks, layout, details = message
        if released:
            self._regions.returned.extend(map(tuple, released))
        requests = batch.open(batch_id, blocks, layout, details)
        self._executing = (batch_id, requests)
        if self._cancelled:
            self._cancel_early(batch_id, requests)
        try:
            # Of its list, as of everything else that it is given, a model may make what it likes.
            returned = model.execute(requests[:])
            if type(returned) is CoroutineType:
                self._start(model, returned, requests)
            else:
                answer.take(requests, model.responses(returned, requests))
            del returned
        except BaseException as error:  # a model may raise anything, SystemExit included
            answer.fail(requests, self._report(model, error))
        self._executing = (batch_id, [])
        del requests
        self._control.metric_changes.flush()
        held, released = batch.let_go()
        return (batch_id, held, released, *answer.give())

    def _report(self, model: Model, error: BaseException) -> str:
        """What the clients of a batch are told; the log gets the traceback as well."""
        message = model.failure(describe(error))
        self._control.log(logger.ERROR, f"{message}\n{traceback_of(error)}", __file__, 0)
        return message

    # Coroutines

    def _start(
        self,
        model: Model,
        coroutine: CoroutineType[Any, Any, object],
        requests: list[InferenceRequest],
    ) -> None:
        """Let the responses come when a coroutine of the model has ended."""
        for request in requests:
            request.reply()
        self._coroutines.start(coroutine, partial(self._ended, model, requests[:]))
        self._answer.leave_open(requests)

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

    # Cancellation

    def _cancel(self, batch_id: int, index: int) -> None:
        """Nobody waits for a request any more. On the control thread."""
        executing, requests = self._executing
        if batch_id > executing:
            self._cancelled.add((batch_id, index))  # the word of it overtook the request
            executing, requests = self._executing
        if batch_id == executing and index < len(requests):
            requests[index]._cancelled = True
        reply = self._responses.find(batch_id, index)
        if reply is not None:
            reply.is_cancelled = True

    def _cancel_early(self, batch_id: int, requests: list[InferenceRequest]) -> None:
        for index, request in enumerate(requests):
            if (batch_id, index) in self._cancelled:
                request._cancelled = True
        self._cancelled -= {each for each in list(self._cancelled) if each[0] <= batch_id}

    def _finalize(self, model: Model) -> None:
        self._coroutines.stop()
        if self._handshake.start["mode"] == "serve":
            message = traceback = ""
            try:
                model.finalize()
            except BaseException as error:
                message, traceback = describe(error), traceback_of(error)
        else:
            self._conversation.receive()
            message = traceback = ""
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        self._conversation.send(Kind.FINALIZED, message, traceback)
        # Not sys.exit: threads that the model left behind would keep the process.
        os._exit(0)
