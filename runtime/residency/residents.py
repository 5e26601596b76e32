"""Puts models to sleep, wakes them, and changes the number of their instances.

Theory of operation. A model that sleeps stays in the registry with its configuration, its signature and its queue. It
has no instances. So requests find it as they find any other, and wait in its queue under their own deadlines.
`policy.py` decides who may come and who has to go. This file carries it out.

*Waiting for room.* A thread that waits watches the schedulers of the models that are present (`_Watch`): they call it,
under their locks, when a request has left. It also wakes when an entry changes, and when a model has stayed long
enough.

*Waking.* The scheduler of a model that sleeps calls `want` for each request, with its lock held. `want` sets a mark and
leaves the rest to the reactor, which starts a thread for the first of them (`_bring`). So concurrent first requests
start a model once. The thread makes room (`_make_room`), takes the model lock, and starts the instances. Requests run
as soon as the first one is ready. If that fails, all who wait get the reason, and requests are refused for a while,
longer after each failure.

*The first start.* Nobody knows what a model takes before it was there. Where memory is limited, such models start one
after the other, each when the one before is measured (`_newcomer`). So the limit is exceeded by one of them at most. A
model that another one asks does not wait for that one, which may wait for it.

*Putting to sleep* runs on the thread that needs the room, or on `moonpool-residency`, which also looks for models that
nobody has asked for lately. The scheduler refuses if anything is inside, under its own lock. A request that comes a
moment later waits in the queue; the mark is set, and the model is woken as soon as its instances have ended.

*Dormant models.* A model with `sleep` and `wake` may keep its processes while it sleeps. It does where that is enough:
nobody has asked for it, or only memory of GPUs is short. It counts for what it takes then, and its processes end when
that is too much, or when one of them dies. It wakes as any other: room is made for all that it took when it was awake,
and it is not counted twice.

*Scaling.* The same thread takes samples of models whose number of instances follows the load (`autoscaling.py`). A
thread for each step holds the model lock, so a step meets no load and no sleep; if the lock is not free, the step is
left out, and the next samples lead to another one.

*Locks.* `_lock` guards the entries and their states. Schedulers' locks are taken inside it and never the other way
round: `want` takes none. A model lock is taken outside of it, before WAKING or LEAVING, so that no load, unload or
update meets these. Who makes room never waits for the model lock of another model, which may be waiting for room
itself. Requests are failed (`rest`) without any lock, as their callers run code of their own. An unload holds the model
lock, or unloads versions that were replaced; `remove` marks the entry, and waits for a start or an end that is on its
way with those versions.

*Closing.* From `stop` on nothing is woken. Threads that wait for room fail their requests and end; starts are given up
by the registry. `join` waits for all threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import ModelUnavailable, OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.states import RESIDENCE, Machine, Residence
from moonpool.runtime.observe.machine import GpuMetrics
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.process.usage import (
    Reading,
    available_memory_bytes,
    memory_of,
    reading,
    spare_cores,
    with_descendants,
)
from moonpool.runtime.residency.autoscaling import Autoscaler, QueueCounts, QueueWatch, Room, ScaleSample, ScaleStep
from moonpool.runtime.residency.policy import NO_LIMITS, Act, Candidate, Need, NoRoom, Resident, Sieve, Verdict, decide

_log = RuntimeLog("moonpool")
_R = Residence
# The states in which a model has processes that are awake, or is about to have them.
_SERVING = (_R.WAKING, _R.AWAKE, _R.LEAVING)
# A thread that waits for room looks again when something has changed, but not more often than this: a model with one
# caller ends a request thousands of times a second.
_LOOK_S = 0.01
# It looks so often at least, for what nobody reports: a model lock that is free again, a sequence whose time is over.
_RARELY_S = 0.1
# The interval of the thread that looks for what nobody uses, at most.
_TICK_S = 1.0
# The pause before a thread is asked for again.
_AGAIN_S = 0.1
_DOUBLINGS = 20
# The interval between two samples of a model whose instances follow the load, and the pause after a step that failed.
_SAMPLE_S = 0.1
_SCALE_AGAIN_S = 10.0
SLEEP_REASONS = ("memory", "idle")


class Sleeper(Protocol):
    """A model version as its residency sees it. Any thread may call any method; `wake` and `fall_asleep` block."""

    @property
    def name(self) -> str:
        """The name of its model, by which it is locked."""

    @property
    def options(self) -> ModelOptions:
        """Its options."""

    @property
    def uses(self) -> int:
        """A number that grows with each request that has ended."""

    @property
    def waiting(self) -> int:
        """The number of requests in its queue."""

    @property
    def is_used(self) -> bool:
        """True if a request is inside, or a sequence."""

    def watch(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` whenever a request may have left, until the function is called that this returns. `tell` takes no
        lock.
        """

    @property
    def has_given_up(self) -> bool:
        """True while it has no instance left, though it does not sleep."""

    def wake(self) -> None:
        """Start the instances, and take requests. Raises as a load."""

    def give_up_loading(self) -> None:
        """Let `wake` fail soon."""

    def fall_asleep(self, *, may_stay: bool) -> bool:
        """End the instances if nothing is inside. Returns False if something is.

        If they may stay, and the model can do it, it becomes dormant instead.
        """

    @property
    def is_dormant(self) -> bool:
        """True while it sleeps with its instances."""

    @property
    def why_broken(self) -> str:
        """The reason why an instance of a dormant model has ended; empty if none has."""

    @property
    def instances(self) -> int:
        """The number of instances that its configuration asks for."""

    @property
    def executing(self) -> float:
        """The number of these that execute at the moment."""

    @property
    def runs_on_gpus(self) -> bool:
        """True if its instances compute on GPUs."""

    def queue_counts(self, now_s: float) -> QueueCounts:
        """Return the counts of its queue as they are now."""

    def scale_to(self, instances: int) -> None:
        """Change the number of instances while it serves. Blocks. Raises as a load, and then nothing has changed."""

    def rest(self, error: MoonpoolError) -> None:
        """Fail all requests that wait, and refuse others. Runs code of callers, so no lock may be held."""

    def sleep_again(self) -> None:
        """Let requests wait again after `rest`."""

    def pids(self) -> Iterable[int]:
        """Return the processes."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory that the runtime has made for it, which its processes may not have mapped."""


