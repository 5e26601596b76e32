"""Drives a loaded model, of Triton's kind or moonpool's own: calls it, checks what it returns, asks if it is ready.

Theory of operation. A `Model` belongs to the main thread. `Readiness` starts a thread for each READY of the runtime,
because `is_ready` may block, and neither batches nor the control thread may wait for it. If `is_ready` is a coroutine
function, that thread waits while the coroutine runs where the model's others run. A thread still busy at the end of the
process ends with it.

`ModelThreads` has several objects of the model. The main thread receives a batch as always, hands it to an object that
is idle, and answers that the responses come later. So it can take the next batch at once. `_idle` has the objects
without a batch; the main thread waits there when all have one, and so reads no further EXECUTE. The thread of an object
executes the batch, lines up again behind the others, and calls `done`, which answers the requests. So batches that come
one after the other reach all objects in turn. An object is initialized and finalized on the main thread, and executes
on its own thread only, so it needs no lock of its own. If a batch cannot be answered, as when memory runs out, nobody
would ever answer its requests, so the process ends (`threads.start`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from queue import SimpleQueue
from types import CoroutineType
from typing import Any, NamedTuple

from moonpool.ipc.messages import LARGEST_CONFIG, SHORT, Kind, beginning, size_of
from moonpool.stub import loader, threads
from moonpool.stub.loader import LoadError
from moonpool.stub.native.model import NativeAdapter, complete_config
from moonpool.stub.native.signature import methods_of
from moonpool.stub.pb_utils import logger
from moonpool.stub.pb_utils.config import ModelConfig
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.report import describe, traceback_of

Execute = Callable[["list[InferenceRequest]"], object]


class Model:
    """Holds the model's class and, once it is initialized, the one object of it."""

    def __init__(self, start: dict[str, Any], model_class: Any) -> None:
        self._class = model_class
        self._object: Any = None
        # Returns what `responses` takes, or a coroutine for it. Raises what the model raises.
        self.execute: Execute = self._no_execute
        self.become(start)

    def become(self, start: dict[str, Any]) -> None:
        """Serve as the instance of this START. Called again in a fork, and in a process that has completed the
        configuration.
        """
        self._start = start
        self._instance = start["instance"]
        self._is_decoupled: bool = start["decoupled"]
        self._reschedules: bool = start["reschedules"]
        if start["copies_gpu_to_numpy"]:
            from moonpool.stub.pb_utils.device_tensor import DeviceTensor

            DeviceTensor.copies_to_numpy = True

    def another(self, number: int) -> Model:
        """Make and initialize another object of the class in this process. Raises `LoadError`."""
        name = f"{self._instance}.{number}"
        arguments = {**self._start["args"], "model_instance_name": name}
        model = Model({**self._start, "instance": name, "args": arguments}, self._class)
        model.initialize()
        return model

    @property
    def is_initialized(self) -> bool:
        """Return whether the object exists."""
        return self._object is not None

    def initialize(self) -> None:
        """Make the object and call its `initialize`. Raises `LoadError`."""
        start = self._start
        try:
            rendering = _rendering(start["chat_template"])
            if start["kind"] != "native":
                self._object = self._class()
            elif methods_of(self._class):
                from moonpool.stub.openai.adapter import OpenAIAdapter  # most models do without

                self._object = OpenAIAdapter(self._class, start["config"])
            else:
                self._object = NativeAdapter(self._class, start["config"])
            if hasattr(self._object, "initialize"):
                self._object.initialize(start["args"])
        except LoadError:
            raise
        except BaseException as error:  # a model may raise anything, SystemExit included
            raise LoadError("initialize", describe(error), traceback_of(error)) from error
        self.execute = rendering(getattr(self._object, "execute", self._no_execute))
        # `initialize` may have imported libraries, and these `logging`.
        logger.adopt_logging()

    @property
    def native(self) -> NativeAdapter | None:
        """Return the adapter of one of moonpool's own models that needs nothing but the rows of a batch."""
        adapter = self._object
        return adapter if isinstance(adapter, NativeAdapter) and adapter.sees_rows_only else None

    def _no_execute(self, requests: list[InferenceRequest]) -> object:  # noqa: ARG002 - as execute
        raise InvalidReturn(f"Python model {self._start['file']} does not implement `execute` method.")

    def responses(self, returned: object, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        """Return one response for each request, None for requests that the model answers in another way.

        Raises `InvalidReturn`.
        """
        if type(returned) is list and len(returned) == len(requests) and not self._is_decoupled:
            for response, request in zip(returned, requests):
                if type(response) is not InferenceResponse or request._release_flags or request._reply is not None:
                    break
            else:
                return returned
        return self._validated(returned, requests)

    def _validated(self, returned: object, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        """Do the same as `responses` for all but the plain case of one response to each request."""
        if type(returned) is not list and isinstance(returned, list):
            returned = list(returned)  # a subclass may have methods of the model's
        validate_execute_return(
            returned, requests, self._instance, decoupled=self._is_decoupled, reschedules=self._reschedules
        )
        if returned is None:
            return [None] * len(requests)
        return returned  # type: ignore[return-value]

    @property
    def is_ready(self) -> Callable[[], object] | None:
        """Return the model's `is_ready`, if it has one."""
        return getattr(self._object, "is_ready", None)

    @property
    def can_sleep(self) -> bool:
        """Return whether the model's class has both `sleep` and `wake`. One of them alone is no hook: it may be
        something else.
        """
        found = type(self._hooked)
        return all(callable(getattr(found, name, None)) for name in ("sleep", "wake"))

    def sleep(self) -> object:
        """Call the model's `sleep`. It may return a coroutine. Raises what the model raises."""
        return self._hooked.sleep()

    def wake(self) -> object:
        """Call the model's `wake`. It may return a coroutine. Raises what the model raises."""
        return self._hooked.wake()

    @property
    def _hooked(self) -> Any:
        if self._start["kind"] == "native":
            return self._object.model_object
        return self._object

    def failure(self, described: str) -> str:
        """Return the error text for the clients of a batch in which `execute` raised."""
        return f"Failed to process the request(s) for model '{self._instance}', message: {described}"

    @property
    def completes_itself(self) -> bool:
        """Return whether `complete` runs code of the model, which may leave something behind in the process."""
        return self._start["kind"] != "native" and hasattr(self._class, "auto_complete_config")

    def complete(self) -> str:
        """Return the configuration as the model completes it, in JSON. Raises `LoadError`."""
        config: dict[str, Any] = self._start["config"]
        try:
            if self._start["kind"] != "native":
                completed = self._auto_complete(config)
            elif methods_of(self._class):
                from moonpool.stub.openai import adapter  # most models do without

                given = ModelConfig(json.dumps(config))
                completed = adapter.complete_config(self._class, given).as_dict()
            else:
                completed = complete_config(self._class, ModelConfig(json.dumps(config))).as_dict()
            text = json.dumps(completed)
            if size_of(text) > LARGEST_CONFIG:
                raise ValueError(
                    f"the completed configuration has {size_of(text)} bytes, and {LARGEST_CONFIG} is the most"
                )
            return text
        except LoadError:
            raise
        except BaseException as error:
            raise LoadError("auto_complete_config", describe(error), traceback_of(error)) from error

    def _auto_complete(self, config: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._class, "auto_complete_config"):
            return config
        completed = self._class.auto_complete_config(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise LoadError(
                "auto_complete_config",
                f"auto_complete_config function in model '{config.get('name')}' must return a valid "
                "pb.ModelConfig object.",
            )
        result: dict[str, Any] = completed.as_dict()
        return result

    def finalize(self) -> BaseException | None:
        """Call the model's `finalize`, if it has one. Returns what the model raises."""
        try:
            if hasattr(self._object, "finalize"):
                self._object.finalize()
        except BaseException as error:  # a model may raise anything, SystemExit included
            return error
        return None


def _rendering(texts: Sequence[str] | None) -> Callable[[Execute], Execute]:
    """Return what puts a model's chat template before its `execute`. Raises `LoadError`."""
    if texts is None:
        return lambda execute: execute
    from moonpool.stub.openai.templates import BadTemplate, ChatTemplate  # most models do without

    try:
        return ChatTemplate(*texts).before
    except BadTemplate as error:
        raise LoadError("chat template", str(error)) from None


# What `done` gets: the object that had the batch, what it has returned, and what it has raised.
Done = Callable[[Model, object, "BaseException | None"], None]
_Batch = tuple["list[InferenceRequest]", Done]


class ModelThreads:
    """Runs several objects of the model, each on a thread of its own. For the main thread."""

    def __init__(self, models: Sequence[Model]) -> None:
        """Take models that are initialized, and start their threads. Raises RuntimeError if there can be no thread."""
        self.models = list(models)
        self._idle: SimpleQueue[SimpleQueue[_Batch]] = SimpleQueue()
        for number, model in enumerate(self.models):
            batches: SimpleQueue[_Batch] = SimpleQueue()
            threads.start(partial(self._work, model, batches), f"moonpool-instance-{number}")
            self._idle.put(batches)

    def start(self, requests: list[InferenceRequest], done: Done) -> None:
        """Let an object execute a batch, and then call `done` on its thread. Blocks while all objects have one."""
        self._idle.get().put((requests, done))

    def finish(self) -> None:
        """Wait until no object has a batch, and start none any more. A batch may have no caller left, but its model is
        not finalized inside it.

        The runtime ends a process that takes too long.
        """
        for _ in self.models:
            self._idle.get()

    def _work(self, model: Model, batches: SimpleQueue[_Batch]) -> None:
        while True:
            requests, done = batches.get()
            returned: object = None
            failure: BaseException | None = None
            try:
                # A copy: the model may change the list that it gets.
                returned = model.execute(requests[:])
                if type(returned) is CoroutineType:
                    returned.close()
                    raise InvalidReturn(
                        "execute must not be a coroutine where MOONPOOL_INSTANCES_PER_PROCESS is above 1"
                    )
            except BaseException as error:  # a model may raise anything, SystemExit included
                failure = error
            # Before the answer. Somebody who asks again after it finds all objects in their order.
            self._idle.put(batches)
            done(model, returned, failure)
            # The inputs of a batch are free when nothing names its requests.
            del requests, done, returned, failure

    def why_not_ready(self, check: Callable[[Model], object]) -> object:
        """Ask each object by `check`. Returns the first answer that is not True, else True."""
        for model in self.models:
            answer = check(model)
            if answer is not True:
                return answer
        return True


class Inherited(NamedTuple):
    """Holds a model that a template has imported and, perhaps, initialized."""

    model: Model
    # Does in the fork what the template could not do. Raises `LoadError`.
    catch_up: Callable[[], None]


def load_model(start: dict[str, Any], inherited: Inherited | None) -> Model:
    """Import the model and, unless START asks only for its configuration, initialize it.

    Skips what a template has done already. Raises `LoadError` with the stage, the text for the client and the traceback
    for the log.
    """
    if inherited is None:
        model = Model(start, import_class(start))
    else:
        model = inherited.model
        model.become(start)
        inherited.catch_up()
    logger.adopt_logging()
    if start["mode"] == "serve" and not model.is_initialized:
        model.initialize()
    return model


def import_class(start: dict[str, Any]) -> Any:
    """Load the class of the model, or the function that is one. Raises `LoadError`."""
    if start["kind"] == "native":
        return loader.load_native(start["file"], start["class_name"])
    return loader.load_triton(start["file"], start["version_dir"], start["model_dir"], start["backend_dir"])


def validate_execute_return(
    returned: object, requests: Sequence[InferenceRequest], instance_name: str, *, decoupled: bool, reschedules: bool
) -> None:
    """Raise InvalidReturn, with Triton's texts, unless `returned` is a valid answer to `requests`.

    None is valid, for all requests or for one of them: the model answers in another way.
    """
    if decoupled:
        if returned is not None:
            raise InvalidReturn(
                f"Python model '{instance_name}' is using the decoupled mode and the execute function must return None."
            )
    elif returned is not None:
        _validate_list(returned, requests)
    if not reschedules and any(r._release_flags == RELEASE_RESCHEDULE for r in requests):
        raise InvalidReturn(
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is "
            "not configured to handle such a flag."
        )


def _validate_list(returned: object, requests: Sequence[InferenceRequest]) -> None:
    if not isinstance(returned, list):
        raise InvalidReturn(f"Expected a list in the execute return, found type '{type(returned)}'.")
    if len(returned) != len(requests):
        raise InvalidReturn(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
            f"size is:{len(returned)}\n"
        )
    for response, request in zip(returned, requests):
        _validate_entry(response, request)


def _validate_entry(response: object, request: InferenceRequest) -> None:
    rescheduled = request._release_flags == RELEASE_RESCHEDULE
    if response is None:
        return
    if rescheduled:
        raise InvalidReturn(
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
    if not isinstance(response, InferenceResponse):
        raise InvalidReturn(
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
    reply = request._reply
    if reply is not None and (reply.count or reply.is_closed):
        raise InvalidReturn("Unable to send response. Non-decoupled model cannot send more than one response.")


class Readiness:
    """Asks a model's `is_ready` on its own thread, so that nothing else waits for the model."""

    def __init__(
        self, instance: str, send: Callable[..., None], wait_for: Callable[[Coroutine[Any, Any, object]], object]
    ) -> None:
        """Take `send`, which sends a control message, and `wait_for`, which runs a coroutine beside the model's
        others.
        """
        self._instance = instance
        self._send = send
        self._wait_for = wait_for
        # The model's function, if it has one.
        self.check: Callable[[], object] | None = None

    def ask(self, question: int) -> None:
        """Begin to answer a question of the runtime. READINESS follows later."""
        try:
            threads.start(partial(self._answer, question), "moonpool-ready")
        except RuntimeError as error:  # the stub's own limit: the runtime hears why
            self._send(Kind.READINESS, question, self._refusal(error))

    def _answer(self, question: int) -> None:
        self._send(Kind.READINESS, question, self.why_not())

    def why_not(self) -> str | None:
        """Ask the model and wait. Returns None if it is ready, else the reason."""
        if self.check is None:
            return None
        try:
            is_ready = self.check()
            if isinstance(is_ready, CoroutineType):
                is_ready = self._wait_for(is_ready)
        except BaseException as error:  # a model may raise anything, SystemExit included
            return self._refusal(error)
        if not isinstance(is_ready, bool):
            return "is_ready() must return a boolean value"
        if not is_ready:
            return f"Model '{self._instance}' is not ready (user-defined check failed)."
        return None

    def _refusal(self, error: BaseException) -> str:
        text = f"Model '{self._instance}' is not ready: {describe(error)}"
        return beginning(text, SHORT)
