"""Turns an exception of the model into texts: one for the client, one for the log, with advice.

The advice is a clause that names the option which would have prevented the error. All errors of a model pass here,
whether it fails in its import, in `initialize` or in a request, and in whichever server it runs: only the process of
the model has the exception itself. Whatever the runtime withholds from models, or limits, gets its sentence from a
function in `_ADVISERS`.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import TracebackType

from moonpool.ipc.denials import CALLS, PATHS
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import MEMORY, Policy, limit_behind, reached
from moonpool.stub.sandbox.denials import denials

# The model chooses these texts, and clients have to carry them.
MAX_TEXT = 32_768
_MAX_LINE = 1000

_HERE = os.path.dirname(os.path.abspath(__file__))
# Frames of these files do not help the author of a model.
_OWN_FOLDERS = (
    _HERE + os.sep,
    os.path.join(os.path.dirname(_HERE), "ipc") + os.sep,
    os.path.join(os.path.dirname(_HERE), "testing") + os.sep,
    "<frozen importlib",
)
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def describe(error: BaseException) -> str:
    """Return the text for a client: type, message, and the places in the model's files, innermost first.

    Errors of moonpool's own are complete sentences and stay as they are.
    """
    if isinstance(error, MoonpoolError):
        return _cut(str(error))
    text = summary(error)
    frames = _model_frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(
            f"  {frame.tb_frame.f_code.co_filename}({frame.tb_lineno}): {frame.tb_frame.f_code.co_name}\n"
            for frame in reversed(frames)
        )
    return _cut(text)


def summary(error: BaseException) -> str:
    """Return type and message of an exception, and advice if there is any."""
    message = _message(error)
    return f"{_name(error)}: {message}{advice(error, message)}"


def traceback_of(error: BaseException) -> str:
    """Return the Python traceback with all causes, from the first frame of the model's code on."""
    frames = _model_frames(error.__traceback__)
    start = frames[0] if frames else None
    try:
        import traceback  # Imported only after a failure, to keep the start quick.

        return _cut("".join(traceback.format_exception(type(error), error, start)))
    except BaseException:
        # Exception classes of the model may break any of this, and so may a limit that it has reached.
        return describe(error) + "\n"


def in_one_line(error: BaseException) -> tuple[str, str, int]:
    """Return type and message in one line, and the innermost place outside of libraries: the file, and the line or
    0.
    """
    frames = _model_frames(error.__traceback__)
    file, line = "", 0
    for frame in frames:
        name = frame.tb_frame.f_code.co_filename
        if not (file and _is_library(name)):
            file, line = name, frame.tb_lineno
    text = summary(error).replace("\n", "\\n")
    return (text if len(text) <= _MAX_LINE else text[:_MAX_LINE] + "…"), file, line


def _name(error: BaseException) -> str:
    # A class may define `__name__` itself, as anything.
    return str(type.__getattribute__(type(error), "__name__"))


def _message(error: BaseException) -> str:
    try:
        text = str(error)
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list) and notes:
            text += f"\n__notes__ (len={len(notes)}):"
            text += "".join(f"\n{note!s:.1000}" for note in notes)
    except BaseException as second:  # the model wrote these methods
        return (
            f"<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: {_name(second)}"
        )
    # A socket and a log take only texts that have a UTF-8 form.
    return text.encode("utf-8", "backslashreplace").decode() or "<EMPTY MESSAGE>"


def _model_frames(traceback: TracebackType | None) -> list[TracebackType]:
    frames = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _is_library(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, "<frozen ")) or f"{os.sep}site-packages{os.sep}" in file


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT} more characters)"


Adviser = Callable[[BaseException, str, Policy], str]


# The restrictions of this process. A process that is no stub, as in tests of models, has none.
policy: Policy | None = None

# Exceptions may refer to each other in a circle.
_MOST_CAUSES = 8
# The model chooses the names in its exceptions.
_MOST_NAME = 100
# OpenBLAS asks for so much in one piece. If the kernel refuses it, the memory of the process counts as used up.
_PIECE_BYTES = 32 << 20
# Libraries that get no memory and have no error for it raise one of these.
_VAGUE = (ImportError, OSError, RuntimeError, SystemError)


def advice(error: BaseException, text: str) -> str:
    """Return `; …` with the option that prevents this error, or "". `text` is the message of the error."""
    # An error that wraps another one has words of it, but its cause is known better.
    return _first_of(_ADVISERS, error, text) or _first_of((_about_refusals_in_words,), error, text)


def limit_advice(error: BaseException, text: str) -> str:
    """Return advice about the limits of the instance only; "" if none of them is the reason."""
    return _first_of((_about_limits,), error, text)


