"""Runs first in a stub: started by path, under the model's own interpreter.

    python .../stub/boot.py triton_python_backend_stub NAME WORK_FD CONTROL_FD CALLS_FD PARENT_PID MSGPACK

That interpreter may have neither moonpool nor msgpack, and may be older than the runtime's. So this file imports only
the standard library, moonpool's own files beside it, and the runtime's msgpack (in pure Python if its compiled form
does not fit this interpreter). One more argument says that `confine.py` ran before and put the sandbox on.
`triton_python_backend_stub` is an argument because people and scripts look for stubs by that name. A blank template
(`blank.py`) has another title, and only the second descriptor. Its forks go on here as stubs. So does a spare
(`spare.py`), once the runtime has a model for it.

The interpreter is not isolated: a model sees PYTHONPATH and the user's own packages, as in Triton.
"""

from __future__ import annotations

import os
import sys

_TEMPLATE_TITLE, _SPARE_TITLE = "moonpool_blank_template", "moonpool_spare"
# What `moonpool` has for programs alone.
_OF_PROGRAMS = ("Runtime", "Sandbox", "arun", "run")


def leave_folder(folder: str) -> None:
    """Remove the folder of this program from `sys.path`, where Python puts it first.

    Its files would hide modules of the same names. So nothing may be imported before this call.
    """
    if folder in sys.path[:1]:  # PYTHONSAFEPATH leaves it out
        del sys.path[0]


def make_importable(name: str, folder: str) -> None:
    """Make the package `name` importable without adding its parent folder to the path.

    Gives its two parts their places, too: in a sandbox, Python may be unable to list the folder that holds them.
    """
    import types

    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]
    for part in ("ipc", "stub"):
        module = sys.modules[f"{name}.{part}"] = types.ModuleType(f"{name}.{part}")
        module.__path__ = [os.path.join(folder, part)]
        setattr(package, part, module)
    package.__getattr__ = _absent  # type: ignore[method-assign]


def _absent(name: str) -> object:
    """Tell what to do in place of a name of `moonpool` that a model does not have."""
    if name not in _OF_PROGRAMS:
        raise AttributeError(f"module 'moonpool' has no attribute {name!r}")
    text = (
        f"moonpool.{name} belongs to the program that hosts models, and this is a process that it hosts: call it there"
        ", or start `python -m moonpool run FILE` or another program that calls it, where the sandbox allows that"
    )
    # `from moonpool import run` would drop the text of any other error.
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise ImportError(text) if is_import else AttributeError(text)


def load_msgpack(folder: str) -> None:
    """Import the runtime's msgpack from its folder."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        "msgpack", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no msgpack in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["msgpack"] = module
    spec.loader.exec_module(module)


def forget_msgpack(folder: str) -> None:
    """Let the model import the msgpack of its own environment, if that is another one."""
    import importlib.util

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "msgpack"}
    found = importlib.util.find_spec("msgpack")
    if found is not None and found.origin == os.path.join(folder, "__init__.py"):
        sys.modules.update(kept)


def main() -> None:
    """Read the arguments, become a stub, serve until the end of the process."""
    _, title, name, work_fd, control_fd, calls_fd, parent_pid, msgpack_folder, *confined = sys.argv
    # Libraries of the model may parse the arguments of the process, and these are not for them.
    del sys.argv[1:]
    here = os.path.dirname(os.path.realpath(__file__))
    leave_folder(here)
    make_importable("moonpool", os.path.dirname(here))
    from moonpool.ipc import signals
    from moonpool.stub.sandbox import identity

    identity.die_with(int(parent_pid))
    if title == _SPARE_TITLE:
        # In this order: the score belongs to others afterwards.
        identity.score_for_ending(identity.FIRST_TO_END)
        identity.forbid_looking_inside()
    if title in (_TEMPLATE_TITLE, _SPARE_TITLE):
        import gc

        # Until it waits. What it imports stays, and nothing of it is garbage.
        gc.disable()
    signals.use_defaults()
    load_msgpack(msgpack_folder)
    from moonpool.stub import report
    from moonpool.stub.handshake import shake_hands
    from moonpool.stub.sandbox import layers

    forget_msgpack(msgpack_folder)
    fds = [int(work_fd), int(control_fd), int(calls_fd)]
    apply = layers.apply
    if title == _TEMPLATE_TITLE:
        from moonpool.stub.blank import fork_for

        name, fds = fork_for(fds[1], int(parent_pid))
    elif title == _SPARE_TITLE:
        from moonpool.stub import spare

        name, fds = spare.wait_for_model(fds[1])
        apply = spare.confine
    handshake = shake_hands(name, *fds, is_confined=bool(confined), apply=apply)
    # Nothing of a model may be imported before the sandbox is on. Only in a spare, numpy is not the model's.
    why = _what_is_wrong_with_numpy()
    if why:
        handshake.fail("environment", why)
    try:
        # A template imports this before it forks, so that its forks need not.
        from moonpool.stub.loop import Stub
    except Exception as error:  # the memory that numpy has left may be too little
        handshake.fail("start", report.describe(error), report.traceback_of(error))
    if handshake.start["mode"] == "template":
        from moonpool.stub.template import Template

        Stub(*Template(handshake).run()).run()
    elif handshake.start["mode"] == "source":
        from moonpool.stub.source.template import SourceTemplate

        SourceTemplate(handshake).serve()
    else:
        Stub(handshake).run()


def _what_is_wrong_with_numpy() -> str:
    """Import numpy. Returns why that is not possible."""
    from moonpool.stub.report import limit_advice

    try:
        import numpy  # noqa: F401
    except Exception as error:  # a library of numpy's that gets no memory may raise anything
        message = str(error).strip()
        advice = limit_advice(error, message)
        if not advice:
            advice = "; install it there"
            if os.environ.get("PYTHONPATH"):
                advice += ", and look whether PYTHONPATH leads to packages of another Python"
        return f"numpy cannot be imported by {sys.executable}: {message or type(error).__name__}{advice}"
    return ""


if __name__ == "__main__":
    main()
