"""The errors that callers get if an instance broke, ended or never started."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import call

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import BackendError, ExecuteTimedOut, LoadFailed, ModelUnavailable, all_of
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.denials import DenialBook
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.process.diagnose import remedy
from moonpool.runtime.schedule.scheduler import Scheduler

# The process or the machine has no descriptor, memory or process left.
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
# A batch beyond its time is found by then, in parts of its limit, unless the machine is under load.
_FOUND_AFTER = 1.25


def is_shortage(error: BaseException) -> bool:
    """Return True if an error comes from a lack of descriptors, memory or processes. The model is not to blame for
    that.
    """
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
    return f"Failed to preinitialize Python stub: {text}" if text.startswith(_NO_MODEL_FILE) else None


def notify_callers(
    scheduler: Scheduler,
    options: ModelOptions,
    instance: ModelInstance,
    requests: Sequence[InferenceRequest],
    reason: MoonpoolError,
) -> None:
    """Give `reason` to the requests of an instance that is gone, or queue them again if the model's options allow
    it.
    """
    again = []
    if options.retry and not isinstance(reason, ExecuteTimedOut):
        again = [each for each in requests if not each.attempts and not each.responses]
    failed = [request for request in requests if request not in again]
    steps: list[Callable[[], object]] = [
        partial(scheduler.fail_open, instance, reason),
        partial(scheduler.fail, failed, reason),
    ]
    if again:
        steps.append(partial(scheduler.retry, again))
    all_of(call, steps)


def took_too_long(instance: str, limit_s: float, denials: DenialBook, taken_s: float | None = None) -> ExecuteTimedOut:
    """Make the error for the requests of a batch that an instance did not execute in time.

    A refusal of the sandbox since its start, `taken_s` ago, may be the reason: what a process that the model started
    was refused is no error of the model. Without `taken_s`, the start is where it can be, as batches beyond their time
    are found some time after that.
    """
    taken_s = _FOUND_AFTER * limit_s if taken_s is None else taken_s
    refused = denials.since(instance, time.time_ns() // 1_000_000 - int(taken_s * 1000))
    return ExecuteTimedOut(
        f"Stub process '{instance}' took longer than {limit_s:g} s to execute a batch and was ended"
        f"{f'; {refused}' if refused else ''}"
    )


def kept_too_long(instance: str, limit_s: float) -> ExecuteTimedOut:
    """Make the error of an instance that keeps requests open for which nobody waits."""
    return ExecuteTimedOut(
        f"Stub process '{instance}' kept requests open for longer than {limit_s:g} s after their callers had left, and "
        "was ended (MOONPOOL_EXECUTE_TIMEOUT_S)"
    )


def no_instance_left(model: str, why: str) -> ModelUnavailable:
    """Make the error for requests of a model that has no instance left."""
    public = f"Request for model '{model}' which has no instance left"
    error = ModelUnavailable(f"{public}: {why}")
    error.public_message = public
    return error


def as_load_failure(error: BaseException, subject: str) -> MoonpoolError:
    """Return moonpool's own errors as they are, and others as `LoadFailed`."""
    if isinstance(error, MoonpoolError):
        return error
    todo = remedy(error) if isinstance(error, OSError) else ""
    failure = LoadFailed(f"{subject} cannot be initialized: {type(error).__name__}: {error}{todo}")
    failure.__cause__ = error
    return failure


def as_moonpool_error(error: BaseException) -> MoonpoolError:
    """Return moonpool's own errors as they are, and others as `BackendError`."""
    if isinstance(error, MoonpoolError):
        return error
    wrapped = BackendError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
