"""Ensembles as hosted models: their members, their life with them, and the checks before they load.

Theory of operation. An ensemble is a `HostedModel` without instances, whose scheduler asks other models. It serves
while it and all its members do. A member that is replaced is found by the next step, since every step looks for its
model anew. `ask_ready` has no lock: it asks one member after the other, and each answer comes once, on any thread.

*Its life.* The registry loads, replaces and unloads models, and tells `EnsembleBook` of each. The book has the members
of an ensemble loaded before it. After a load it has those ensembles unloaded that the model does not fit any more, and
those loaded again that went with one of their models, when all of them are back. The thread that has loaded the model
does this, and does not hold its model lock any more: it acquires that of one ensemble after the other. An unload takes
the ensembles above the model out of the table in the same hold of the registry's lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.graph import EnsembleGraph, Unfit
from moonpool.runtime.ensemble.scheduler import EnsembleScheduler
from moonpool.runtime.errors import BackendError, ModelNotFound, NotGranted
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.model_statuses import LoadedVersions, with_code
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.ensembles import ENSEMBLE, EnsembleScheduling, EnsembleStep
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import DECOUPLED, ModelConfig, uncached
from moonpool.runtime.model.device_intake import DeviceIntake
from moonpool.runtime.model.request import Answer as Outcome
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.repository.loading import HostingRules, Wanted
from moonpool.runtime.repository.repository import ModelRepositories, RepositoryError
from moonpool.runtime.residency.residents import Residency
from moonpool.runtime.schedule.response_cache import CachingScheduler
from moonpool.runtime.stubs.readiness import Answer

_log = RuntimeLog("moonpool")
Find = Callable[[str, "int | None"], HostedModel]
# Raises an error unless somebody may load or unload the model of a name.
CheckName = Callable[[str], object]
# The most ensembles of which each is a step of the one before.
MOST_NESTED = 16


class EnsembleBackend(Backend):
    """The backend of ensembles, which executes nothing: their scheduler asks other models."""

    blocks = False

    def __init__(self) -> None:
        super().__init__(ENSEMBLE)

    def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        raise BackendError(f"an ensemble has no instances: {instance.name}, {len(requests)} requests")

    def device_intake(self, model: Model) -> DeviceIntake:  # noqa: ARG002
        # The first steps decide what they can take.
        return DeviceIntake(takes_devices=True)


class HostedEnsemble(HostedModel):
    """One version of an ensemble from load to unload. Its members are loaded before it."""

    # Returns a model as a client would find it. Set before the load.
    find: Find
    scheduler: EnsembleScheduler

    def _new_scheduler(self) -> EnsembleScheduler:
        config = self.model.config
        graph = EnsembleGraph(config, scheduling_of(config))
        arguments = self.model, graph, self.find, self._reactor, self._executor
        if self._cache is None:
            scheduler = EnsembleScheduler(*arguments)
        else:
            scheduler = _CachingEnsembleScheduler(self._cache, *arguments)
        # A member that is unloaded with the ensemble is found no more, but finishes the requests of the ensemble.
        for number in range(len(scheduler.graph.steps)):
            scheduler.member(number)
        return scheduler

    @property
    def is_chain(self) -> bool:
        """True if its steps run one after the other, once each."""
        return bool(self.scheduler.graph.flow().chain)

    def weigh(self, width_of: Callable[[str], int]) -> None:
        """Note how many requests one request to each member has open at a time.

        They change when members are replaced.
        """
        steps = scheduling_of(self.model.config).steps
        self.scheduler.weights = [width_of(step.model) for step in steps]

    def is_fit(self) -> bool:
        """Return True if the ensemble fits its members as they are now."""
        config = self.model.config
        return checked(config, self.find).decoupled == config.decoupled

    def members(self) -> Iterator[HostedModel]:
        """Yield the models of its steps. Raises `MoonpoolError` for one that is not there."""
        for step in scheduling_of(self.model.config).steps:
            yield self.find(step.model, step.version)

    def why_not_serving(self) -> str | None:
        if self.machine.state is not ModelState.READY:
            return f"{self.machine.state}: {self.machine.because}"
        try:
            for member in self.members():
                reason = member.why_not_serving()
                if reason is not None:
                    return f"model '{member.model.name}' of a step is not ready: {reason}"
        except MoonpoolError as error:
            return str(error)
        return None

    def ask_ready(self, answer: Answer) -> None:
        reason = self.why_not_serving()
        if reason is not None:
            answer(reason)
            return
        try:
            members = list(dict.fromkeys(self.members()))
        except MoonpoolError as error:
            answer(str(error))
            return
        _ask_in_turn(iter(members), answer)


class _CachingEnsembleScheduler(CachingScheduler, EnsembleScheduler):
    """Looks for a response first: an answer from the cache asks no model."""


def _ask_in_turn(members: Iterator[HostedModel], answer: Answer) -> None:
    member = next(members, None)
    if member is None:
        answer(None)
        return
    name = member.model.name

    def go_on(reason: str | None) -> None:
        if reason is None:
            _ask_in_turn(members, answer)
        else:
            answer(f"model '{name}' of a step is not ready: {reason}")

    member.ask_ready(go_on)


def scheduling_of(config: ModelConfig) -> EnsembleScheduling:
    """Return the steps of an ensemble. Raises `BackendError` if the model is not an ensemble."""
    if config.ensemble is None:
        raise BackendError(f"model '{config.name}' is not an ensemble")
    return config.ensemble


def _step_models(config: ModelConfig) -> list[str]:
    """Return the model of each step of an ensemble, in order; none of other models."""
    return [] if config.ensemble is None else [step.model for step in config.ensemble.steps]


def checked(config: ModelConfig, find: Find) -> ModelConfig:
    """Check an ensemble against its members, which are loaded. Returns the configuration, decoupled if one of them is.

    Raises `Unfit` with Triton's texts.
    """

    def member_of(step: EnsembleStep) -> ModelConfig:
        try:
            return find(step.model, step.version).model.config
        except MoonpoolError:
            what = f"ensemble '{config.name}' depends on '{step.model}' "
            if step.version is None:
                raise Unfit(f"{what}which has no loaded version.") from None
            raise Unfit(f"{what}whose required version {step.version} is not loaded.") from None

    is_decoupled = EnsembleGraph(config, scheduling_of(config)).check(member_of)
    if is_decoupled and config.response_cache:
        raise Unfit(uncached(config.name, DECOUPLED))
    return config.with_decoupled(is_decoupled)


def _check_no_circle(name: str, members_of: Callable[[str], Iterable[str]]) -> None:
    """Raise `Unfit` if an ensemble is a step of itself, or of one of its steps, and so on.

    `members_of` returns the names of the models in the steps of an ensemble, none for other models.
    """
    seen: set[str] = set()
    reached = [name]
    while reached:
        ensemble = reached.pop()
        for member in members_of(ensemble):
            if member == name:
                raise Unfit(f"circular dependency between ensembles: {name} -> ... -> {ensemble} -> {name}")
            if member not in seen:
                seen.add(member)
                reached.append(member)


class _Nesting(NamedTuple):
    """The requests that one request to a model becomes, itself included, if each model responds once, and how many
    ensembles lie in each other there.
    """

    requests: int
    depth: int


_NO_ENSEMBLE = _Nesting(1, 0)


def _nesting_of(
    name: str, steps_of: Callable[[str], Sequence[str]], limits: ConfigLimits, known: dict[str, _Nesting]
) -> _Nesting:
    """Return the nesting of a model. `steps_of` returns the model of each step of an ensemble, nothing for other
    models.

    `known` has what was found before, and gets what is found. Raises `Unfit` if a request to an ensemble becomes too
    many, or ensembles are nested too deep: what a request does recurses with that depth.
    """
    # The ensembles whose members are being looked at. Each is a member of the one before.
    inside: dict[str, Sequence[str]] = {}
    left = [name]
    while left:
        each = left[-1]
        if each in known:
            left.pop()
            continue
        steps = inside.get(each)
        if steps is None:
            steps = inside[each] = steps_of(each)
            _check_depth(name, len(inside) if steps else 0)
            # One that lies in itself is for `_check_no_circle`.
            left += [member for member in dict.fromkeys(steps) if member not in inside]
            continue
        del inside[each]
        left.pop()
        members = [known.get(step, _NO_ENSEMBLE) for step in steps]
        depth = 1 + max(member.depth for member in members) if members else 0
        _check_depth(name, depth)
        requests = sum(member.requests for member in members)
        if requests > limits.ensemble_requests:
            raise Unfit(
                f"a request to ensemble '{each}' becomes {requests} requests to the models of its steps, "
                f"with those of ensembles among them, and {limits.ensemble_requests} is the most"
                f"{limits.advice('ensemble_requests')}"
            )
        known[each] = _Nesting(1 + requests, depth)
    return known[name]


def _check_depth(name: str, depth: int) -> None:
    if depth > MOST_NESTED:
        raise Unfit(
            f"ensembles are nested more than {MOST_NESTED} deep in '{name}': have the models of the inner ones as steps"
        )


def _member_failed(name: str, member: str, error: MoonpoolError) -> Unfit:
    """Make the error of an ensemble one of whose members cannot be loaded."""
    version = getattr(error, "version", None)
    where = "" if version is None else f"version {version} is at UNAVAILABLE state: "
    begin = (
        f"ensemble '{name}' depends on '{member}' which has no loaded version. Model '{member}' loading "
        f"failed with error: {where}"
    )
    failure = Unfit(f"{begin}{with_code(error)};")
    failure.is_confined = getattr(error, "is_confined", True)
    failure.instead = error.instead
    if error.public_message is not None:
        failure.public_message = f"{begin}{with_code(error, error.public_message)};"
    return failure


class EnsembleLoader(Protocol):
    """The registry of models, as its book of ensembles needs it."""

    rules: HostingRules
    repositories: ModelRepositories
    residency: Residency

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """Return a model version."""

    def load(self, wanted: Wanted, asker: str | None = None, *, may: CheckName = ..., is_implied: bool = False) -> None:
        """Load or reload a model, and others with it for which `may` does not raise."""

    def unload(self, name: str, asker: str | None = None) -> None:
        """Unload a model."""


class EnsembleBook:
    """The ensembles of a registry: what they need to load, and what becomes of them when their models come and go.

    `models` is the registry's table. `lock` guards it and what is noted here.
    """

    def __init__(self, registry: EnsembleLoader, models: Mapping[str, LoadedVersions], lock: threading.Lock) -> None:
        self._registry, self._models, self._lock = registry, models, lock
        # Ensembles that were unloaded with a member, to be loaded again with it; and their members.
        self._awaiting: dict[str, tuple[Wanted, list[str]]] = {}
        # Models that were loaded for an ensemble alone.
        self._implied: set[str] = set()

    # Who depends on whom

    def dependents(self, name: str) -> list[str]:
        """Return the loaded ensembles that have this model in a step."""
        # Other threads change the table meanwhile. To copy it is atomic.
        return [
            each
            for each, loaded in list(self._models.items())
            if loaded.config.ensemble is not None and name in loaded.config.ensemble.models
        ]

    def above(self, names: Sequence[str]) -> list[str]:
        """Return the loaded ensembles that depend on one of these models, also through others."""
        found: list[str] = []
        reached = list(names)
        while reached:
            new = [each for each in self.dependents(reached.pop()) if each not in found]
            found += new
            reached += new
        return found

    def check_unload(self, name: str, may: CheckName, *, with_members: bool) -> list[str]:
        """Let `may` check each other model that an unload of this one takes with it. Needs the lock.

        Returns the models that were loaded for this ensemble alone, if it goes `with_members`.
        """
        going = [name]
        for each in going if with_members else ():
            going += [member for member in self._alone(each) if member not in going]
        for each in (*going[1:], *self.above(going)):
            if each != name:
                may(each)
        return self._alone(name) if with_members else []

    def _alone(self, name: str) -> list[str]:
        """Return the models that were loaded for this ensemble and that no other one has in a step. Needs the lock."""
        loaded = self._models.get(name)
        ensemble = None if loaded is None else loaded.config.ensemble
        return [
            member
            for member in ([] if ensemble is None else ensemble.models)
            if member in self._implied and self.dependents(member) == [name]
        ]

    # Loads and unloads of models

    def prepare(self, models: Sequence[Model], may: CheckName) -> None:
        """Load the members that are not loaded, and check the versions of an ensemble against them. Raises `Unfit`, and
        what `may` raises.
        """
        registry, name, config = self._registry, models[0].name, models[0].config
        steps_of = cache(lambda each: self._steps_of(each, name, config))
        _check_no_circle(name, steps_of)
        # Before anything recurses.
        _nesting_of(name, steps_of, registry.rules.limits, {})
        missing = []
        absent = [each for each in scheduling_of(config).models if each not in self._models]
        for member in absent:
            may(member)
        for member in absent:
            try:
                registry.load(Wanted(member), name, may=may, is_implied=True)
            except NotGranted:
                raise
            except ModelNotFound:
                missing.append(member)
            except MoonpoolError as error:
                if isinstance(error, RepositoryError) and error.code == "NOT_FOUND":
                    missing.append(member)
                    continue
                raise _member_failed(name, member, error) from error
        if missing:
            shown = ", ".join(missing)
            raise Unfit(f"ensemble {name} contains models that are not available or ambiguous: {shown}")
        for model in models:
            model.config = checked(model.config, registry.find)
        for member in scheduling_of(config).models:
            registry.residency.asks(name, member)

    def _steps_of(self, name: str, loading: str, config: ModelConfig) -> list[str]:
        """Return the model of each step of an ensemble, loaded or not; none of other models. `loading` has `config`."""
        if name != loading:
            loaded = self._models.get(name)
            if loaded is not None:
                config = loaded.config
            else:
                try:
                    config = self._registry.repositories.find(name).config(partial=True)
                except MoonpoolError:  # its own load says what is wrong
                    return []
        return _step_models(config)

    def weigh(self, name: str, coming: LoadedVersions) -> None:
        """Note in an ensemble that is to come into the table, and in those above it, how many requests one request to a
        member has open at a time. Needs the lock.

        Raises `Unfit` if a request to one of them becomes too many in all; then nothing has changed.
        """
        models = {**self._models, name: coming}
        known: dict[str, _Nesting] = {}
        widths: dict[str, int] = {}

        def steps_of(each: str) -> list[str]:
            return _step_models(models[each].config) if each in models else []

        def width_of(each: str) -> int:
            if each not in widths:
                inner = list(map(width_of, steps_of(each)))
                hosted = models[each].latest if inner else None
                is_chain = isinstance(hosted, HostedEnsemble) and hosted.is_chain
                widths[each] = 1 + (max(inner) if is_chain else sum(inner))
            return widths[each]

        changing = [name, *self.above([name])]
        for each in changing:
            _nesting_of(each, steps_of, self._registry.rules.limits, known)
        for each in changing:
            for hosted in models[each].versions.values():
                if isinstance(hosted, HostedEnsemble):
                    hosted.weigh(width_of)

    def note_load(self, name: str, *, is_implied: bool) -> None:
        """Note that a model was loaded, for an ensemble alone or not."""
        with self._lock:
            self._awaiting.pop(name, None)
            (self._implied.add if is_implied else self._implied.discard)(name)

    def note_unload(self, name: str) -> None:
        """Note that a model is to be unloaded. Needs the lock."""
        self._awaiting.pop(name, None)
        self._implied.discard(name)

    def load_again(self, name: str, loaded: LoadedVersions) -> None:
        """Note that an ensemble, which is to be unloaded, comes back with its members. Needs the lock."""
        self._awaiting[name] = loaded.wanted, scheduling_of(loaded.config).models

    def follow(self, name: str, asker: str | None) -> None:
        """Let ensembles follow a model that was loaded: those that it does not fit any more go, and those that waited
        for it come.
        """
        self._forget_responses(name)
        for each in self.dependents(name):
            loaded = self._models.get(each)
            if loaded is None or _is_fit(loaded):
                continue
            _log.warning("ensemble '%s' is loaded again: model '%s' has changed", each, name)
            with contextlib.suppress(ModelNotFound):
                self._registry.unload(each, asker)
            with self._lock:
                self.load_again(each, loaded)
        for each, (wanted, members) in list(self._awaiting.items()):
            if name in members and all(member in self._models for member in members):
                try:
                    self._registry.load(wanted, asker)
                except MoonpoolError as error:
                    _log.error("ensemble '%s' cannot be loaded again: %s", each, error)

    def _forget_responses(self, name: str) -> None:
        """Drop the kept responses of ensembles that send requests to this model: it may answer otherwise now."""
        for each in self.above([name]):
            loaded = self._models.get(each)
            for hosted in [] if loaded is None else loaded.versions.values():
                hosted.forget_responses()


def _is_fit(loaded: LoadedVersions) -> bool:
    """Return True if an ensemble fits its members as they are now."""
    versions = loaded.versions.values()
    try:
        return all(each.is_fit() for each in versions if isinstance(each, HostedEnsemble))
    except MoonpoolError:
        return False