class ModelLocker(Protocol):
    """The model locks of the registry."""

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Hold a model lock; waits until it is free."""

    def try_hold(self, name: str) -> AbstractContextManager[bool]:
        """Hold a model lock if it is free; the context is True then."""


class ResidentModel:
    """The entry of one model version. Its fields belong to `Residency`; others may read them."""

    def __init__(self, sleeper: Sleeper, now_s: float) -> None:
        self.sleeper = sleeper
        self.machine = Machine(str(sleeper), RESIDENCE, now_s, "not asked for yet")
        # Set by requests that find the model asleep.
        self.is_wanted = False
        self.is_gone = False
        # True for a model that has been given room and has not begun to start.
        self.has_room = False
        self.awake_since_s = 0.0
        self.start_s = 0.0
        # True from falling asleep with its processes to the next start or end.
        self.is_dormant = False
        # As it was measured last while it was awake, if `is_measured`, and while it was dormant.
        self.need = Need()
        self.dormant_need = Need()
        self.is_measured = False
        # The uses at the last look, and the time from which on they have not changed.
        self.uses_seen = 0
        self.unused_since_s = now_s
        self.failures = 0
        self.wakes = 0
        # By the reason.
        self.sleeps: Counter[str] = Counter()
        # None if the number of its instances does not follow the load.
        bounds = sleeper.options.instances
        self.autoscaler = None if bounds is None else Autoscaler(bounds, sleeper.options.wait_target_ms)
        self.queue = QueueWatch()
        self.is_scaling = False
        self.scales_from_s = 0.0
        # The steps by their direction, and the last one.
        self.steps: Counter[str] = Counter()
        self.scaled_because = ""

    @property
    def state(self) -> Residence:
        return self.machine.state

    @property
    def scaling(self) -> str:
        """The last change of the number of its instances, or why there are no more though requests wait, as a text."""
        held = "" if self.autoscaler is None else self.autoscaler.held_because
        return f"requests wait, and {held}" if held else self.scaled_because

    @property
    def is_present(self) -> bool:
        """True if it has processes, or is about to have them."""
        return self.has_room or self.is_dormant or self.state in _SERVING

    @property
    def is_asleep(self) -> bool:
        """True if it serves nothing now, with or without processes."""
        return not self.has_room and self.state not in _SERVING

    @property
    def present_need(self) -> Need:
        """The memory that it takes now, or is about to take."""
        return self.dormant_need if self.is_dormant and not self.has_room else self.need


class _Watch:
    """Wakes a thread that waits for room, when a request has left one of the models that it looks at, or an entry has
    changed.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._ends: dict[Sleeper, Callable[[], None]] = {}
        self._looked_at_s = -math.inf

    def begin_look(self, sleepers: Iterable[Sleeper]) -> None:
        """Begin a look at these models. A change from now on ends the next `wait`."""
        self._looked_at_s = time.monotonic()
        self._event.clear()
        for each in sleepers:
            if each not in self._ends:
                self._ends[each] = each.watch(self._event.set)

    def tell(self) -> None:
        """Wake the thread."""
        self._event.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for a change, and at least until the next look is due."""
        self._event.wait(max(0.0, timeout_s))
        time.sleep(max(0.0, self._looked_at_s + _LOOK_S - time.monotonic()))

    def end(self) -> None:
        """Watch nothing any more."""
        for end in self._ends.values():
            end()


class Residency:
    """Wakes models and puts them to sleep. Any thread may call any method; `remove`, `stop` and `join` may wait."""

    def __init__(
        self, reactor: Reactor, locks: ModelLocker, is_used: Callable[[str], bool], limits: Resident | None = None
    ) -> None:
        """Keep to these limits; without them, models sleep only if their options say so.

        `is_used` is for models by name, also ensembles.
        """
        self.limits = limits or NO_LIMITS
        self.is_on_demand = limits is not None
        self._reactor = reactor
        self._locks = locks
        self._is_used = is_used
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[Sleeper, ResidentModel] = {}
        self._sieve: Sieve[Sleeper] = Sieve()
        # Those of the threads that wait for room.
        self._watches: set[_Watch] = set()
        # The models that have asked each model.
        self._askers: dict[str, set[str]] = {}
        # None if nobody has to know how much of the GPUs processes take.
        self._gpus = None if self.limits.gpu_memory is None else GpuMetrics()
        self._measured_at_s = 0.0
        # The model that has room, or starts, and was never measured, if memory is limited.
        self._newcomer: ResidentModel | None = None
        self._processors: Reading | None = None
        self._is_closed = False
        self._threads: set[threading.Thread] = set()

    # The models

    def takes_in(self, options: ModelOptions) -> bool:
        """Return True if a model with these options may sleep, or takes memory that others need."""
        is_idle_limited = options.idle_s is not None and not options.pin
        return self.is_on_demand or is_idle_limited or options.instances is not None

    def begins_asleep(self, options: ModelOptions) -> bool:
        """Return True if a model with these options is loaded without processes."""
        return self.is_on_demand and not options.pin

    def add(self, sleeper: Sleeper, *, is_awake: bool) -> ResidentModel:
        """Take in a model version, which may sleep or is pinned."""
        now_s = time.monotonic()
        entry = ResidentModel(sleeper, now_s)
        with self._lock:
            self._entries[sleeper] = entry
            if is_awake:
                self._awake(entry, "loaded with its instances", now_s)
            is_first = not any(each.name == _NAME for each in self._threads)
            if is_first and not self._is_closed and self._needs_looks(sleeper.options):
                try:
                    self._start(self._look_after_all, _NAME)
                except OutOfThreads as error:
                    # The model serves. The next one that is loaded starts the thread for all.
                    _log.error(
                        "unused models are not put to sleep, because the thread for that could not start: %s", error
                    )
        return entry

    def _needs_looks(self, options: ModelOptions) -> bool:
        return options.idle_s is not None or options.instances is not None or self.is_on_demand

    def remove(self, sleeper: Sleeper) -> bool:
        """Forget a model version that is about to be unloaded. Returns True if it had instances.

        Waits while they are being started or ended.
        """
        with self._lock:
            entry = self._entries.get(sleeper)
            if entry is None:
                return True
            entry.is_gone = True
            self._notify()
            self._changed.wait_for(lambda: entry.state not in (_R.WAKING, _R.LEAVING) and not entry.is_scaling)
            self._entries.pop(sleeper, None)
            self._sieve.remove(sleeper)
            return entry.state is _R.AWAKE

    def asks(self, asker: str, name: str) -> None:
        """Note that requests of one model run while another one waits for their answers."""
        askers = self._askers.get(name)
        if askers is None or asker not in askers:
            with self._lock:
                self._askers.setdefault(name, set()).add(asker)

    def entries(self) -> list[ResidentModel]:
        """Return the entries of all models that may sleep."""
        with self._lock:
            return list(self._entries.values())

    # Waking

    def want(self, sleeper: Sleeper) -> None:
        """Wake a model soon: a request has come. Its scheduler's lock is held, so this takes no lock."""
        entry = self._entries.get(sleeper)
        if entry is not None and not entry.is_wanted:
            entry.is_wanted = True
            self._reactor.call_soon(partial(self._begin, entry))

    def _begin(self, entry: ResidentModel) -> None:
        """Start the thread that wakes a model. If it is just falling asleep, that begins at its end."""
        with self._lock:
            is_asleep = entry.state in (_R.ASLEEP, _R.DORMANT)
            if not is_asleep or entry.is_gone or self._is_closed:
                return
            try:
                self._start(partial(self._bring, entry), f"moonpool-wake-{entry.sleeper.name}")
            except OutOfThreads:
                self._reactor.call_later(_AGAIN_S, partial(self._begin, entry))
                return
            entry.machine.move(_R.WAITING, "a request came", time.monotonic())

    def _start(self, act: Callable[[], None], name: str) -> None:
        """Act on a thread, for which `join` waits. Needs the lock. Raises `OutOfThreads`."""

        def run() -> None:
            try:
                act()
            except Exception:
                _log.exception("%s ended with an error", name)
            finally:
                with self._lock:
                    self._threads.discard(thread)
                    self._notify()

        thread = threading.Thread(target=run, name=name, daemon=True)
        start_thread(thread)
        self._threads.add(thread)

    def _bring(self, entry: ResidentModel) -> None:
        try:
            self._bring_in(entry)
        finally:
            with self._lock:
                if self._newcomer is entry:
                    self._newcomer = None
                    self._notify()

    def _bring_in(self, entry: ResidentModel) -> None:
        try:
            has_room = self._make_room(entry)
        except MoonpoolError as error:
            self._send_back(entry, error)
            return
        if not has_room:
            self._send_back(entry, None)
            return
        failure: BaseException | None = None
        pause_s = 0.0
        with self._locks.hold(entry.sleeper.name):
            with self._lock:
                entry.has_room = False
                if entry.is_gone or self._is_closed:
                    self._notify()
                    return
                began_s = time.monotonic()
                entry.is_dormant = False
                entry.machine.move(_R.WAKING, "there is room", began_s)
            try:
                entry.sleeper.wake()
            except BaseException as error:
                failure = error
            with self._lock:
                now_s = time.monotonic()
                if failure is None:
                    entry.start_s = now_s - began_s
                    self._awake(entry, "an instance is ready", now_s)
                else:
                    pause_s = self._fail(entry, failure, now_s)
                self._notify()
        if failure is None:
            self._measure(entry)
        else:
            entry.sleeper.rest(_unavailable(entry.machine.because, failure, pause_s))
            self._reactor.call_later(pause_s, partial(self._rested, entry))

    def _awake(self, entry: ResidentModel, because: str, now_s: float) -> None:
        """Note that a model has its instances. Needs the lock."""
        entry.machine.move(_R.AWAKE, because, now_s)
        entry.is_wanted = False
        entry.failures = 0
        if entry.autoscaler is not None:
            entry.autoscaler.begin()
        entry.wakes += 1
        entry.awake_since_s = entry.unused_since_s = now_s
        # Those that waited for the start are no reason to stay.
        self._sieve.add(entry.sleeper, entry.sleeper.uses + entry.sleeper.waiting)

    def _fail(self, entry: ResidentModel, failure: BaseException, now_s: float) -> float:
        """Note that a model could not be started. Returns the time for which requests are to be refused. Needs the
        lock.
        """
        options = entry.sleeper.options
        entry.failures += 1
        doubled = options.restart_backoff_s * 2.0 ** min(entry.failures - 1, _DOUBLINGS)
        pause_s = min(doubled, options.restart_backoff_max_s)
        text = f"model '{entry.sleeper.name}' could not be loaded: {failure}"
        _log.error("%s; it is tried again after %g s", text, pause_s)
        entry.machine.move(_R.RESTING, text, now_s)
        return pause_s

    def _rested(self, entry: ResidentModel) -> None:
        with self._lock:
            if entry.state is _R.RESTING and not entry.is_gone:
                entry.machine.move(_R.ASLEEP, "the pause is over", time.monotonic())
                entry.is_wanted = False
                entry.sleeper.sleep_again()

    def _send_back(self, entry: ResidentModel, error: MoonpoolError | None) -> None:
        """Let a model sleep on. With an error, all who wait get it."""
        if error is not None:
            entry.sleeper.rest(error)
        with self._lock:
            if entry.is_gone:
                return
            state = _R.DORMANT if entry.is_dormant else _R.ASLEEP
            entry.machine.move(state, str(error or "nobody waits any more"), time.monotonic())
            entry.is_wanted = False
            entry.sleeper.sleep_again()
            is_asked = entry.sleeper.waiting > 0
        if is_asked:  # by a request that found the mark set, after the last look at the queue
            self.want(entry.sleeper)

    # Room

    def _make_room(self, entry: ResidentModel) -> bool:
        """Wait until a model may start, and put others to sleep for it. Returns False if nobody waits for it any more.

        Raises `NoRoom`, and `ModelUnavailable` if the runtime is being closed.
        """
        watch = _Watch()
        with self._lock:
            self._watches.add(watch)
        try:
            return self._wait_for_room(entry, watch)
        finally:
            with self._lock:
                self._watches.discard(watch)
            watch.end()

    def _wait_for_room(self, entry: ResidentModel, watch: _Watch) -> bool:
        end_s = time.monotonic() + self.limits.patience_s
        while True:
            with self._lock:
                if self._is_closed:
                    raise ModelUnavailable("the runtime is being closed")
                present = [each for each in self._entries.values() if each.is_present]
                watch.begin_look([entry.sleeper, *(each.sleeper for each in present)])
                if entry.is_gone or not entry.sleeper.waiting:
                    return False
                now_s = time.monotonic()
                stays_s = [self._stays_until_s(each) for each in present]
                verdict = self._decide(entry, now_s)
                if verdict.act is Act.ADMIT:
                    entry.has_room = True
                    if self.limits.measures_memory and not entry.is_measured:
                        self._newcomer = self._newcomer or entry
                    return True
                victim = None if verdict.victim is None else self._entries[verdict.victim]
            if victim is None or not self._put_to_sleep(victim, "memory", verdict.reason, may_stay=verdict.may_stay):
                if now_s >= end_s:
                    raise NoRoom(f"model '{entry.sleeper.name}' cannot be loaded now: {verdict.reason}")
                until_s = min([end_s, now_s + _RARELY_S, *(each for each in stays_s if each > now_s)])
                watch.wait(until_s - time.monotonic())

    def _stays_until_s(self, entry: ResidentModel) -> float:
        """Return the time until which a model stays, as it has just come."""
        return entry.awake_since_s + max(self.limits.least_stay_s, entry.start_s)

    def _notify(self) -> None:
        """Wake all who wait for a change of an entry. Needs the lock."""
        self._changed.notify_all()
        for watch in self._watches:
            watch.tell()

    def _decide(self, entry: ResidentModel, now_s: float) -> Verdict[Sleeper]:
        """Decide if a model may start, or which one has to go first. Needs the lock."""
        name = entry.sleeper.name
        newcomer = None if entry.is_measured or self._newcomer is None else self._newcomer.sleeper
        if newcomer is not None and newcomer.name not in self._askers_of(name):
            because = f"what model '{newcomer.name}' takes is not known yet"
            return Verdict(Act.WAIT, None, because)
        candidates = self._candidates(now_s, but=entry)
        is_member = self._is_member(name)
        return decide(self.limits, self._sieve, candidates, entry.need, is_member=is_member)

    def _candidates(self, now_s: float, but: ResidentModel | None = None) -> dict[Sleeper, Candidate]:
        """Describe the models that have processes, without one that is about to have other ones, or others awake. Needs
        the lock.
        """
        found = {}
        for sleeper, entry in self._entries.items():
            # One whose instances have all been given up has no processes. It must not keep others away until it comes
            # back.
            if entry is not but and entry.is_present and not sleeper.has_given_up:
                why = self._why_stays(entry, now_s)
                is_dormant = entry.state is _R.DORMANT
                found[sleeper] = Candidate(entry.present_need, sleeper.uses, not why, why, is_dormant)
        return found

    def _why_stays(self, entry: ResidentModel, now_s: float) -> str:
        if entry.sleeper.options.pin:
            return "are pinned"
        if entry.state is _R.DORMANT:
            return ""
        if entry.state is not _R.AWAKE:
            return "start or end just now"
        if entry.sleeper.is_used or self._is_member(entry.sleeper.name):
            return "are in use"
        if now_s < self._stays_until_s(entry):
            return "came a moment ago"
        return ""

    def _is_member(self, name: str) -> bool:
        """Return True if a model that has asked this one, also through others, has requests inside. Needs the lock."""
        return any(map(self._is_used, self._askers_of(name)))

    def _askers_of(self, name: str) -> set[str]:
        """Return the models that have asked this one, also through others. Needs the lock."""
        reached, found = {name}, [name]
        while found:
            new = self._askers.get(found.pop(), set()) - reached
            reached |= new
            found += new
        return reached - {name}

    # Putting to sleep

    def _put_to_sleep(self, entry: ResidentModel, reason: str, because: str, *, may_stay: bool) -> bool:
        """End the instances of a model, if it has nothing to do. Returns False if it has, or if another thread has the
        model.

        If they may stay, a model that has `sleep` and `wake` becomes dormant instead.
        """
        with self._locks.try_hold(entry.sleeper.name) as is_held:
            if not is_held:
                return False
            with self._lock:
                is_here = entry.state is _R.AWAKE or (entry.state is _R.DORMANT and not may_stay)
                if not is_here or entry.is_gone or self._is_closed:
                    return False
                entry.machine.move(_R.LEAVING, because, time.monotonic())
            sleeps = False
            try:
                sleeps = entry.sleeper.fall_asleep(may_stay=may_stay)
                if entry.sleeper.is_dormant and self.limits.measures_memory:
                    entry.dormant_need = self._need_of(entry)
            finally:
                with self._lock:
                    self._left(entry, reason, because if sleeps else "")
        if sleeps and entry.is_wanted:
            self._begin(entry)
        return sleeps

    def _left(self, entry: ResidentModel, reason: str, because: str) -> None:
        """Note whether a model has fallen asleep, which has a reason. Needs the lock."""
        if because:
            was_dormant, entry.is_dormant = entry.is_dormant, entry.sleeper.is_dormant
            state, how = _R.ASLEEP, "ends" if was_dormant else "sleeps"
            if entry.is_dormant:
                state, how = _R.DORMANT, "sleeps with its processes"
            else:
                self._sieve.remove(entry.sleeper)
            _log.info("model '%s' %s: %s", entry.sleeper.name, how, because)
            entry.machine.move(state, because, time.monotonic())
            entry.sleeps[reason] += not was_dormant
        else:
            entry.machine.move(_R.AWAKE, "a request was inside", time.monotonic())
        self._notify()

    def _look_after_all(self) -> None:
        """Put models to sleep that nobody uses, and those that have grown too large, until the end."""
        while True:
            with self._lock:
                if self._is_closed:
                    return
                entries = [each for each in self._entries.values() if each.state is _R.AWAKE]
                dormant = [each for each in self._entries.values() if each.state is _R.DORMANT]
                is_scaled = any(each.autoscaler is not None for each in entries)
                idle_s = [each.sleeper.options.idle_s for each in self._entries.values()]
            now_s = time.monotonic()
            is_due = now_s - self._measured_at_s >= _TICK_S
            if is_due:
                self._measured_at_s = now_s
            for entry in entries:
                if is_due and self.limits.measures_memory:
                    self._measure(entry)
                self._look_after(entry, time.monotonic())
            for entry in dormant:
                self._look_after_dormant(entry, is_due=is_due)
            if is_scaled:
                self._scale_all([each for each in entries if each.autoscaler is not None])
            self._trim()
            least_s = min((each for each in idle_s if each is not None), default=_TICK_S)
            least_s = min(least_s, 4 * _SAMPLE_S) if is_scaled else least_s
            with self._lock:
                if not self._is_closed:
                    self._changed.wait(min(_TICK_S, max(_LOOK_S, least_s / 4)))

    def _look_after(self, entry: ResidentModel, now_s: float) -> None:
        sleeper, uses = entry.sleeper, entry.sleeper.uses
        if uses != entry.uses_seen or sleeper.is_used:
            entry.uses_seen, entry.unused_since_s = uses, now_s
        idle_s = sleeper.options.idle_s
        if idle_s is None or sleeper.options.pin or now_s - entry.unused_since_s < idle_s:
            return
        with self._lock:
            is_in_use = self._is_member(sleeper.name)
        if not is_in_use:
            because = f"no request came for {idle_s:g} s"
            self._put_to_sleep(entry, "idle", because, may_stay=True)

    def _look_after_dormant(self, entry: ResidentModel, *, is_due: bool) -> None:
        broken = entry.sleeper.why_broken
        if broken:
            self._put_to_sleep(entry, "memory", f"an instance has ended: {broken}", may_stay=False)
        elif is_due and self.limits.measures_memory:
            need = self._need_of(entry)
            if entry.state is _R.DORMANT:
                entry.dormant_need = need

    def _trim(self) -> None:
        """Put models to sleep while they take more than they may."""
        while True:
            with self._lock:
                present = self._candidates(time.monotonic())
                verdict = decide(self.limits, self._sieve, present, None)
                victim = None if verdict.victim is None else self._entries[verdict.victim]
            if victim is None or not self._put_to_sleep(victim, "memory", verdict.reason, may_stay=verdict.may_stay):
                return

    def _measure(self, entry: ResidentModel) -> None:
        if self.limits.measures_memory:
            need = self._need_of(entry)
            # A model that ends meanwhile has no memory, and takes some again when it comes back.
            if entry.state is _R.AWAKE:
                entry.need, entry.is_measured = need, True

    def _need_of(self, entry: ResidentModel) -> Need:
        family = with_descendants(entry.sleeper.pids())
        on_gpus = {} if self._gpus is None else self._gpus.bytes_by_process()
        parts = [memory_of(pid) for pid in family]
        # What its processes have touched of the memory that they were given is in both figures.
        shared_bytes = max(sum(each.shared_bytes for each in parts), entry.sleeper.shared_bytes)
        own_bytes = sum(each.own_bytes for each in parts)
        return Need(own_bytes + shared_bytes, sum(on_gpus.get(pid, 0) for pid in family))

    # Scaling

    def _scale_all(self, entries: Sequence[ResidentModel]) -> None:
        """Take a sample of each of these models, and start the steps that are due."""
        before, self._processors = self._processors, reading()
        spare = spare_cores(before, self._processors) if before is not None else 0.0
        for entry in entries:
            scaler, sleeper, now_s = entry.autoscaler, entry.sleeper, time.monotonic()
            wait_ms = entry.queue.wait_ms(sleeper.queue_counts(now_s))
            if scaler is None or entry.is_scaling or now_s < entry.scales_from_s:
                continue
            sample = ScaleSample(now_s, sleeper.instances, wait_ms, sleeper.executing)
            room = Room()
            if scaler.is_over(sample):
                idle = math.inf if sleeper.runs_on_gpus else spare
                room = Room(idle, self._room_by_memory(entry, sample.instances))
            step = scaler.step(sample, room)
            if step is not None:
                self._begin_scaling(entry, step)

    def _room_by_memory(self, entry: ResidentModel, instances: int) -> int:
        """Return the number of further instances for which there is memory, if each takes what those that are there
        take.
        """
        need = self._need_of(entry)
        free = [(available_memory_bytes(), need.memory_bytes)]
        with self._lock:
            others = [each.present_need for each in self._entries.values() if each.is_present]
        for limit, total, own in (
            (self.limits.memory, sum(each.memory_bytes for each in others), need.memory_bytes),
            (self.limits.gpu_memory, sum(each.gpu_bytes for each in others), need.gpu_bytes),
        ):
            if limit is not None:
                free.append((limit - total, own))
        rooms = [int(left * instances // own) for left, own in free if own > 0]
        return max(0, min(rooms, default=1))

    def _begin_scaling(self, entry: ResidentModel, step: ScaleStep) -> None:
        with self._lock:
            if entry.is_gone or self._is_closed or entry.state is not _R.AWAKE:
                return
            entry.is_scaling = True
            try:
                self._start(partial(self._scale, entry, step), f"moonpool-scale-{entry.machine.name}")
            except OutOfThreads as error:
                entry.is_scaling = False
                _log.error("%s", error)

    def _scale(self, entry: ResidentModel, step: ScaleStep) -> None:
        sleeper = entry.sleeper
        before, name = sleeper.instances, entry.machine.name
        text = f"{before} → {step.instances} instances: {step.because}"
        try:
            with self._locks.try_hold(sleeper.name) as is_held:
                with self._lock:
                    may = is_held and entry.state is _R.AWAKE and not entry.is_gone
                if not may:
                    return
                sleeper.scale_to(step.instances)
            _log.info("model '%s': %s", name, text)
            entry.steps["up" if step.instances > before else "down"] += 1
            entry.scaled_because = text
        except Exception as error:
            _log.error("model '%s' was not scaled: %s failed: %s", name, text, error)
            entry.scales_from_s = time.monotonic() + _SCALE_AGAIN_S
        finally:
            with self._lock:
                entry.is_scaling = False
                self._notify()

    # End

    def stop(self) -> None:
        """Wake nothing and put nothing to sleep from now on."""
        with self._lock:
            self._is_closed = True
            self._notify()

    def give_up_starts(self) -> None:
        """Let the starts that are on their way fail soon. They may begin a moment later, so this is called again and
        again.
        """
        for entry in self.entries():
            if entry.state in (_R.WAKING, _R.LEAVING) or entry.is_scaling:
                entry.sleeper.give_up_loading()

    def join(self) -> None:
        """Wait for all threads after `stop`."""
        with self._lock:
            self._changed.wait_for(lambda: not self._threads)
        if self._gpus is not None:
            self._gpus.close()


_NAME = "moonpool-residency"


def _unavailable(text: str, cause: BaseException, retry_after_s: float) -> ModelUnavailable:
    error = ModelUnavailable(text)
    public = getattr(cause, "public_message", None)
    if public is not None:
        error.public_message = text.replace(str(cause), public)
    error.__cause__ = cause
    error.retry_after_s = retry_after_s
    return error
