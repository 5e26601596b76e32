"""The launcher's work: it loads models, starts and ends their instances, and reports deaths, as the shim asks.

Theory of operation. The main thread reads the shim's messages and does what is quick itself. Loading and unloading a
model, starting and ending an instance, and making memory each get a thread, because a slow model must not delay another
one. `_models` and `_instances` are changed by the main thread and by those threads, one key at a time, and the shim
never uses a number again, so they need no lock. A message about an instance that is gone is ignored, or refused if it
asks for something.

The launcher is the parent of all stubs of its backend, so a tritonserver, with its many threads and GPU libraries,
starts only one process itself. If the launcher dies, the kernel kills its stubs (PR_SET_PDEATHSIG), and the shim sees
the end of the channel. If the server dies, the channel ends here; then `run` ends all instances without letting them
finalize, finalizes the models, and returns.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import CODES, MoonpoolError, PeerGone
from moonpool.ipc.messages import PROTOCOL_VERSION
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.hosting.backends import BackendDirectory
from moonpool.runtime.hosting.model_control import POLLED
from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.isolation.public_text import scrubbed
from moonpool.runtime.log import RuntimeLog, flush
from moonpool.runtime.model.backend import Model
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.repository.repository import ModelRepositories
from moonpool.runtime.schedule.failures import as_load_failure, missing_file_line
from moonpool.runtime.triton.launcher_channel import LauncherChannel
from moonpool.runtime.triton.lent import LentBackend, LentInstance
from moonpool.runtime.triton.messages import LAUNCHER_VERSION, End, Word, code_of
from moonpool.runtime.triton.models import ServedModel, refusal, rules_of
from moonpool.runtime.triton.notes import Notes
from moonpool.runtime.version import VERSION

_log = RuntimeLog("moonpool")
_UNAVAILABLE = CODES.index("UNAVAILABLE")


class Launcher:
    """Reads messages on one thread; slow work has threads of its own."""

    def __init__(self, peer: LauncherChannel) -> None:
        self._peer = peer
        # The registry brings what stubs share: reactor, metrics, log levels. It holds no models.
        self._registry = ModelRegistry(ModelRepositories(()), [], BackendDirectory(), 0.0, False, None)
        self._registry.refuses_control = POLLED
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
            Word.LOST: partial(self._pass_on, LentInstance.lose),
            Word.OVERDUE: partial(self._pass_on, LentInstance.exceed),
            Word.RENEW: partial(self._pass_on, LentInstance.renew),
            Word.MEMORY: self._enlarge,
            Word.RETURNED: self._take_back,
            Word.SCRUB: self._scrub,
            Word.END: self._end,
            Word.END_MODEL: self._unload,
        }

    def run(self) -> None:
        """Serve the shim until the channel ends; then end all instances and models."""
        self._peer.send(Word.HELLO, LAUNCHER_VERSION, PROTOCOL_VERSION, VERSION, os.getpid())
        try:
            while True:
                (word, *fields), _ = self._peer.receive()
                self._heard[word](*fields)
        except PeerGone:
            _log.debug("the server has ended, or no longer needs this backend")
        finally:
            in_parallel(lambda each: each.end(finalizes=False), [*self._instances.values()], "moonpool-end")
            for served in list(self._models.values()):
                self._backend.model_finalize(served.model)
            self._registry.close()

    def _begin(self, name: str, directory: str, config: str, server: str) -> None:
        _log.debug("backend '%s' of %s in %s", name, server, directory)
        # As in Triton, models of every backend may import from the folder of the backend `python`.
        folder = Path(directory).parent / "python"
        self._backend = LentBackend(self._stubs, name, str(folder))
        self._directory, self._config = directory, config

    def _change_log(self, info: bool, warning: bool, error: bool, verbose: bool) -> None:
        self._stubs.change_log(
            {"log_info": info, "log_warning": warning, "log_error": error, "log_verbose_level": int(verbose)}
        )
        _log.logger.setLevel(logging.DEBUG if verbose else logging.INFO)

    # Models

    def _load(self, number: int, *described: Any) -> None:
        try:
            _apart("moonpool-load", self._load_apart, number, *described)
        except OutOfThreads as error:
            self._peer.send(Word.REFUSED, number, code_of(error), str(error))

    def _load_apart(self, number: int, name: str, version: int, directory: str, config: str, completes: bool) -> None:
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
            reason = refusal(failure, f"model '{name}':", model)
            if (line := missing_file_line(failure)) is not None:
                _log.info("%s", line)
            self._peer.send(Word.REFUSED, number, code_of(failure), reason)
            return
        served.warn()
        self._models[number] = served
        self._peer.send(Word.MODEL_READY, number, *served.facts())

    def _unload(self, number: int) -> None:
        served = self._models.pop(number)
        _apart_or_here("moonpool-unload", self._unload_apart, number, served)

    def _unload_apart(self, number: int, served: ServedModel) -> None:
        self._backend.model_finalize(served.model)
        self._peer.send(Word.ENDED, number)

    # Instances

    def _start(self, number: int, model: int, name: str, kind: str, device_id: int) -> None:
        served = self._models[model]
        instance = self._instances[number] = LentInstance(
            self._backend, served.model, number, name, kind, device_id, self._peer, self._stubs.reactor
        )
        try:
            _apart("moonpool-start", self._start_apart, number, instance)
        except OutOfThreads as error:
            del self._instances[number]
            self._peer.send(Word.REFUSED, number, code_of(error), str(error))

    def _start_apart(self, number: int, instance: LentInstance) -> None:
        if not instance.start():
            self._instances.pop(number, None)

    def _pass_on(self, hear: Callable[..., None], number: int, *fields: Any) -> None:
        if number in self._instances:
            hear(self._instances[number], *fields)

    def _enlarge(self, question: int, number: int, *wanted: int) -> None:
        if number in self._instances:
            # Allocating the pages takes a millisecond for every few megabytes.
            instance = self._instances[number]
            try:
                _apart("moonpool-grow", self._enlarge_apart, question, instance, *wanted)
            except OutOfThreads as error:
                self._peer.send(Word.REFUSED, question, code_of(error), str(error))
        else:
            # The instance did not start, and its process may still ask.
            self._peer.send(Word.REFUSED, question, _UNAVAILABLE, "the instance has ended")

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
            size_bytes, fd = memory.give_elsewhere(region, present_bytes, needed_bytes)
        except MoonpoolError as error:
            self._peer.send(Word.REFUSED, question, code_of(error), str(error))
            instance.check_wear(generation)
        else:
            self._peer.send(Word.SET_ASIDE, question, size_bytes, fds=(fd,))

    def _take_back(self, number: int, generation: int, writer: int, region: int) -> None:
        if number in self._instances:
            with suppress(MoonpoolError):  # the process has ended, and its memory is free
                self._instances[number].memory(generation, writer).take_back(region)

    def _scrub(self, question: int, number: int, text: str) -> None:
        public = self._models[number].scrubbed(text) if number in self._models else scrubbed(text)
        self._peer.send(Word.SCRUBBED, question, public)

    def _end(self, number: int) -> None:
        _apart_or_here("moonpool-end", self._instances.pop(number).end)


def _apart(name: str, act: Callable[..., None], *arguments: Any) -> None:
    """Act on a new thread. Raises `OutOfThreads`."""
    start_thread(threading.Thread(target=act, args=arguments, name=name, daemon=True))


def _apart_or_here(name: str, act: Callable[..., None], *arguments: Any) -> None:
    """Act on a new thread. If there is none, others wait meanwhile: an end cannot be refused, as the shim waits for
    it.
    """
    try:
        _apart(name, act, *arguments)
    except OutOfThreads:
        act(*arguments)


def launch(channel_fd: int) -> None:
    """Run a launcher on this socket until its end of file. Owns the socket."""
    peer = LauncherChannel(Channel(socket.socket(fileno=channel_fd)), End.LAUNCHER)
    notes = Notes(peer)
    _log.logger.addHandler(notes)
    _log.logger.setLevel(logging.INFO)
    _log.logger.propagate = False
    try:
        Launcher(peer).run()
    finally:
        flush()
        _log.logger.removeHandler(notes)
        peer.close()
