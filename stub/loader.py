"""Imports the file of a model and finds its class, by the import rules that Triton's models rely on."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

from moonpool.ipc.errors import MoonpoolError
from moonpool.stub import pb_utils
from moonpool.stub.native import hints
from moonpool.stub.native.signature import METHODS
from moonpool.stub.report import describe, traceback_of

CLASS_NAME = "TritonPythonModel"
UTILITIES = ("triton_python_backend_utils", "c_python_backend_utils")
# Has files with these names, for interpreters that the model starts: `multiprocessing` gives them the paths of this
# one.
_IMPORTABLE = os.path.join(os.path.dirname(os.path.realpath(__file__)), "importable")


class LoadError(MoonpoolError):
    """Says why a model's file did not become a model.

    `stage` is "file", "import", "class", or the name of a later step. The text may go to a client. `traceback` is
    for the log; it is empty if none of the model's code ran.
    """

    def __init__(self, stage: str, text: str, traceback: str = "") -> None:
        super().__init__(text)
        self.stage = stage
        self.traceback = traceback


def load_triton(model_file: str, version_dir: str, model_dir: str, backend_dir: str) -> type:
    """Load the class TritonPythonModel of a model for Triton's Python backend.

    `model_file` is a path, or a name within `version_dir`. A file in `version_dir` is imported as `<version>.<stem>`,
    so that it can import its neighbours both as `from . import helper` and as `import helper`; a file elsewhere, which
    serves several models, as `<stem>`. In a folder that is no version, the package has a name of its own
    (`_package_name`).

    Changes `sys.path` and `sys.modules` for good; a process loads one model. Raises LoadError.
    """
    path = os.path.join(version_dir, model_file)
    stem, in_package = _named(path), _same_folder(os.path.dirname(path), version_dir)
    install_utilities(version_dir)
    folders = (version_dir, model_dir) if in_package else (os.path.dirname(path),)
    _append_to_path((*folders, backend_dir, _IMPORTABLE))
    if in_package:
        module = _import(lambda: _import_in_package(stem, version_dir), path)
    else:
        module = _import(lambda: _import_alone(stem, path), path)
    model = getattr(module, CLASS_NAME, None)
    if not isinstance(model, type):
        raise LoadError(
            "class",
            f"AttributeError: module '{module.__name__}' has no attribute '{CLASS_NAME}'\n\n"
            f"{path} must define a class of that name; it defines {_classes_of(module)}.",
        )
    return model


def load_native(file: str, qualname: str | None = None) -> Callable[..., object]:
    """Load one of moonpool's own models, a class or a function.

    Without `qualname`, takes the only class in the file that defines `__call__`, or else the only one that defines
    methods of OpenAI's API. Appends the file's folder to
    `sys.path`, and lets the file import the names of `moonpool.stub.native.hints` from `moonpool`. Raises LoadError.
    """
    path = os.path.abspath(file)
    stem = _named(path)
    install_utilities(os.path.dirname(path))
    from moonpool.stub import openai  # Triton's models do without it.

    hints.publish()
    openai.publish()
    _append_to_path((os.path.dirname(path), _IMPORTABLE))
    module = _import(lambda: _import_file(stem, path), path)
    return _find(module, path, qualname)


def install_utilities(model_dir: str) -> None:
    """Make `triton_python_backend_utils` and `c_python_backend_utils` importable from now on."""
    pb_utils.set_model_dir(model_dir)
    for name in UTILITIES:
        sys.modules[name] = pb_utils


def _named(path: str) -> str:
    name = os.path.basename(path)
    if not name.endswith(".py") or name == ".py":
        raise LoadError("file", f"Model name must end with '.py'. Model name is \"{name}\".")
    if not os.path.isfile(path):
        raise LoadError("file", f"Python model file not found in '{os.path.abspath(path)}'")
    return name[: -len(".py")]


def _same_folder(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _append_to_path(folders: Iterable[str]) -> None:
    # The folder of no backend is an empty text, which must not become the current folder.
    sys.path.extend(os.path.abspath(folder) for folder in folders if folder)


def _import(load: Callable[[], ModuleType], path: str) -> ModuleType:
    try:
        return load()
    except BaseException as error:
        # SystemExit, too: an import may not end the stub. And KeyboardInterrupt: a stub ignores SIGINT, so only the
        # model can have raised it.
        text = describe(error)
        if "\nAt:\n" not in text:
            text += f"\n\nAt:\n  {path}\n"
        raise LoadError("import", text, traceback_of(error)) from error


def _import_in_package(stem: str, version_dir: str) -> ModuleType:
    """Import `<version>.<stem>` from the model's own folder, even if the sandbox forbids to list that folder.

    Without a package of our own, a folder called "1" elsewhere on the path would be part of the same package.
    """
    folder = os.path.realpath(version_dir)
    parent = _package_name(os.path.basename(folder))
    package = importlib.util.module_from_spec(_package_spec(parent, folder))
    sys.modules[parent] = package
    if package.__spec__ is not None and package.__spec__.loader is not None:
        package.__spec__.loader.exec_module(package)
    if _is_hidden(folder) or "." in stem:
        # A dot in the name would make a part of the file's name a package.
        name = f"{parent}.{stem.replace('.', '_')}"
        return _import_file(name, os.path.join(folder, f"{stem}.py"))
    return _import_module(f"{parent}.{stem}")


def _package_name(folder_name: str) -> str:
    """Return the name of the package that a folder is imported as.

    A version keeps its name. The name of another folder may be no name for Python, such as "v1.2", or hide a module,
    such as "json".
    """
    return folder_name if folder_name.isdecimal() else "_model_folder"


def _package_spec(name: str, folder: str) -> ModuleSpec:
    file = os.path.join(folder, "__init__.py")
    if os.path.isfile(file):
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[folder])
        if spec is not None:
            return spec
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder]
    return spec


def _import_module(name: str) -> ModuleType:
    # `importlib.import_module` would add its frames to every traceback.
    __import__(name)
    return sys.modules[name]


def _import_alone(stem: str, path: str) -> ModuleType:
    """Import `<stem>`, even if the sandbox forbids to list its folder."""
    if _is_hidden(os.path.dirname(path)) or "." in stem:
        return _import_file(stem, path)
    return _import_module(stem)


def _is_hidden(folder: str) -> bool:
    """Return whether the sandbox forbids to list a folder, in which Python then finds no modules."""
    try:
        os.scandir(folder).close()
    except PermissionError:
        return True
    return False


def _import_file(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, path: str, qualname: str | None) -> Callable[..., object]:
    if qualname is not None:
        found: object = module
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise LoadError("class", f"{path} has no class or function '{qualname}'; it defines {_classes_of(module)}.")
        return found
    # A class beside a model may have methods of any names. Those of OpenAI's API count only if no class is called.
    models = _models_in(module, ("__call__",)) or _models_in(module, METHODS)
    if len(models) != 1:
        example = f"{os.path.basename(path)}:{_example(module, models)}"
        raise LoadError(
            "class",
            f"{path} must have a class {CLASS_NAME}, or exactly one class that defines __call__ or methods of OpenAI's "
            f"API ({', '.join(METHODS)}); it defines {_classes_of(module)}; "
            f"name the one to use: '{example}' as the source of a load, or as default_model_filename in config.pbtxt.",
        )
    return models[0]


def _models_in(module: ModuleType, methods: Iterable[str]) -> list[type]:
    """Return the classes of a file that define one of these methods."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and any(callable(vars(value).get(method)) for method in methods)
    ]


def _example(module: ModuleType, models: Sequence[type]) -> str:
    """Return the name of a class or function that may be the model that is meant."""
    if models:
        return models[-1].__name__
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]
    return own[-1] if own else "NAME"


def _classes_of(module: ModuleType) -> str:
    names = [
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return ", ".join(names) or "no class at all"
