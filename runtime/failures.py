"""What callers are told where an instance broke, ended or never started."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import BackendError, ExecuteTimedOut, LoadFailed, ModelUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.scheduler import Scheduler

# The process or the machine has no descriptor, memory or process left.
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))


def is_shortage(error: BaseException) -> bool:
    """True if something could not be done for want of descriptors, memory or processes. No model is to blame for that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _SHORTAGES:
            return True
        cause = cause.__cause__
    return False


# The beginning of the error for a model whose file is missing.
_NO_MODEL_FILE = "Python model file not found in "


def missing_file_line(error: BaseException) -> str | None:
    """Return the line that Triton's stub logs if the file of a model is missing; None for other errors."""
    text = str(error)
    return (
        f"Failed to preinitialize Python stub: {text}" if text.startswith(_NO_MODEL_FILE) else None
    )


def tell_callers(
    scheduler: Scheduler,
    options: ModelOptions,
    instance: ModelInstance,
    requests: Sequence[InferenceRequest],
    reason: MoonpoolError,
) -> None:
    """An instance is gone: what it had fails with this reason, or is queued again where it may be."""
    scheduler.outcomes.fail_open(instance, reason)
    again = []
    if options.retry and not isinstance(reason, ExecuteTimedOut):
        again = [each for each in requests if not each.attempts and not each.responses]
    scheduler.outcomes.fail([request for request in requests if request not in again], reason)
    if again:
        scheduler.retry(again)


def took_too_long(instance: str, limit_s: float) -> ExecuteTimedOut:
    """Why an instance was ended, and what the requests of its batch get."""
    return ExecuteTimedOut(
        f"Stub process '{instance}' took longer than {limit_s:g} s to execute a batch and was ended"
    )


def no_instance_left(model: str, why: str) -> ModelUnavailable:
    """What requests get where nothing is left that could execute them."""
    told = f"Request for model '{model}' which has no instance left"
    error = ModelUnavailable(f"{told}: {why}")
    error.told = told
    return error


def as_load_failure(error: BaseException, subject: str) -> MoonpoolError:
    """What a load raises: moonpool's own errors as they are, others as `LoadFailed`."""
    if isinstance(error, MoonpoolError):
        return error
    failure = LoadFailed(f"{subject} cannot be initialized: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def as_moonpool_error(error: BaseException) -> MoonpoolError:
    """What callers get: moonpool's own errors as they are, others wrapped."""
    if isinstance(error, MoonpoolError):
        return error
    wrapped = BackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
