"""Runs a stub from START to its end: loads the model, executes batch after batch, finalizes.

Theory of operation. The model runs on the main thread, which alone uses the work channel. That channel is lockstep:
after EXECUTE the runtime sends nothing on it until ANSWER, so the main thread needs no other thread to receive for it.
The control thread (`peers/control.py`) handles all that may come at any time: regions, cancellations, log
levels. Other threads start only when they are needed.

Order of messages. Responses that are sent before `execute` returns go on the control channel before ANSWER goes on the
work channel, and the runtime accepts them in any order. Changes of metrics go before the response that they belong to:
`Control.respond` and `_execute` flush them first. All references to the requests of a batch are dropped before
`Peer.give` looks which input blocks the model kept; a local variable that names a request would make its blocks look
kept.

If the process has several objects of the model (`ModelThreads`), each executes on a thread of its own, and the main
thread only hands batches over.

Signals. A handler of the model's may run between any two bytecodes of the main thread, and may raise. An exception
inside `model.execute` becomes the error of the batch. SIGINT does nothing (`output.py`): the runtime ends a stub, not
the terminal. SIGTERM writes the stacks of all threads and lets the process go on. If a client has cut its memory short,
the stub sends itself SIGBUS, as the kernel would do a moment later: the runtime then knows that the model is not to
blame.

Order of closing. FINALIZE comes on the work channel after all batches. The loop of the coroutines stops first, so
that none answers while the model finalizes. Then come `finalize`, the functions that libraries have for the end of a
program, the output, the denials of the sandbox, and the wait for devices, whose events would go with the process.
FINALIZED is the last message. The process ends with `os._exit`, since threads that the model left behind would keep
it. If the runtime is gone (`PeerGone`), nobody waits for any of this, and the process ends at once.

A process that the model forked shares the channels with this one but must not use them. `os.register_at_fork` takes
them from it (`Peer.leave_to_parent`, `Calls.disown`), and `hosts/forks.py` gives it another way to ask.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from functools import partial
from types import CoroutineType
from typing import Any, NoReturn

import numpy as np

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.ipc.slots import SlotChannel, take
from moonpool.stub import output, trackers
from moonpool.stub.coroutines import Coroutines
from moonpool.stub.handshake import Handshake
from moonpool.stub.hosts.calls import Calls
from moonpool.stub.hosts.forks import ForkBroker
from moonpool.stub.hosts.runtime_host import StubHost
from moonpool.stub.loader import LoadError
from moonpool.stub.model import Inherited, Model, ModelThreads, Readiness, load_model
from moonpool.stub.native.model import NativeAdapter
from moonpool.stub.pb_utils import host, logger
from moonpool.stub.pb_utils.memory import use_memory
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.peers.answer import Answer
from moonpool.stub.peers.peer import Peer
from moonpool.stub.peers.regions import CutShort
from moonpool.stub.report import describe, in_one_line, traceback_of
from moonpool.stub.sandbox.denials import denials

_EXECUTE = int(Kind.EXECUTE)
# What answers a call of the model's `sleep` or `wake`.
_ANSWERS = {int(Kind.SLEEP): Kind.SLEPT, int(Kind.WAKE): Kind.WOKEN}


class Stub:
    """Serves one model instance. Its methods run on the main thread, but for those that say otherwise."""

    # None if this process has one object of the model.
    _objects: ModelThreads | None = None

    def __init__(self, handshake: Handshake, inherited: Inherited | None = None) -> None:
        # Before the control thread may change them.
        logger.set_levels(*handshake.start["log"])
        self._handshake = handshake
        self._inherited = inherited
        start = handshake.start
        self._peer = peer = Peer(handshake.conversation, handshake.control, start)
        for region_id, (fd, size_bytes, writer) in handshake.announced.fds.items():
            peer.regions.add_first(region_id, size_bytes, fd, writer)
        self._coroutines: Coroutines
        self._readiness: Readiness
        self._prepare(start)
        peer.control.listen(peer.regions, peer.cancel, self._handle)
        os.register_at_fork(after_in_child=peer.leave_to_parent)
        denials.watch(handshake.policy, start.get("layers", ()))
        trackers.settle(handshake.policy, start.get("layers", ()))
        os.register_at_fork(after_in_child=denials.disown, after_in_parent=denials.hear_forks)
        self._calls = Calls(handshake.calls, peer.regions)
        self._host = StubHost(self._calls, peer.regions, peer.control, start["instance"], is_compiled=start["compiled"])
        host.use(self._host)
        ForkBroker(self._calls.disown)

    def _prepare(self, start: dict[str, Any]) -> None:
        self._coroutines = Coroutines(start["concurrent_batches"])
        send, wait_for = self._peer.control.send, self._coroutines.wait_for
        self._readiness = Readiness(start["instance"], send, wait_for)

    def _handle(self, fields: list[Any]) -> None:
        """Handle a message that is neither about requests nor about memory. On the control thread."""
        kind = fields[0]
        if kind == Kind.READY:
            self._readiness.ask(fields[1])
        elif kind == Kind.LOGGING:
            logger.set_levels(*fields[1:])
        else:
            raise RemoteProtocolError(f"{Kind(kind).name} came after the handshake")

    def run(self) -> None:
        """Load, serve until FINALIZE, and end the process."""
        start = self._handshake.start
        output.prepare()
        logger.set_sink(self._peer.control.log)
        denials.tell(self._peer.control.send_packet)
        try:
            use_memory(self._peer.regions)
            model = load_model(start, self._inherited)
        except LoadError as error:
            self._fail(error)
        denials.flush()
        try:
            if start["mode"] != "complete" or self._complete(model):
                self._gather(model)
                slots = self._take_slots()
                facts = {**self._facts(model), "slots": slots is not None}
                self._peer.conversation.send(Kind.LOADED, facts)
                if slots is not None:
                    self._peer.use(slots)
                self._host.serves = True
                self._serve(model)
                self._host.serves = False
            self._finalize(model)
        except LoadError as error:
            self._fail(error)
        except PeerGone:
            os._exit(1)

    def _gather(self, model: Model) -> None:
        """Initialize the other objects that this process has, if it has some. Raises `LoadError`."""
        count = self._handshake.start["objects"]
        self._readiness.check = model.is_ready
        if count > 1:
            self._objects = ModelThreads([model, *(model.another(number) for number in range(1, count))])
            if model.is_ready is not None:
                self._readiness.check = partial(self._objects.why_not_ready, self._ask_readiness)

    def _ask_readiness(self, model: Model) -> object:
        """Return the answer of one object's `is_ready`. On a thread that nobody else waits for."""
        answer = None if model.is_ready is None else model.is_ready()
        return self._coroutines.wait_for(answer) if isinstance(answer, CoroutineType) else answer

    def _complete(self, model: Model) -> bool:
        """Send the completed configuration. Returns True if another START came, and the model is an instance now."""
        conversation = self._peer.conversation
        conversation.send(Kind.COMPLETED, model.complete(), not model.completes_itself)
        message = conversation.receive()
        if message[0] != Kind.START:
            return False
        start = self._handshake.start = json.loads(message[1])
        self._peer.become(start)
        self._prepare(start)
        model.become(start)
        model.initialize()
        denials.flush()
        return True

    def _fail(self, error: LoadError) -> NoReturn:
        # A denial may explain the error.
        denials.flush()
        self._handshake.fail(error.stage, str(error), error.traceback)

    def _take_slots(self) -> SlotChannel | None:
        """Return the work channel in memory that the runtime has offered, None if the socket goes on."""
        start, fds = self._handshake.start, self._handshake.announced.slots
        return take(fds, start["look_us"]) if fds else None

    def _facts(self, model: Model) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "has_is_ready": self._readiness.check is not None,
            "can_sleep": model.can_sleep,
        }

    def _serve(self, model: Model) -> None:
        """Execute batch after batch, until FINALIZE."""
        peer = self._peer
        regions, arena = peer.regions, peer.regions.arena
        batch, responses = peer.batch, peer.responses
        native = None if self._objects is not None else model.native
        while True:
            # The same condition as `Peer.needs_care`, without a call for each batch.
            if arena.has_grown or batch.kept or responses.replies or regions.devices is not None:
                peer.care()
            packet = peer.port.receive()
            if native is not None and self._execute_stacked(model, native, peer, packet):
                continue
            message = self._execute(model, peer, packet)
            if message is None:
                continue
            if message[0] not in _ANSWERS:
                return
            self._sleep_or_wake(model, message[0])

    def _sleep_or_wake(self, model: Model, kind: int) -> None:
        """Call the model's `sleep` or `wake`, of all objects, and answer."""
        message = traceback = ""
        try:
            for each in [model] if self._objects is None else self._objects.models:
                returned = each.sleep() if kind == Kind.SLEEP else each.wake()
                if isinstance(returned, CoroutineType):
                    self._coroutines.wait_for(returned)
        except BaseException as error:  # a model may raise anything, SystemExit included
            # An empty text would say that it went well.
            message, traceback = describe(error) or type(error).__name__, traceback_of(error)
        self._prepare_answer()
        denials.flush()
        self._peer.conversation.send(_ANSWERS[kind], message, traceback)

    def _execute(self, model: Model, peer: Peer, packet: bytes) -> list[Any] | None:
        """Execute a batch, and answer. Returns any other message, and None after a batch."""
        port, answer = peer.port, peer.answer
        requests = port.open(packet)
        if requests is None:
            message = peer.conversation.accept(packet)
            if message[0] != _EXECUTE:
                return message
            requests = self._open(peer, message)
            del message
        try:
            if self._objects is None:
                # A copy: the model may change the list that it gets.
                returned = model.execute(requests[:])
                if not port.take(requests, returned):
                    self._take(model, answer, requests, returned)
                del returned
            else:
                self._hand_over(self._objects, answer, requests)
        except BaseException as error:  # a model may raise anything, SystemExit included
            answer.fail(requests, self._report(model, error))
        del requests
        self._answer(peer)
        return None

    def _execute_stacked(self, model: Model, native: NativeAdapter, peer: Peer, packet: bytes) -> bool:
        """Execute a batch of one of moonpool's own models, and answer.

        Returns False, and has done nothing, for a batch whose rows do not lie one after another, and for any other
        message.
        """
        port, answer = peer.port, peer.answer
        arrays = port.open_stacked(packet, native.is_batched)
        if arrays is None:
            return False
        try:
            outputs = native.call(arrays, sum(port.counts) if native.is_batched else None)
            if not port.take_stacked(outputs):
                answer.take(port.requests(), native.split(outputs, port.counts))
            del outputs
        except BaseException as error:  # a model may raise anything, SystemExit included
            answer.fail(port.requests(), self._report(model, error))
        del arrays
        self._answer(peer)
        return True

    def _answer(self, peer: Peer) -> None:
        """Answer the batch of whose objects nothing else of ours is left."""
        self._prepare_answer()
        if not peer.port.give():
            peer.send(peer.give())
        if peer.batch.lent:
            peer.batch.renew()
        if self._calls.released:
            self._calls.tidy()

    def _open(self, peer: Peer, message: list[Any]) -> list[InferenceRequest]:
        try:
            return peer.open(message)
        except CutShort:
            # If the client had cut its memory a moment later, the kernel would have sent SIGBUS, which the runtime
            # understands.
            signal.raise_signal(signal.SIGBUS)
            raise

    def _take(self, model: Model, answer: Answer, requests: list[InferenceRequest], returned: object) -> None:
        """Take what the model has returned: its responses, or a coroutine that will answer."""
        if type(returned) is CoroutineType:
            self._start(model, answer, returned, requests)
        else:
            answer.take(requests, model.responses(returned, requests))

    def _prepare_answer(self) -> None:
        """Do what comes before an answer. Ends a process that the model forked."""
        control = self._peer.control
        if control.metric_changes.are_made:
            control.metric_changes.flush()
        if self._peer.responses.is_forked:
            sys.stderr.write("A process that the model forked came back from the model and ends.\n")
            os._exit(1)

    def _report(self, model: Model, error: BaseException) -> str:
        """Log an error, with its traceback if that is wanted. Returns the text for the clients of the batch."""
        message = model.failure(describe(error))
        if self._handshake.start["brief_errors"]:
            text, file, line = in_one_line(error)
            self._peer.control.log(logger.ERROR, model.failure(text), file, line)
            return message
        self._peer.control.log(logger.ERROR, f"{message}\n{traceback_of(error)}", __file__, 0)
        return message

    # Responses that come later

    def _hand_over(self, objects: ModelThreads, answer: Answer, requests: list[InferenceRequest]) -> None:
        """Leave the requests open until an object of the model has executed them."""
        for request in requests:
            request.reply()
        given = requests[:]
        objects.start(given, lambda model, returned, error: self._ended(model, given, returned, error))
        answer.leave_open(requests)

    def _start(
        self, model: Model, answer: Answer, coroutine: CoroutineType[Any, Any, object], requests: list[InferenceRequest]
    ) -> None:
        """Leave the requests open until a coroutine of the model has ended."""
        for request in requests:
            request.reply()
        self._coroutines.start(coroutine, partial(self._ended, model, requests[:]))
        answer.leave_open(requests)

    def _ended(
        self, model: Model, requests: list[InferenceRequest], returned: object, error: BaseException | None
    ) -> None:
        """Answer the requests that are still open. On the thread of the coroutines, or of an object."""
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
        message = traceback = ""
        if self._handshake.start["mode"] == "serve":
            if self._objects is not None:
                self._objects.finish()
            for each in [model] if self._objects is None else self._objects.models:
                failure = each.finalize()
                if failure is not None:
                    message, traceback = describe(failure), traceback_of(failure)
        _call_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
        denials.flush()
        self._peer.finish()
        self._peer.conversation.send(Kind.FINALIZED, message, traceback)
        # Not `sys.exit`, which would wait for threads that the model left behind.
        os._exit(0)


def _call_exit_functions() -> None:
    """Call the functions that libraries have registered for the end of the program, in Python's order.

    Pools of processes tell their workers to end before `multiprocessing` waits for these. Nobody waits for the threads
    of pools: they may be at work for ever.
    """
    waits = getattr(sys.modules.get("concurrent.futures.thread"), "_python_exit", None)
    # `atexit` begins with the last ones. A model that has no threads has not imported the module.
    for act in getattr(sys.modules.get("threading"), "_threading_atexits", []):
        if waits is None or getattr(act, "func", None) is not waits:
            atexit.register(act)
    atexit._run_exitfuncs()
