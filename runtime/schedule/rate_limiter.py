"""Lets instances of all models execute only while the resources that their configurations name are free.

Theory of operation. `ResourcePool` decides, and is pure. `RateLimiter` is the pool of one runtime, behind a lock. A
lane asks its `ModelPermits` before a batch is formed, so requests go on waiting in their queue, where they may time
out, be cancelled, and join a larger batch. Nothing blocks, and there is no thread.

*Permits.* An instance has a permit while it executes and for no longer. `form` asks for an instance that is idle while
requests wait. With a permit at once, the queue forms its batch; if the queue keeps the requests back, the permit
returns in the same step. Without one, the instance waits in the pool (`_waiting`), and `RateLimiter` calls `wake` once
it has the permit. The reactor then forms the batch (`_use_granted`), and asks for no instance but those that have
executed: two models whose queues keep requests back would otherwise hand a permit to each other for ever. Everything
that lets requests go (a request, an instance, a timer) asks.

*Return.* `_return_used` runs before anything is asked or formed, and returns the permits of instances that have left
the lane's `_busy`: answered, lost, or dead. Each way out of `_busy` is followed by `form`. An instance may be
restarted, idle, and have a next batch before the loss of its last one is settled; it is in `_busy` all the time then,
and keeps its one permit.

*Order.* Of those that wait, the one that has executed least, times its priority, goes first. If its resources are not
free, nobody behind it gets any of them, so an instance that needs much is not starved by those that need little.
Others, whose resources are free, go at once.

*Locks.* The lane's lock guards a `ModelPermits`. The lock of `RateLimiter` is taken inside it, and nothing is called
with that one held. `wake` is called after that, but perhaps with the lock of another lane held, so it only gives the
reactor something to do.

*Circles.* An instance that asks another model while it executes keeps its permit, and the other model may need the same
resources. Its request would wait for ever. `ask` finds that: all that is *stuck* are the instances with a permit whose
answers depend on the new request. If no instance of the asked model can get its resources from what they leave, the
request is refused. Each circle closes with such a request, and the reactor's thread submits all of them, so nothing
comes between the look and the note.

*Signals.* Permits concern other callers, so an interruptible thread neither takes nor returns one. The reactor does:
the lane is not atomic.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.model.config.model import RateLimits
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.schedule.lane import Execution
from moonpool.runtime.schedule.request_queue import Rejected
from moonpool.runtime.schedule.scheduler import Scheduler

MemberT = TypeVar("MemberT", bound=Hashable)
# The name of a resource and its device, None for a resource that all devices share.
Resource = tuple[str, "int | None"]

_TOO_FEW = (
    'Resource count for "{}" is limited to {} which will prevent scheduling of one or more model instances, the '
    "minimum "
    "required count is {}"
)
_BOTH = 'Resource "{}" is present as both global and device-specific resource in the model configuration.'
_FORMAT = (
    "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got {:.80}"
)
_GIVEN = re.compile(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}))?", re.ASCII)


def read_resources(texts: Iterable[str]) -> dict[Resource, int]:
    """Read counts as `NAME:COUNT`, for each device, or `NAME:COUNT:DEVICE`. Raises ValueError, with Triton's text.

    Of two counts of one resource, the lower one holds.
    """
    counts: dict[Resource, int] = {}
    for text in texts:
        found = _GIVEN.fullmatch(text)
        if found is None:
            raise ValueError(_FORMAT.format(text))
        name, count, device = found.groups()
        resource = name, None if device is None else int(device)
        counts[resource] = min(int(count), counts.get(resource, int(count)))
    return counts


class ResourceCount:
    """The number of a resource that is in use, and its limit."""

    __slots__ = ("in_use", "limit")

    def __init__(self) -> None:
        self.in_use = self.limit = 0


@dataclass(slots=True)
class ResourceMember:
    """A member of a pool: what it needs, and whether it waits or holds that."""

    needs: dict[Resource, int]
    # The same, with the counts of the pool.
    counts: list[tuple[ResourceCount, int]]
    weight: int
    # The executions so far, times the weight.
    rank: int
    # The place among those that wait, if it does.
    turn: int | None = None
    is_holding: bool = False


class ResourcePool(Generic[MemberT]):
    """Decides which members may have their resources. Pure, and not thread-safe."""

    def __init__(self, given: Mapping[Resource, int]) -> None:
        """`given` has the count of each resource; if it is empty, a resource has as many as the member that needs most
        of it.
        """
        self._given = given
        self._members: dict[MemberT, ResourceMember] = {}
        # The number of members that wait.
        self._waiting = 0
        self._turns = 0
        self._counts: defaultdict[Resource, ResourceCount] = defaultdict(ResourceCount)

        self.limits: Mapping[Resource, int] = {}

    @property
    def in_use(self) -> Counter[Resource]:
        """The resources that members hold, with their counts."""
        return Counter({name: each.in_use for name, each in self._counts.items() if each.in_use})

    def join(self, joining: Mapping[MemberT, tuple[RateLimits, int]]) -> list[MemberT]:
        """Take in members by what they need and their devices. Raises ValueError, with Triton's texts; then none has
        joined.

        Returns those that get their resources now, as a member that needs more than others may raise a limit. A member
        that shares a resource with others begins as if it had executed as often as the least of them.
        """
        joined = {}
        for member, (needed, device) in joining.items():
            needs = _needs(needed, device)
            joined[member] = ResourceMember(needs, [], max(1, needed.priority), 0)
        limits = self._limits_for([*self._members.values(), *joined.values()])
        for new in joined.values():
            ranks = [each.rank for each in self._members.values() if each.needs.keys() & new.needs.keys()]
            new.rank = min(ranks, default=0)
        for new in joined.values():
            new.counts = [(self._counts[resource], count) for resource, count in new.needs.items()]
        self._members.update(joined)
        self._set_limits(limits)
        return self._grant()

    def _set_limits(self, limits: Mapping[Resource, int]) -> None:
        self.limits = limits
        for resource in list(self._counts):
            if resource in limits:
                self._counts[resource].limit = limits[resource]
            else:  # nobody needs it any more
                del self._counts[resource]

    def leave(self, members: Iterable[MemberT]) -> list[MemberT]:
        """Forget members, with what they hold. Returns those that get their resources now. The limits follow those that
        stay.
        """
        for member in members:
            self._give_back(member)
            self._members.pop(member, None)
        self._set_limits(self._limits_for(self._members.values()))
        return self._grant()

    def acquire(self, member: MemberT) -> bool:
        """Return True if a member holds its resources now. Otherwise it waits for them; one that has left never gets
        any.
        """
        state = self._members.get(member)
        if state is None:
            return False
        if not state.is_holding:
            if state.turn is None:
                self._wait(state)
            # It grants nothing to others: whatever frees resources or raises a limit has done that already.
            self._grant()
        return state.is_holding

    def release(self, member: MemberT, *, has_executed: bool, asks_again: bool = False) -> list[MemberT]:
        """Return what a member holds, or end its wait. Returns those that get their resources now.

        A member that asks again waits behind those of its rank, and may get them at once.
        """
        state = self._members.get(member)
        if state is None:
            return []
        if has_executed:
            state.rank += state.weight
        self._give_back(member)
        if asks_again:
            self._wait(state)
        return self._grant()

    def holds(self, member: MemberT) -> bool:
        """Return True if a member holds its resources."""
        state = self._members.get(member)
        return state is not None and state.is_holding

    @property
    def holders(self) -> list[MemberT]:
        """The members that hold their resources."""
        return [member for member, state in self._members.items() if state.is_holding]

    def can_get(self, member: MemberT, stuck: Collection[MemberT]) -> bool:
        """Return True if a member could get its resources though these others never return theirs."""
        state = self._members.get(member)
        if state is None:
            return True
        left = dict(self.limits)
        for each in stuck:
            held = self._members.get(each)
            for resource, count in held.needs.items() if held and held.is_holding else ():
                left[resource] -= count
        return all(left[resource] >= count for resource, count in state.needs.items())

    def rank(self, member: MemberT) -> int:
        """Return the executions of a member so far, times its priority. The least one goes first."""
        state = self._members.get(member)
        return 0 if state is None else state.rank

    def _wait(self, state: ResourceMember) -> None:
        self._turns += 1
        state.turn = self._turns
        self._waiting += 1

    def _end_wait(self, state: ResourceMember) -> None:
        if state.turn is not None:
            state.turn = None
            self._waiting -= 1

    def _give_back(self, member: MemberT) -> None:
        state = self._members.get(member)
        if state is not None:
            if state.is_holding:
                for each, count in state.counts:
                    each.in_use -= count
            self._end_wait(state)
            state.is_holding = False

    def _grant(self) -> list[MemberT]:
        """Give resources to those that wait, in order. What one waits for is kept from those behind it."""
        if not self._waiting:
            return []
        waiting = [
            (each.rank, each.turn, member, each) for member, each in self._members.items() if each.turn is not None
        ]
        waiting.sort(key=lambda entry: entry[:2])
        reserved: set[Resource] = set()
        granted = []
        for _, _, member, state in waiting:
            needs = state.needs
            if reserved.isdisjoint(needs) and _has(state):
                for count_of, count in state.counts:
                    count_of.in_use += count
                self._end_wait(state)
                state.is_holding = True
                granted.append(member)
            else:
                reserved.update(needs)
        return granted

    def _limits_for(self, members: Iterable[ResourceMember]) -> dict[Resource, int]:
        """Return the count of each resource that members need. Raises ValueError."""
        most: dict[Resource, int] = {}
        for member in members:
            for resource, count in member.needs.items():
                most[resource] = max(count, most.get(resource, 0))
        limits = {resource: self._count_of(resource, need) if self._given else need for resource, need in most.items()}
        for name, device in limits:
            if device is not None and (name, None) in limits:
                raise ValueError(_BOTH.format(name))
        return limits

    def _count_of(self, resource: Resource, least: int) -> int:
        name, device = resource
        # A device is of no account for a resource that all of them share.
        count = max(
            (
                count
                for (given, place), count in self._given.items()
                if given == name and (device is None or place in (None, device))
            ),
            default=0,
        )
        if count < least:
            raise ValueError(_TOO_FEW.format(name, count, least))
        return count


def _has(state: ResourceMember) -> bool:
    """Return True if there is what a member needs."""
    return all(each.in_use + count <= each.limit for each, count in state.counts)


def _needs(limits: RateLimits, device: int) -> dict[Resource, int]:
    return {(each.name, None if each.is_global else device): each.count for each in limits.resources}


class _Ask(NamedTuple):
    """A request of an instance that executes to a model with resources. `is_open` tells if the instance still waits for
    it.
    """

    asker: ModelInstance
    request: InferenceRequest
    target: ModelPermits
    is_open: Callable[[], bool]


_CIRCLE = (
    "Request of model '{}' to model '{}' would wait for ever: it needs resources of the rate limiter that {} until it "
    "is answered; give these models different resources"
)


class RateLimiter:
    """The resources of one runtime, for the instances of all its models. Any thread may call any method."""

    def __init__(self, given: Mapping[Resource, int]) -> None:
        """`given` is as in `ResourcePool`."""
        self._pool: ResourcePool[ModelInstance] = ResourcePool(given)
        self._wakes: dict[ModelInstance, Callable[[], None]] = {}
        self._lock = threading.Lock()
        # For the reactor's thread alone.
        self._asks: list[_Ask] = []

    def ask(
        self,
        request: InferenceRequest,
        targets: Sequence[ModelPermits],
        is_asker: Callable[[ModelInstance], bool],
        is_open: Callable[[], bool],
    ) -> None:
        """Note that an instance asks a model, whose request may wait for the resources of these schedulers. On the
        reactor's thread.

        Raises `ModelUnavailable` if it would wait for what the instance keeps until it has the answer.
        """
        with self._lock:
            holders = self._pool.holders
        asker = next((each for each in holders if is_asker(each)), None)
        self._asks = [each for each in self._asks if each.asker in holders and each.is_open()]
        if asker is None:
            return
        stuck = {asker}
        while more := {each.asker for each in self._asks if self._depends(each, stuck)} - stuck:
            stuck |= more
        for target in targets:
            if not self._can_get(target, stuck):
                names = ", ".join(sorted({f"'{each.model.name}'" for each in stuck}))
                verb = "models {} keep" if "," in names else "model {} keeps"
                asked = target.name
                raise ModelUnavailable(_CIRCLE.format(asker.model.name, asked, verb.format(names)))
        # Which of the steps of an ensemble has the request now is not known here.
        if len(targets) == 1:
            self._asks.append(_Ask(asker, request, targets[0], is_open))

    def _depends(self, ask: _Ask, stuck: set[ModelInstance]) -> bool:
        """Return True if an instance gets no answer before one of those that are stuck has one."""
        place = ask.target.place_of(ask.request)
        return not self._can_get(ask.target, stuck) if place is None else place in stuck

    def _can_get(self, target: ModelPermits, stuck: set[ModelInstance]) -> bool:
        members = target.members
        with self._lock:
            # One that has none yet has no process either, and starts some.
            return not members or any(each not in stuck and self._pool.can_get(each, stuck) for each in members)

    def join(self, instances: Sequence[ModelInstance], wake: Callable[[], None]) -> None:
        """Take in instances. Raises `ConfigError` if they need more than there is; then none has joined.

        `wake` is called once an instance that has waited has its resources. It must not block or take a lock.
        """
        with self._lock:
            try:
                needs = {each: (each.rate_limits, each.device_id) for each in instances}
                wakes = self._wakes_of(self._pool.join(needs))
            except ValueError as error:
                source = instances[0].model.config.source
                raise source.error("instance_group", str(error)) from error
            self._wakes.update(dict.fromkeys(instances, wake))
        _call(wakes)

    def leave(self, instances: Iterable[ModelInstance]) -> None:
        """Forget instances, with what they hold."""
        gone = list(instances)
        with self._lock:
            wakes = self._wakes_of(self._pool.leave(gone))
            for instance in gone:
                self._wakes.pop(instance, None)
        _call(wakes)

    def acquire(self, instance: ModelInstance) -> bool:
        """Return True if an instance may execute now; otherwise `wake` tells when."""
        with self._lock:
            return self._pool.acquire(instance)

    def release(self, instance: ModelInstance, *, has_executed: bool, asks_again: bool = False) -> None:
        """Return what an instance holds, or end its wait. If it asks again, `holds` tells whether it has it back at
        once.
        """
        with self._lock:
            granted = self._pool.release(instance, has_executed=has_executed, asks_again=asks_again)
            wakes = self._wakes_of(each for each in granted if each is not instance)
        _call(wakes)

    def holds(self, instance: ModelInstance) -> bool:
        """Return True if an instance may execute."""
        with self._lock:
            return self._pool.holds(instance)

    def in_order(self, instances: Sequence[ModelInstance]) -> list[ModelInstance]:
        """Return instances, those first that have executed least; of equal ones the last first."""
        ordered = list(instances)
        ordered.reverse()
        with self._lock:
            ordered.sort(key=self._pool.rank)
        return ordered

    @property
    def in_use(self) -> dict[Resource, int]:
        """The resources that instances hold at the moment, with their counts."""
        with self._lock:
            return self._pool.in_use

    def _wakes_of(self, instances: Iterable[ModelInstance]) -> set[Callable[[], None]]:
        return {self._wakes[instance] for instance in instances if instance in self._wakes}


def limiter_of(texts: Iterable[str]) -> RateLimiter:
    """Make a limiter with these counts of resources. Raises ValueError."""
    given = list(texts)
    try:
        return RateLimiter(read_resources(given))
    except ValueError:
        raise ValueError(f"must be texts such as NAME:COUNT or NAME:COUNT:DEVICE, not {given!r:.200}") from None


def _call(wakes: Iterable[Callable[[], None]]) -> None:
    for wake in wakes:
        wake()


class ModelPermits:
    """The permits of one model's instances. Its scheduler's lock guards it; `join`, `leave` and `place_of` may be
    called from any thread, without that lock.
    """

    def __init__(self, limiter: RateLimiter, scheduler: Scheduler) -> None:
        """Let the instances of a scheduler execute only with permits of `limiter`, from now on."""
        self.limiter, self._scheduler, self.name = limiter, scheduler, scheduler.name
        self._members: set[ModelInstance] = set()
        # Those that wait for a permit, or have one that `_use_granted` has yet to use.
        self._waiting: set[ModelInstance] = set()
        # Those that execute with a permit, or did a moment ago.
        self._used: set[ModelInstance] = set()
        scheduler.permits, scheduler.is_atomic = self, False

    @property
    def members(self) -> set[ModelInstance]:
        """The instances that may need a permit, as they are now."""
        return self._members.copy()

    def place_of(self, request: InferenceRequest) -> ModelInstance | None:
        """Return the instance that executes a request; None if it waits. It may be elsewhere the next moment."""
        # Other threads change the table meanwhile, and to copy it is atomic.
        for instance, execution in list(self._scheduler._busy.items()):
            if request in execution.requests:
                return instance
        return self._scheduler.open_requests.instance_of(request)

    def join(self, instances: Sequence[ModelInstance]) -> None:
        """Let the limiter know new instances. Raises `ConfigError`; then it knows none of them."""
        if instances:
            self.limiter.join(instances, self._wake_granted)
            with self._scheduler._lock:
                self._members.update(instances)

    def leave(self, instances: Iterable[ModelInstance] | None = None) -> None:
        """Return what instances hold for good: they have ended, or never started. None means all of them."""
        with self._scheduler._lock:
            gone = self._members.intersection(self._members if instances is None else instances)
            for mine in (self._members, self._waiting, self._used):
                mine -= gone
        self.limiter.leave(gone)

    def form(self, now_ns: int) -> tuple[list[Execution], Rejected]:
        """Ask for permits while requests wait, and start what has one."""
        self._return_used()
        scheduler, queue = self._scheduler, self._scheduler._queue
        # Requests whose time is over, and ends of sequences, wait for no permit.
        started, rejected = scheduler._form_in((), now_ns)
        for instance in self.limiter.in_order(scheduler._idle):
            if not len(queue):
                break
            if self.limiter.acquire(instance):
                self._waiting.discard(instance)
                formed, expired = self._use(instance, now_ns)
                started += formed
                rejected += expired
            else:
                self._waiting.add(instance)
        if not len(queue):
            for instance in self._waiting:
                self.limiter.release(instance, has_executed=False)
            self._waiting.clear()
        return started, rejected

    def _use(self, instance: ModelInstance, now_ns: int) -> tuple[list[Execution], Rejected]:
        """Form the batch of an instance that has a permit, which returns if there is none."""
        started, rejected = self._scheduler._form_in((instance,), now_ns)
        if started:
            self._used.add(instance)
        else:
            self.limiter.release(instance, has_executed=False)
        return started, rejected

    def _return_used(self) -> None:
        for instance in self._used - self._scheduler._busy.keys():
            self._used.discard(instance)
            # In one step with the return, or others that wait would go first whatever their rank.
            asks_again = instance in self._scheduler._idle and len(self._scheduler._queue) > 0
            if asks_again:
                self._waiting.add(instance)
            self.limiter.release(instance, has_executed=True, asks_again=asks_again)

    def _wake_granted(self) -> None:
        self._scheduler.reactor.call_soon(self._use_granted)

    def _use_granted(self) -> None:
        """Start the batches of instances that have waited and have a permit now."""
        started: list[Execution] = []
        rejected: Rejected = []
        with self._scheduler._lock:
            now_ns = time.monotonic_ns()
            self._return_used()
            for instance in [each for each in self._waiting if self.limiter.holds(each)]:
                self._waiting.discard(instance)
                if instance in self._scheduler._idle:
                    formed, expired = self._use(instance, now_ns)
                    started += formed
                    rejected += expired
                else:  # it broke or was taken while it waited; it asks again when it comes back
                    self.limiter.release(instance, has_executed=False)
        self._scheduler._launch(started, rejected, None)