def _first_of(advisers: Sequence[Adviser], error: BaseException, text: str) -> str:
    if policy is None:
        return ""
    try:
        for each in _with_causes(error):
            said = text if each is error else str(each)
            for adviser in advisers:
                found = adviser(each, said, policy)
                if found:
                    return f"; {found}"
    except BaseException:
        # The model wrote the methods of its exceptions; and there may be no memory for any of this.
        return ""
    return ""


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """List the exception and its causes, explicit or not."""
    current: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if current is None:
            return
        yield current
        context = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or context


def _about_limits(error: BaseException, text: str, policy: Policy) -> str:
    limits = policy.limits
    limit = limit_behind(error, text, limits)
    if not limit and _is_vague(error):
        name = next((name for name in MEMORY if name in limits), None)
        if name is not None and not _is_memory_left():
            limit = reached(name, limits[name])
    return f"the instance {limit}" if limit else ""


def _is_vague(error: BaseException) -> bool:
    """Return whether a lack of memory may be the reason. Errors with an errno, and of missing modules, have other
    reasons.
    """
    has_reason = isinstance(error, ModuleNotFoundError) or getattr(error, "errno", None) is not None
    return isinstance(error, _VAGUE) and not has_reason


def _is_memory_left() -> bool:
    try:
        import mmap

        mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (ImportError, MemoryError, OSError):
        return False
    return True


def _about_modules(error: BaseException, text: str, policy: Policy) -> str:  # noqa: ARG001
    if not isinstance(error, ModuleNotFoundError):
        return ""
    name = f"{error.name or 'it'}".partition(".")[0][:_MOST_NAME]
    folder = _folder_beside(name)
    if folder:
        return (
            f"{name} is in {folder}, where the runtime was started, but models do not import from there; "
            f"start the runtime with PYTHONPATH={folder}"
        )
    return (
        f"install {name} for {sys.executable}, under which the model runs, or name an environment that has it in "
        "EXECUTION_ENV_PATH"
    )


def _folder_beside(name: str) -> str:
    """Return the working folder if a module of this name lies there; "" for a module that lies elsewhere.

    Triton's stub imports from its working folder, so such models worked there.
    """
    try:
        folder = os.getcwd()
        names = os.listdir(folder)
    except OSError:  # it was deleted, or may not be read
        return ""
    return folder if name in names or f"{name}.py" in names else ""


# The beginnings of variables with credentials for repositories in the cloud.
_OF_CREDENTIALS = ("AWS_", "AZURE_", "GOOGLE_", "GCLOUD_", "HF_", "HUGGING", "TRITON_CLOUD_")


def _about_variables(error: BaseException, text: str, policy: Policy) -> str:
    if not isinstance(error, KeyError) or not _comes_of_environ(error):
        return ""
    name = text.strip("'")[:_MOST_NAME]
    if policy.is_contained:
        return (
            f"a model in the sandbox '{policy.level}' sees {name} only if it is set for the runtime and "
            "MOONPOOL_ENVIRONMENT names it"
        )
    if name.startswith(_OF_CREDENTIALS):
        return (
            f"the runtime may keep {name} for its repository in the cloud; then a model sees it only if "
            "MOONPOOL_ENVIRONMENT names it"
        )
    return f"set {name} for the runtime, whose environment the model has"


