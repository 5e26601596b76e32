"""Sends requests to a model's replicas from any process of the cluster: arrays go in, and arrays come out.

A request ends in one of three ways. The replica answers, with outputs or with an error of the model or of moonpool.
Nobody takes the request: every replica is busy, none starts, the time is over. Or the replica dies while it has the
request. Nobody knows then whether the model has executed it, so it is sent to another replica only if the model says
that it may be executed twice: MOONPOOL_RETRY, which also counts for stubs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, Unpack

from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from moonpool.ipc.errors import MoonpoolError
from moonpool.ray.options import Traits
from moonpool.ray.replica import Failure, ModelAnswer
from moonpool.runtime.errors import (
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RequestTimedOut,
    SequenceLost,
)
from moonpool.runtime.model.request import Response
from moonpool.runtime.model.signature import RequestOptions

T = TypeVar("T")
_log = logging.getLogger("moonpool")
# For models that say that they are idempotent. The first replicas that are tried may all have been on a node that died.
_TRIES = 3


class ReplicaDied(ModelUnavailable):
    """The replica that had the request ended, with its node or by itself. The model may have executed it. Other
    replicas serve on.
    """


class ModelHandle:
    """Sends requests to one model. May be used by several tasks at the same time, in one event loop.

    handle = moonpool.ray.get("models", "scale")
    outputs = await handle.infer({"X": x})
    """

    def __init__(self, name: str, find: Callable[[], Awaitable[tuple[DeploymentHandle, Traits]]]) -> None:
        """`find` returns Ray's handle of the model's deployment; it is called once, before the first request."""
        self.name = name
        self._find = find
        self._found: tuple[DeploymentHandle, Traits] | None = None

    async def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> dict[str, NDArray[Any]]:
        """Send a request and wait for the outputs, by name.

        `inputs` and `options` are those of `moonpool.Runtime.infer`, except for memory and devices of this process.
        `timeout_s` covers everything, the wait for a replica included. Cancelling the task cancels the request in the
        replica. Large outputs may be read-only: they lie in Ray's memory. Raises what `Runtime.infer` raises, and
        `ReplicaDied`.
        """
        return (await self.request(inputs, version=version, timeout_s=timeout_s, **options)).outputs

    async def request(
        self,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Response:
        """Send a request as `infer` does, and return the whole response, with its parameters."""
        sequence = str(options.get("correlation_id") or "")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

        async def send(target: DeploymentHandle, left_s: float | None) -> Any:
            asked = self.name, dict(inputs), version, left_s, dict(options)
            return await target.infer.remote(asked, **_for_router(sequence))

        return _response(await self.call(send, sequence=sequence, deadline_s=deadline_s))

    async def stream(
        self,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        """Send a request, and iterate over the outputs of its responses: any number from a decoupled model, one from
        others.

        `timeout_s` covers everything up to the last response. Closing the iterator early cancels the request. Raises as
        `infer`. It is never sent a second time.
        """
        sequence = str(options.get("correlation_id") or "")
        target, _ = await self.routed()
        target = target.options(stream=True)
        asked = self.name, dict(inputs), version, timeout_s, dict(options)
        with translated(self.name, sequence=sequence):
            async with asyncio.timeout(timeout_s):
                async for answer in target.stream.remote(asked, **_for_router(sequence)):
                    yield _response(answer).outputs

    async def routed(self) -> tuple[DeploymentHandle, Traits]:
        """Return Ray's handle of the deployment, and the traits of the model. Raises `ModelNotFound`."""
        if self._found is None:
            target, traits = await self._find()
            if traits.is_packed:
                # Ray finds a replica that has the model already.
                target = target.options(multiplexed_model_id=self.name)
            self._found = target, traits
        return self._found

    async def call(
        self,
        send: Callable[[DeploymentHandle, float | None], Awaitable[T]],
        *,
        sequence: str = "",
        deadline_s: float | None = None,
    ) -> T:
        """Return what `send` returns for the deployment and the seconds that are left. Calls it again if the replica
        dies and the model is idempotent.

        Raises `ReplicaDied`, `SequenceLost`, `QueueFull`, `ModelUnavailable`, `RequestTimedOut`.
        """
        target, traits = await self.routed()
        tries = _TRIES if traits.is_idempotent and not sequence else 1
        with translated(self.name, sequence=sequence):
            async with asyncio.timeout_at(_in_loop(deadline_s)):
                while True:
                    tries -= 1
                    left_s = None if deadline_s is None else deadline_s - time.monotonic()
                    try:
                        return await send(target, left_s)
                    except RayActorError:
                        if not tries:
                            raise


def get(app: str, model: str) -> ModelHandle:
    """Return a handle of a model in an application, from any process of Ray's cluster.

    The first request raises `ModelNotFound` if the application has no such model.
    """

    async def find() -> tuple[DeploymentHandle, Traits]:
        try:
            ingress = await asyncio.to_thread(serve.get_app_handle, app)
        except RayServeException as error:
            raise ModelNotFound(f"there is no application '{app}': {error}") from None
        with translated(model):
            traits: Traits | None = await ingress.traits.remote(model)
        if traits is None:
            raise ModelNotFound(f"Request for unknown model: '{model}' is not found")
        return serve.get_deployment_handle(traits.deployment, app), traits

    return ModelHandle(model, find)


def _for_router(sequence: str) -> dict[str, str]:
    """Return the argument by which `SequenceRouter` chooses. Ray serializes each argument apart, so there is none
    without need.
    """
    return {"sequence": sequence} if sequence else {}


def _in_loop(deadline_s: float | None) -> float | None:
    """Return a moment of `time.monotonic` on the clock of the event loop."""
    if deadline_s is None:
        return None
    return asyncio.get_running_loop().time() + deadline_s - time.monotonic()


def _response(answer: ModelAnswer | Failure) -> Response:
    if isinstance(answer, Failure):
        raise answer.error()
    return Response(*answer)


@contextlib.contextmanager
def translated(model: str, *, sequence: str = "") -> Iterator[None]:
    """Raise errors of Ray as those of moonpool that say the same."""
    try:
        yield
    except RayActorError as error:
        # Its text has addresses and paths of the cluster.
        if sequence:
            raise SequenceLost(
                f"the replica of model '{model}' that had the sequence {sequence} ended: start the sequence again"
            ) from error
        raise ReplicaDied(f"the replica of model '{model}' that had the request ended") from error
    except BackPressureError:
        raise QueueFull from None
    except DeploymentUnavailableError:
        raise ModelUnavailable(f"no replica of model '{model}' could be started") from None
    except TimeoutError as error:
        if isinstance(error, MoonpoolError):
            raise
        raise RequestTimedOut(f"the request to model '{model}' took longer than its timeout") from None
    except RayError as error:
        # Something of Ray's or of moonpool's went wrong, which programs in the cluster may read, and clients may not.
        why = getattr(error, "cause", error)
        _log.error("the replica of model '%s' failed: %r", model, why, exc_info=error)
        failed = ModelError(f"the replica of model '{model}' failed: {why}")
        failed.public_message = "internal error"
        raise failed from error
