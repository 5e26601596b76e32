"""What to tell people of an exception: one text for the client, one for the log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.limits import limit_behind

if TYPE_CHECKING:
    from types import TracebackType

# What this process is limited to, as in its policy: an error that comes of it says so.
limits: dict[str, int] = {}

# A model chooses these texts, and a client has to carry them.
MAX_TEXT = 32_768

_HERE = os.path.dirname(os.path.abspath(__file__))
# Frames of these are of no use to whoever wrote the model.
_OWN_FOLDERS = (
    _HERE + os.sep,
    os.path.join(os.path.dirname(_HERE), "ipc") + os.sep,
    os.path.join(os.path.dirname(_HERE), "testing") + os.sep,
    "<frozen importlib",
)


def describe(error: BaseException) -> str:
    """What a client is told: type and message, and where in the model's files, innermost first.

    moonpool's own errors speak for themselves and are given as they are.
    """
    if isinstance(error, MoonpoolError):
        return _cut(str(error))
    text = f"{_name(error)}: {_message(error)}{limit_hint(error)}"
    frames = _model_frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(
            f"  {frame.tb_frame.f_code.co_filename}({frame.tb_lineno}): "
            f"{frame.tb_frame.f_code.co_name}\n"
            for frame in reversed(frames)
        )
    return _cut(text)


def limit_hint(error: BaseException) -> str:
    """`; the instance reached its …` where an error comes of one of its limits, else nothing."""
    limit = limit_behind(error, _message(error), limits) if limits else ""
    return f"; the instance {limit}" if limit else ""


def traceback_of(error: BaseException) -> str:
    """The whole Python traceback, causes included, that starts where the model's code starts."""
    frames = _model_frames(error.__traceback__)
    start = frames[0] if frames else None
    try:
        import traceback  # Where something has failed already, to keep the start quick.

        return _cut("".join(traceback.format_exception(type(error), error, start)))
    except BaseException:
        # The model's exception classes can break any of this, and so can a limit that it has reached.
        return describe(error) + "\n"


def _name(error: BaseException) -> str:
    # As a class's own attributes can, its name can be anything's.
    return str(type.__getattribute__(type(error), "__name__"))


def _message(error: BaseException) -> str:
    try:
        text = str(error)
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list) and notes:
            text += f"\n__notes__ (len={len(notes)}):"
            text += "".join(f"\n{note!s:.1000}" for note in notes)
    except BaseException as second:  # these are methods of the model's
        return (
            "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\n"
            f"MESSAGE UNAVAILABLE DUE TO EXCEPTION: {_name(second)}"
        )
    # What a socket or a log takes must have a UTF-8 form.
    return text.encode("utf-8", "backslashreplace").decode() or "<EMPTY MESSAGE>"


def _model_frames(traceback: TracebackType | None) -> list[TracebackType]:
    frames = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"
