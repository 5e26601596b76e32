"""Imports, host and log of each model, for several models in one process. In a stub, the whole process has only one.

Every version's file is called `1.model` or the like, and its neighbours have names as common. So only the modules and
folders of the model that runs are in `sys.modules` and `sys.path`; those of the others are kept aside.

Theory of operation. One model is current at a time, for the whole process. `_switching` protects the exchange: it takes
the modules, folders, host and log of the old model out, and puts those of the new one in. Its lock is reentrant because
`close` switches while it holds it. A model stays current after its code has returned, so that its threads and
coroutines find its modules; only a nested call, as from model to model, puts the caller's model back. If two models run
at the same time on two threads, both see the imports of the current one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType

from moonpool.stub import pb_utils
from moonpool.stub.loader import UTILITIES
from moonpool.stub.pb_utils import host, logger
from moonpool.stub.pb_utils.host import Host
from moonpool.stub.pb_utils.logger import Sink

_switching = threading.RLock()


class Surroundings:
    """The modules that `import` finds, and the host and log of `pb_utils`, while this model is the current one."""

    _current: Surroundings | None = None

    def __init__(self, version_directory: str, folders: Iterable[str], asks: Host, log: Sink) -> None:
        """Take the `folders` of the model's files, and its host, `asks`."""
        self._version_directory = version_directory
        self._log = log
        self._folders = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._host = asks
        self._modules: dict[str, ModuleType] = {}
        self._path: list[str] = []
        self._modules_before: dict[str, ModuleType] = {}
        self._path_before: list[str] = []
        # The import system caches the contents of folders, and the files may be newer.
        importlib.invalidate_caches()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this model the current one inside. It stays current afterwards unless another one was before."""
        before = Surroundings._current
        self._switch(self)
        try:
            yield
        finally:
            if before is not None:
                self._switch(before)

    def close(self) -> None:
        """Give the process its own imports back."""
        with _switching:
            if Surroundings._current is self:
                self._switch(None)

    @staticmethod
    def _switch(to: Surroundings | None) -> None:
        with _switching:
            current = Surroundings._current
            if current is to:
                return
            if current is not None:
                current._take_out()
            if to is not None:
                to._put_in()
            Surroundings._current = to

    def _put_in(self) -> None:
        self._modules_before = dict(sys.modules)
        self._path_before = list(sys.path)
        sys.modules.update(self._modules)
        sys.path.extend(self._path)
        pb_utils.set_model_dir(self._version_directory)
        host.use(self._host)
        # The test chooses levels by its own logging.
        logger.set_levels(True, True, True, True)
        logger.set_sink(self._log, adopts_logging=False)

    def _take_out(self) -> None:
        before = self._modules_before
        for name, module in list(sys.modules.items()):
            if before.get(name) is not module and (name in UTILITIES or self._owns(module)):
                self._modules[name] = module
                del sys.modules[name]
                if name in before:
                    sys.modules[name] = before[name]
        rest, kept = list(self._path_before), []
        self._path = []
        for folder in sys.path:
            if folder in rest:
                rest.remove(folder)
                kept.append(folder)
            else:
                self._path.append(folder)
        sys.path[:] = kept
        pb_utils.set_model_dir("")
        host.use(None)
        logger.set_levels(True, True, True, False)
        logger.set_sink(None)

    def _owns(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if file is None:
            file = next(iter(getattr(module, "__path__", ())), None)
        if not isinstance(file, str):
            return False
        return (os.path.realpath(file) + os.sep).startswith(self._folders)
