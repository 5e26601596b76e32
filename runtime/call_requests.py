"""Requests that models send to other models."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import CODES, MoonpoolError, RemoteProtocolError
from moonpool.ipc.messages import ANY_MEMORY, DEVICE_MEMORY
from moonpool.runtime.details import check_finite
from moonpool.runtime.errors import BackendError, ModelError, ModelUnavailable
from moonpool.runtime.public_text import public_text
from moonpool.runtime.request import Details

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.link import Link
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.signature import Signature

_log = logging.getLogger("moonpool")
_MAX_MESSAGE = 65536
# Calls of one model whose inputs are being copied from a device.
_MOST_FETCHED = 64
# What most calls leave as it is, and then do not say.
_UNTOLD = ("", 0, 0, None, None, ANY_MEMORY, 0)


def make_call_request(
    hosted: HostedModel, fields: list[Any], inputs: Mapping[str, Any], asker: Link
) -> InferenceRequest:
    """The request of an INFER to this model. Raises `InvalidRequest`, `ModelError`."""
    _, _, model, _, decoupled, timeout_us, _, _, _, outputs, told = fields
    if hosted.model.config.decoupled and not decoupled:
        raise ModelError(
            f"Model {model} is using the decoupled. The current BLS request call doesn't support "
            "models using the decoupled transaction policy. Please use 'decoupled=True' argument "
            "to the 'exec' or 'async_exec' calls for decoupled models.'",
            "UNSUPPORTED",
        )
    details = None
    if told is not None or timeout_us:
        request_id, correlation_id, flags, parameters, trace, memory, device = told or _UNTOLD
        if memory == DEVICE_MEMORY:
            memory, device = _device_of(asker, device)
        check_finite(parameters or {})
        details = Details(
            request_id,
            correlation_id,
            flags,
            timeout_us,
            0,
            parameters,
            None,
            trace,
            memory,
            device,
        )
    # As in Triton, who asks for no output gets all.
    request = hosted.signature.request(inputs, outputs or None, details)
    request.wants_wire = True
    request.takes_devices = asker.may_have_lanes
    return request


def _device_of(asker: Link, number: int) -> tuple[int, int]:
    """The device that a model means; any memory where it means none that it sees, as what it says is a wish."""
    if asker.may_have_lanes:
        try:
            return DEVICE_MEMORY, asker.open_lanes().gpu_of(number)
        except RemoteProtocolError:
            pass
    return ANY_MEMORY, 0


class Fetching:
    """Copies inputs of calls that lie on devices to ordinary memory, on threads: whoever makes them may take any time."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(
        self,
        signature: Signature,
        inputs: Mapping[str, Any],
        go_on: Callable[[dict[str, Any] | MoonpoolError], None],
    ) -> None:
        """`go_on` gets the inputs, or why they cannot be had; on a thread, if there are not too many."""

        def fetch() -> None:
            try:
                fetched: dict[str, Any] | MoonpoolError = {
                    name: signature.fetched(value) for name, value in inputs.items()
                }
            except MoonpoolError as error:
                fetched = error
            except Exception as error:  # the stub waits for an answer, whatever went wrong
                _log.exception("inputs of a call were not copied")
                fetched = BackendError(f"the inputs cannot be copied from their device: {error!r}")
            self._running.discard(threading.current_thread())
            go_on(fetched)

        if len(self._running) >= _MOST_FETCHED:
            go_on(
                ModelUnavailable(f"{_MOST_FETCHED} requests of this model wait for its GPU already")
            )
            return
        thread = threading.Thread(target=fetch, name="moonpool-fetch", daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._running.discard(thread)
            go_on(ModelUnavailable(f"the inputs cannot be copied from their device: {error}"))


def wire_error(error: BaseException, most: int = _MAX_MESSAGE) -> list[object]:
    """An error as it is told to a model."""
    code = getattr(error, "code", "INTERNAL")
    # Another model is as foreign as a client.
    message = public_text(error)[:most].encode("utf-8", "replace").decode()
    return [CODES.index(code) if code in CODES else CODES.index("INTERNAL"), message]
