"""A loaded model as the loop drives it: Triton's class, or moonpool's own kind made to look like one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moonpool.ipc.messages import LARGEST_CONFIG
from moonpool.ipc.texts import size_of
from moonpool.stub import loader, logger, pb_utils
from moonpool.stub.errors import InvalidReturn
from moonpool.stub.execute import validate_execute_return
from moonpool.stub.loader import LoadError
from moonpool.stub.model_config import ModelConfig
from moonpool.stub.native import NativeAdapter, complete_config
from moonpool.stub.report import describe, traceback_of
from moonpool.stub.response import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from moonpool.stub.inherited import Inherited
    from moonpool.stub.regions import Regions
    from moonpool.stub.request import InferenceRequest


class Model:
    """The model's class and, when it serves, the one object of it."""

    def __init__(self, start: dict[str, Any], model_class: Any) -> None:
        self._class = model_class
        self._object: Any = None
        # What the model returns: see `responses`; or a coroutine that will. Raises what it raises.
        self.execute: Callable[[list[InferenceRequest]], object] = self._no_execute
        self.become(start)

    def become(self, start: dict[str, Any]) -> None:
        """Be this instance from now on: in a process that was forked from another."""
        self._start = start
        self._instance = start["instance"]
        self._is_decoupled: bool = start["decoupled"]
        self._reschedules: bool = start["reschedules"]
        if start["copies_gpu_to_numpy"]:
            from moonpool.stub.device_tensor import DeviceTensor

            DeviceTensor.copies_to_numpy = True

    @property
    def is_initialized(self) -> bool:
        """Whether there is the object."""
        return self._object is not None

    def initialize(self) -> None:
        """Make the object and call its `initialize`. Raises `LoadError`."""
        start = self._start
        try:
            if start["kind"] == "native":
                self._object = NativeAdapter(self._class, start["config"])
            else:
                self._object = self._class()
            if hasattr(self._object, "initialize"):
                self._object.initialize(start["args"])
        except BaseException as error:  # a model may raise anything, SystemExit included
            raise LoadError("initialize", describe(error), traceback_of(error)) from error
        self.execute = getattr(self._object, "execute", self._no_execute)

    def _no_execute(self, requests: list[InferenceRequest]) -> object:  # noqa: ARG002 - as execute
        raise InvalidReturn(
            f"Python model {self._start['file']} does not implement `execute` method."
        )

    def responses(
        self, returned: object, requests: list[InferenceRequest]
    ) -> list[InferenceResponse | None]:
        """What was returned as one response for each request, None where it comes otherwise.

        Raises `InvalidReturn`.
        """
        if type(returned) is list and len(returned) == len(requests) and not self._is_decoupled:
            for response, request in zip(returned, requests):
                if (
                    type(response) is not InferenceResponse
                    or request._release_flags
                    or request._reply is not None
                ):
                    break
            else:
                return returned
        return self._validated(returned, requests)

    def _validated(
        self, returned: object, requests: list[InferenceRequest]
    ) -> list[InferenceResponse | None]:
        """As `responses`, where there is more to it than a response to each request."""
        if type(returned) is not list and isinstance(returned, list):
            returned = list(returned)  # its methods are the model's
        validate_execute_return(
            returned,
            requests,
            self._instance,
            decoupled=self._is_decoupled,
            reschedules=self._reschedules,
        )
        if returned is None:
            return [None] * len(requests)
        return returned  # type: ignore[return-value]

    @property
    def is_ready(self) -> Callable[[], object] | None:
        """The model's own function of that name, if it has one."""
        return getattr(self._object, "is_ready", None)

    def failure(self, described: str) -> str:
        """What each client of a batch is told when `execute` raised."""
        return (
            f"Failed to process the request(s) for model '{self._instance}', message: {described}"
        )

    def complete(self) -> str:
        """The configuration as the model completes it, in JSON. Raises `LoadError`."""
        config: dict[str, Any] = self._start["config"]
        try:
            if self._start["kind"] == "native":
                completed = complete_config(self._class, ModelConfig(json.dumps(config))).as_dict()
            else:
                completed = self._auto_complete(config)
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

    def finalize(self) -> None:
        """Call the model's `finalize`, if it has one. Raises what that raises."""
        if hasattr(self._object, "finalize"):
            self._object.finalize()


def load_model(start: dict[str, Any], regions: Regions, inherited: Inherited | None) -> Model:
    """Import the model and, unless it is only to complete its configuration, initialize it.

    What was inherited from a template is not done again. Raises `LoadError` with the stage, the text for the
    client and the traceback for the log.
    """
    pb_utils.use_memory(regions)
    if inherited is None:
        model = Model(start, import_class(start))
    else:
        model = inherited.model
        model.become(start)
        inherited.catch_up()
    logger.adopt_logging()
    if start["mode"] == "serve" and not model.is_initialized:
        model.initialize()
        # The libraries that the model imported may have brought `logging` with them only now.
        logger.adopt_logging()
    return model


def import_class(start: dict[str, Any]) -> Any:
    """The class of the model, or the function that is one. Raises `LoadError`."""
    if start["kind"] == "native":
        return loader.load_native(start["file"], start["class_name"])
    return loader.load_triton(
        start["file"], start["version_dir"], start["model_dir"], start["backend_dir"]
    )
