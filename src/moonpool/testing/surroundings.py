"""What a stub is to its one model, where several models may live in one process: imports, a host, a log.

Every version's file is called `1.model` or the like, and brings its neighbours under names as common. Here the modules and
folders of the model that runs are in place, and those of the others are not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from moonpool.stub import host, logger, pb_utils
from moonpool.stub.loader import UTILITIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

    from moonpool.stub.host import Host
    from moonpool.stub.logger import Sink

_switching = threading.RLock()


class Surroundings:
    """What `import` finds, and whom `pb_utils` asks and tells, while one model is the current one of the process."""

    _current: Surroundings | None = None

    def __init__(
        self, version_directory: str, folders: Iterable[str], asks: Host, log: Sink
    ) -> None:
        """`folders` hold the model's files; `asks` is the host of the model."""
        self._version_directory = version_directory
        self._log = log
        self._folders = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._host = asks
        self._modules: dict[str, ModuleType] = {}
        self._path: list[str] = []
        self._modules_before: dict[str, ModuleType] = {}
        self._path_before: list[str] = []
        # Files may be newer than what the import system remembers of their folders.
        importlib.invalidate_caches()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, this model is the current one; it stays so afterwards unless another one was."""
        before = Surroundings._current
        self._switch(self)
        try:
            yield
        finally:
            if before is not None:
                self._switch(before)

    def close(self) -> None:
        """The model is gone: the process has its own imports again."""
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
        # Which messages are wanted, the test says by its own logging.
        logger.set_levels(True, True, True, True)
        logger.set_sink(self._log)

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
