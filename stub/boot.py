"""The first code of a stub, run by path under the model's own interpreter.

    python .../stub/boot.py triton_python_backend_stub NAME WORK_FD CONTROL_FD CALLS_FD PARENT_PID MSGPACK

That interpreter may have neither moonpool nor msgpack and may be older than the runtime's. Nothing foreign is
imported here: the standard library, moonpool's own files beside this one, and the runtime's msgpack
(in pure Python where its compiled form does not fit). One more argument says that `confine.py` was
here before. `triton_python_backend_stub` stands in the
arguments because people and scripts look for stubs by that name.

The interpreter is not isolated: PYTHONPATH and the user's own packages are a model's as they are in Triton.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1


def leave_folder(folder: str) -> None:
    """Take the folder of this program out of the path, where Python puts it first.

    The files in it are no modules, and must not hide any: so nothing is imported before.
    """
    if folder in sys.path[:1]:  # not there with PYTHONSAFEPATH
        del sys.path[0]


def die_with_parent(parent_pid: int) -> None:
    """End this process when the runtime ends, and at once if it has ended already.

    In a PID namespace the parent has the number 0, and the keeper of the namespace ends this process (`stub/nest.py`).
    """
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() not in (parent_pid, 0):
        os._exit(1)


def make_importable(name: str, folder: str) -> None:
    """Make the one package importable without adding what lies beside it to the path.

    Its two parts are found where they are: a sandbox may not let anybody list the folder that they are in.
    """
    import types

    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]
    for part in ("ipc", "stub"):
        module = sys.modules[f"{name}.{part}"] = types.ModuleType(f"{name}.{part}")
        module.__path__ = [os.path.join(folder, part)]
        setattr(package, part, module)


def load_msgpack(folder: str) -> None:
    """Import the runtime's msgpack, unless this interpreter would find the very same one."""
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
    """Let the model import its own environment's msgpack where that is another one."""
    import importlib.util

    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "msgpack"
    }
    found = importlib.util.find_spec("msgpack")
    if found is not None and found.origin == os.path.join(folder, "__init__.py"):
        sys.modules.update(kept)


def main() -> None:
    """Read the arguments, become a stub, serve, and end the process."""
    _, _, name, work_fd, control_fd, calls_fd, parent_pid, msgpack_folder, *confined = sys.argv
    # A model's libraries may look for arguments; these are not for them.
    del sys.argv[1:]
    here = os.path.dirname(os.path.realpath(__file__))
    leave_folder(here)
    die_with_parent(int(parent_pid))
    make_importable("moonpool", os.path.dirname(here))
    load_msgpack(msgpack_folder)
    from moonpool.stub.handshake import shake_hands

    forget_msgpack(msgpack_folder)
    fds = int(work_fd), int(control_fd), int(calls_fd)
    handshake = shake_hands(name, *fds, is_confined=bool(confined))
    handshake.serve()


if __name__ == "__main__":
    main()