def _comes_of_environ(error: BaseException) -> bool:
    """Return whether `os.environ` raised the error, for a variable that is not set."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    own = type(os.environ)
    readers = (own.__getitem__.__code__, own.__delitem__.__code__)
    return frame is not None and frame.tb_frame.f_code in readers


# The places of a refusal. An audit event names one act of Python's, and that is not enough in two cases. Some acts
# raise no event: those of code in C, such as the locks of SQLite, or the function by which `multiprocessing` starts
# programs. And a library may need several grants one after the other, of which its first error shows one. The modules
# in whose frames an error was raised, and the names that its last functions use, tell both. It is a hint, which a model
# may forge, and which has nothing in it but the words below.
_FORK, _PROGRAM, _SOCKETS = ("fork",), ("fork", "execve"), ("unix",)
_EPOLL = ("epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait")
_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)

# The calls that a library takes if the error came from below one of its modules.
_OF_MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("multiprocessing.popen_fork", _FORK),
    ("multiprocessing.popen_spawn_posix", _PROGRAM),
    ("multiprocessing.resource_tracker", _PROGRAM),
    ("multiprocessing.popen_forkserver", _PROGRAM + _SOCKETS),
    ("multiprocessing.forkserver", _PROGRAM + _SOCKETS),
    ("multiprocessing.managers", _FORK + _SOCKETS),
    ("multiprocessing.resource_sharer", _FORK + _SOCKETS),
    ("joblib.externals.loky", _PROGRAM),
    ("loky", _PROGRAM),
    ("uvloop", _EPOLL),
)
# Where psutil is installed, a worker measures its memory after its first task, and ends if it may not.
_MEASURES_ITSELF = ("joblib.externals.loky", "loky")
_ENDED_WORKER = "TerminatedWorkerError"
_OWN_FILES = "ro:/proc"
# Its workers send descriptors to each other. After a fork they do so by the stub (`hosts/forks.py`), and by sockets
# otherwise.
_SENDS_DESCRIPTORS = "torch.utils.data"
_WITHOUT_FORK = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver", "multiprocessing.forkserver")
# The calls behind names that the last function uses.
_OF_NAMES = (("fork_exec", _PROGRAM), ("epoll", _EPOLL), ("EpollSelector", _EPOLL), ("lockf", ("locks",)))
# Names that the last function uses to make shared memory and semaphores.
_SHARED = frozenset(["shm_open", "SemLock", "SharedMemory", "Semaphore"])
_SHARED_MEMORY = "rw:/dev/shm"
# SQLite's word for a lock that was refused.
_NO_LOCK = "access permission denied"


def _about_places(error: BaseException, text: str, policy: Policy) -> str:
    options = _grants_for(error, text, policy) if policy.is_contained else []
    return denials.sentence(options) if options else ""


def _grants_for(error: BaseException, text: str, policy: Policy) -> list[str]:
    """Return the options with which what raised this error would work, as far as the places tell; [] if they tell
    nothing.

    `text` is the message of the error.
    """
    if type(error).__module__ == "sqlite3" and _NO_LOCK in text:
        return [_granting(["locks"])]
    modules, names, is_for_forks = _places(error)
    measured = [f"{PATHS}={_OWN_FILES}"] if _measures_itself(modules, policy) else []
    if type(error).__name__ == _ENDED_WORKER:
        return measured
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return []
    is_of_filter = error.errno == errno.EPERM
    if not is_of_filter and not names & _SHARED:
        # A file was refused, whose path tells what would allow it.
        return []
    calls = [call for module, needed in _OF_MODULES if _is_in(module, modules) for call in needed]
    for name, needed in _OF_NAMES if is_of_filter else ():
        if name in names:
            calls += needed
    if _is_in(_SENDS_DESCRIPTORS, modules) and any(_is_in(each, modules) for each in _WITHOUT_FORK):
        calls += _SOCKETS
    if not is_of_filter:
        # `multiprocessing` starts a process that removes what others leave there, but not for what only forks inherit.
        calls += () if is_for_forks else _PROGRAM
        return [f"{PATHS}={_SHARED_MEMORY}", *([_granting(calls)] if calls else [])]
    return [*measured, _granting(calls)] if calls else []


def _measures_itself(modules: Collection[str], policy: Policy) -> bool:
    """Return True if the processes of a library that raised an error need files in /proc that they may not read."""
    return (
        any(_is_in(each, modules) for each in _MEASURES_ITSELF)
        and all(path != "/proc" for path, _ in policy.granted)
        and importlib.util.find_spec("psutil") is not None
    )


def _granting(calls: Iterable[str]) -> str:
    """Return the option that grants these calls."""
    return f"{CALLS}={','.join(calls)}"


def _places(error: BaseException) -> tuple[set[str], set[str], bool]:
    """Return the names of the modules through which the error went, and the names that its last two functions use.

    And True if it came from a semaphore of `multiprocessing` that is for forks only.
    """
    modules: set[str] = set()
    codes = []
    is_for_forks = False
    traceback = error.__traceback__
    while traceback is not None:
        modules.add(str(traceback.tb_frame.f_globals.get("__name__", "")))
        is_for_forks |= traceback.tb_frame.f_locals.get("unlink_now") is True
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return modules, {name for code in codes[-2:] for name in code.co_names}, is_for_forks


def _is_in(module: str, modules: Collection[str]) -> bool:
    return any(each == module or each.startswith(f"{module}.") for each in modules)


def _about_refusals(error: BaseException, text: str, policy: Policy) -> str:  # noqa: ARG001
    return denials.advice(error)


def _about_refusals_in_words(error: BaseException, text: str, policy: Policy) -> str:  # noqa: ARG001
    return denials.advice_in_words(text)


def _about_users(error: BaseException, text: str, policy: Policy) -> str:
    if not (policy.is_contained and isinstance(error, KeyError) and "getpwuid()" in text):
        return ""
    return (
        "a contained model has a user without a name, and cannot read /etc/passwd: set USER for the runtime, where "
        "`getpass` and most libraries look first"
    )


# What the places tell is certain, and the latest denial may be of something else.
_ADVISERS = (_about_places, _about_refusals, _about_limits, _about_modules, _about_variables, _about_users)
