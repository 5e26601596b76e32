"""Ensembles as hosted models: their members, their life with them, and the checks before they load.

Theory of operation. An ensemble is a `HostedModel` without instances, whose scheduler asks other models. It serves
while it and all its members do. A member that is replaced is found by the next step, since every step looks for its
model anew.

`check_ready` has no lock: it asks one member after the other, and each answer comes once, on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.graph import EnsembleGraph, Unfit
from moonpool.runtime.ensemble.scheduler import EnsembleScheduler
from moonpool.runtime.errors import BackendError
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.model_statuses import LoadedVersions, with_code
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.ensembles import ENSEMBLE, EnsembleScheduling, EnsembleStep
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import DECOUPLED, ModelConfig, uncached
from moonpool.runtime.model.device_intake import DeviceIntake
from moonpool.runtime.model.request import Answer as Outcome
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.schedule.response_cache import CachingScheduler
from moonpool.runtime.stubs.readiness import Answer

Find = Callable[[str, "int | None"], HostedModel]
# The most ensembles of which each is a step of the one before.
MOST_NESTED = 16


class EnsembleBackend(Backend):
    """The backend of ensembles, which executes nothing: their scheduler asks other models."""

    blocks = False

    def __init__(self) -> None:
        super().__init__(ENSEMBLE)

    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> list[Outcome]:
        raise BackendError(
            f"an ensemble has no instances: {instance.name}, {len(requests)} requests"
        )

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
        raise BackendError(f"model '{config.name}' is no ensemble")
    return config.ensemble


def step_models(config: ModelConfig) -> list[str]:
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


def check_no_circle(name: str, members_of: Callable[[str], Iterable[str]]) -> None:
    """Raise `Unfit` if an ensemble is a step of itself, or of one of its steps, and so on.

    `members_of` returns the names of the models in the steps of an ensemble, none for other models.
    """
    seen: set[str] = set()
    reached = [name]
    while reached:
        ensemble = reached.pop()
        for member in members_of(ensemble):
            if member == name:
                raise Unfit(
                    f"circular dependency between ensembles: {name} -> ... -> {ensemble} -> {name}"
                )
            if member not in seen:
                seen.add(member)
                reached.append(member)


class Nesting(NamedTuple):
    """The requests that one request to a model becomes, itself included, if each model responds once, and how many
    ensembles lie in each other there.
    """

    requests: int
    depth: int


_NO_ENSEMBLE = Nesting(1, 0)


def nesting_of(
    name: str,
    steps_of: Callable[[str], Sequence[str]],
    limits: ConfigLimits,
    known: dict[str, Nesting],
) -> Nesting:
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
            # One that lies in itself is for `check_no_circle`.
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
                f"a request to ensemble '{each}' becomes {requests} requests to the models of its steps, with those of ensembles among them, and "
                f"{limits.ensemble_requests} is the most{limits.advice('ensemble_requests')}"
            )
        known[each] = Nesting(1 + requests, depth)
    return known[name]


def _check_depth(name: str, depth: int) -> None:
    if depth > MOST_NESTED:
        raise Unfit(
            f"ensembles are nested more than {MOST_NESTED} deep in '{name}': have the models of the inner ones as steps"
        )


def dependents_of(name: str, ensembles: Iterable[tuple[str, ModelConfig]]) -> list[str]:
    """Return the names of those ensembles that have this model in a step."""
    return [
        each
        for each, config in ensembles
        if config.ensemble is not None and name in config.ensemble.models
    ]


def member_failed(name: str, member: str, error: MoonpoolError) -> Unfit:
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


def weigh(
    name: str, models: Mapping[str, LoadedVersions], above: Sequence[str], limits: ConfigLimits
) -> None:
    """Note in an ensemble, and in those above it, how many requests one request to a member has open at a time.
    `models` has all that are loaded.

    Raises `Unfit` if a request to one of them becomes too many in all; then nothing has changed.
    """
    known: dict[str, Nesting] = {}
    widths: dict[str, int] = {}

    def steps_of(each: str) -> list[str]:
        return step_models(models[each].config) if each in models else []

    for each in (name, *above):
        nesting_of(each, steps_of, limits, known)

    def width_of(each: str) -> int:
        if each not in widths:
            inner = list(map(width_of, steps_of(each)))
            hosted = models[each].latest if inner else None
            is_chain = isinstance(hosted, HostedEnsemble) and hosted.is_chain
            widths[each] = 1 + (max(inner) if is_chain else sum(inner))
        return widths[each]

    for each in (name, *above):
        for hosted in models[each].versions.values():
            if isinstance(hosted, HostedEnsemble):
                hosted.weigh(width_of)
