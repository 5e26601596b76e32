"""What a launcher does: models, their instances and their deaths, as the shim asks for them."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import CODES, MoonpoolError, PeerGone
from moonpool.ipc.messages import PROTOCOL_VERSION
from moonpool.runtime.failures import as_load_failure, missing_file_line
from moonpool.runtime.model_registry import ModelRegistry
from moonpool.runtime.parallel import in_parallel
from moonpool.runtime.public_text import scrubbed
from moonpool.runtime.python_based import BackendDirectory
from moonpool.runtime.triton.error_codes import code_of
from moonpool.runtime.triton.lent_backend import LentBackend
from moonpool.runtime.triton.lent_instance import LentInstance
from moonpool.runtime.triton.messages import LAUNCHER_VERSION, End, Word
from moonpool.runtime.triton.models import ServedModel, refusal, rules_of
from moonpool.runtime.triton.notes import Notes
from moonpool.runtime.triton.post import Post
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.backend import Model

_log = logging.getLogger("moonpool")
# The receiver of all memory that this process gives.
_SHIM = "shim"
_UNAVAILABLE = CODES.index("UNAVAILABLE")


class Launcher:
    """Hears on one thread; what takes long has a thread of its own."""

    def __init__(self, post: Post) -> None:
        self._post = post
        # For what a runtime's stubs share. Nobody loads models there.
        self._registry = ModelRegistry(None, [], BackendDirectory(), 0.0, False, None)
        self._registry.is_controllable = False
        self._stubs = self._registry.stubs
        self._backend = LentBackend(self._stubs)
        self._directory = self._config = ""
        self._models: dict[int, ServedModel] = {}
        self._instances: dict[int, LentInstance] = {}
        self._heard: dict[int, Callable[..., None]] = {
            Word.BACKEND: self._begin,
            Word.LOGGING: self._change_log,
            Word.MODEL: self._load,
            Word.INSTANCE: self._start,
            Word.LOST: self._lose,
            Word.OVERDUE: self._exceed,
            Word.RENEW: self._renew,
            Word.MEMORY: self._enlarge,
            Word.RETURNED: self._take_back,
            Word.SCRUB: self._scrub,
            Word.END: self._end,
            Word.END_MODEL: self._unload,
        }

    def run(self) -> None:
        """Do what is asked for until nobody asks any more, and end all that is left then."""
        self._post.tell(Word.HELLO, LAUNCHER_VERSION, PROTOCOL_VERSION, VERSION, os.getpid())
        try:
            while True:
                (word, *fields), _ = self._post.hear()
                self._heard[word](*fields)
        except PeerGone:
            _log.debug("the server has ended, or needs this backend no more")
        finally:
            in_parallel(
                lambda each: each.end(finalizes=False),
                [*self._instances.values()],
                "moonpool-end",
            )
            for served in list(self._models.values()):
                self._backend.model_finalize(served.model)
            self._registry.close()

    def _begin(self, name: str, directory: str, config: str, server: str) -> None:
        _log.debug("backend '%s' of %s in %s", name, server, directory)
        # Where the models of every backend here may import from, as in Triton.
        folder = Path(directory).parent / "python"
        self._backend = LentBackend(self._stubs, name, str(folder))
        self._directory, self._config = directory, config

    def _change_log(self, info: bool, warning: bool, error: bool, verbose: bool) -> None:
        self._stubs.change_log(
            {
                "log_info": info,
                "log_warning": warning,
                "log_error": error,
                "log_verbose_level": int(verbose),
            }
        )
        _log.setLevel(logging.DEBUG if verbose else logging.INFO)

    # Models

    def _load(self, number: int, *described: Any) -> None:
        _apart("moonpool-load", self._load_apart, number, *described)

    def _load_apart(
        self, number: int, name: str, version: int, directory: str, config: str, completes: bool
    ) -> None:
        model: Model | None = None
        try:
            rules = rules_of(self._backend.name, self._config)
            served = ServedModel(name, version, directory, config, self._directory, rules.limits)
            rules.apply_to(served.model)
            model = served.model
            served.model.completes = completes
            self._backend.model_initialize(served.model)
        except Exception as error:
            failure = as_load_failure(error, f"model '{name}'")
            told = refusal(failure, f"model '{name}':", model)
            if (line := missing_file_line(failure)) is not None:
                _log.info("%s", line)
            self._post.tell(Word.REFUSED, number, code_of(failure), told)
            return
        served.warn()
        self._models[number] = served
        self._post.tell(Word.MODEL_READY, number, *served.facts())

    def _unload(self, number: int) -> None:
        served = self._models.pop(number)
        _apart("moonpool-unload", self._unload_apart, number, served)

    def _unload_apart(self, number: int, served: ServedModel) -> None:
        self._backend.model_finalize(served.model)
        self._post.tell(Word.ENDED, number)

    # Instances

    def _start(self, number: int, model: int, name: str, kind: str, device_id: int) -> None:
        served = self._models[model]
        instance = self._instances[number] = LentInstance(
            self._backend,
            served.model,
            number,
            name,
            kind,
            device_id,
            self._post,
            self._stubs.reactor,
        )
        _apart("moonpool-start", self._start_apart, number, instance)

    def _start_apart(self, number: int, instance: LentInstance) -> None:
        if not instance.start():
            self._instances.pop(number, None)

    def _lose(
        self, number: int, generation: int, is_executing: bool, is_shortage: bool, why: str
    ) -> None:
        if number in self._instances:
            self._instances[number].lose(
                generation, is_executing=is_executing, is_shortage=is_shortage, why=why
            )

    def _exceed(self, number: int, generation: int) -> None:
        if number in self._instances:
            self._instances[number].exceed(generation)

    def _renew(self, number: int, generation: int, served: int) -> None:
        if number in self._instances:
            self._instances[number].renew(generation, served)

    def _enlarge(self, question: int, number: int, *wanted: int) -> None:
        if number in self._instances:
            # Setting memory aside takes a millisecond for every few megabytes.
            instance = self._instances[number]
            _apart("moonpool-grow", self._enlarge_apart, question, instance, *wanted)
        else:
            # It did not start, and its process may still ask.
            self._post.tell(Word.REFUSED, question, _UNAVAILABLE, "the instance has ended")

    def _enlarge_apart(
        self,
        question: int,
        instance: LentInstance,
        generation: int,
        writer: int,
        region: int,
        present_bytes: int,
        needed_bytes: int,
    ) -> None:
        needed_bytes += -needed_bytes % mmap.PAGESIZE
        try:
            memory = instance.memory(generation, writer)
            size_bytes, fd = memory.give_elsewhere(_SHIM, region, present_bytes, needed_bytes)
        except MoonpoolError as error:
            self._post.tell(Word.REFUSED, question, code_of(error), str(error))
            instance.check_wear(generation)
        else:
            self._post.tell(Word.SET_ASIDE, question, size_bytes, fds=(fd,))

    def _take_back(self, number: int, generation: int, writer: int, region: int) -> None:
        if number in self._instances:
            with suppress(MoonpoolError):  # that process is gone, and its memory with it
                self._instances[number].memory(generation, writer).take_back(_SHIM, region)

    def _scrub(self, question: int, number: int, text: str) -> None:
        told = self._models[number].scrubbed(text) if number in self._models else scrubbed(text)
        self._post.tell(Word.SCRUBBED, question, told)

    def _end(self, number: int) -> None:
        _apart("moonpool-end", self._instances.pop(number).end)


def _apart(name: str, act: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=act, args=arguments, name=name, daemon=True).start()


def launch(channel_fd: int) -> None:
    """Launch until the end of file on this socket, which this owns."""
    post = Post(Channel(socket.socket(fileno=channel_fd)), End.LAUNCHER)
    notes = Notes(post)
    _log.addHandler(notes)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    try:
        Launcher(post).run()
    finally:
        _log.removeHandler(notes)
        post.close()
