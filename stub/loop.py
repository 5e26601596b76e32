"""The life of a loaded stub: load the model, execute batch after batch, finalize."""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import Kind
from moonpool.stub import logger, output
from moonpool.stub.answer import Answer
from moonpool.stub.batch import Batch
from moonpool.stub.control import Control
from moonpool.stub.loader import LoadError
from moonpool.stub.model import load_model
from moonpool.stub.regions import Regions
from moonpool.stub.report import describe, traceback_of

if TYPE_CHECKING:
    from typing import Any

    from moonpool.stub.handshake import Handshake
    from moonpool.stub.model import Model

_EXECUTE = int(Kind.EXECUTE)
_ANSWER = int(Kind.ANSWER)
# How long an idle stub keeps memory that it grew by.
_KEEP_S = 5.0


class Stub:
    """One model instance. Everything here runs on the main thread of the process."""

    def __init__(self, handshake: Handshake) -> None:
        self._handshake = handshake
        self._conversation = handshake.conversation
        self._control = Control(handshake.control)
        self._regions = Regions(self._control.send)
        for region_id, (fd, size_bytes, writer) in handshake.announced.fds.items():
            self._regions.add_first(region_id, size_bytes, fd, writer)
        self._conversation.use_overflow(self._regions)
        self._control.listen(self._regions)
        self._batch = Batch(self._regions, handshake.start)
        self._answer = Answer(self._regions, self._batch, handshake.start)

    def run(self) -> None:
        """Load, serve until FINALIZE, and end the process."""
        start = self._handshake.start
        output.prepare()
        logger.set_sink(self._control.log)
        logger.set_verbose(bool(start.get("verbose")))
        try:
            model = load_model(start, self._regions)
        except LoadError as error:
            self._handshake.fail(error.stage, str(error), error.traceback)
        try:
            if start["mode"] == "complete":
                self._conversation.send(Kind.COMPLETED, json.dumps(model.complete()))
            else:
                self._conversation.send(Kind.LOADED, self._facts())
                self._serve(model)
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
        }

    def _serve(self, model: Model) -> None:
        receive, send = self._conversation.receive, self._conversation.send
        while True:
            if self._regions.arena.has_grown:
                self._wait_idle()
            message = receive()
            if message[0] != _EXECUTE:
                return
            send(_ANSWER, *self._execute(model, message))

    def _wait_idle(self) -> None:
        """Wait for work; while none comes, give back the memory that the stub grew by.

        Word of what is free again may come only now, and to another thread.
        """
        poll = select.poll()
        poll.register(self._conversation.channel.fileno(), select.POLLIN)
        while self._regions.arena.has_grown and not poll.poll(_KEEP_S * 1000):
            self._regions.retire_idle()

    def _execute(self, model: Model, message: list[Any]) -> tuple[object, ...]:
        batch, answer = self._batch, self._answer
        batch_id = message[1]
        if message[2]:
            self._regions.returned.extend(map(tuple, message[2]))
        requests = batch.open(message[3], message[4], message[5])
        try:
            responses = model.execute(requests)
        except BaseException as error:  # a model may raise anything, SystemExit included
            described = describe(error)
            message_text = model.failure(described)
            self._control.log(logger.ERROR, f"{message_text}\n{traceback_of(error)}", __file__, 0)
            answer.fail(len(requests), message_text)
        else:
            answer.take(requests, responses)
            del responses
        del requests
        held, released = batch.let_go()
        return (batch_id, held, released, *answer.give())

    def _finalize(self, model: Model) -> None:
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
