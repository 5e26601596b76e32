"""Plans the process of an instance: interpreter, variables, folder, user and policy."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from moonpool.ipc.extension import PURE
from moonpool.ipc.policy import FIRST_SHARED_USER, MEMORY, Policy, is_contained
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation import environment_variables, scratch, users
from moonpool.runtime.isolation.gpu_access import access_to
from moonpool.runtime.isolation.paths import check_granted, keep_bytecode, needed_paths
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.options import USUAL_WEIGHT, is_compiled, listed
from moonpool.runtime.model.confinement import Confinement
from moonpool.runtime.process.child import StubProcess
from moonpool.runtime.process.spawner import working_folder
from moonpool.runtime.repository.environment import Environment
from moonpool.runtime.repository.folder_cache import cache_root
from moonpool.runtime.repository.grants import check_stays_inside, granted

# The variables by which libraries find the folder of what they compile, and its name within ours.
_COMPILED = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "NUMBA_CACHE_DIR": "numba",
    "CUDA_CACHE_PATH": "cuda",
}
# The ratio by which the kernel weighs a step of `nice`.
_NICE_RATIO = 1.25
# The most time that an instance waits for others that make their folders, which takes each a moment, and the pause
# between two looks.
_ALONE_S = 60.0
_ASK_S = 0.05


@dataclass(frozen=True)
class IsolationPlan:
    """The plan for one process. Holds a user and a folder until `release`."""

    policy: Policy
    python: str
    environment: dict[str, str]
    # The working directory.
    folder: str
    granted: tuple[str, ...]
    # The GPUs that it sees, by their numbers in the runtime; None for all, with the same numbers.
    gpus: tuple[int, ...] | None = None
    # True if the interpreter is the model's, and may be hostile.
    is_foreign: bool = False
    # The number of processes that share the limits: a template and the instances that are forked from it.
    processes: int = 1
    # The confinement of the template from which this process is forked. They have the same user and folder.
    template: Confinement | None = None
    # Releases the user and the folder.
    held: ExitStack = field(default_factory=ExitStack)

    def spawn(self, name: str, work_fd: int, control_fd: int, calls_fd: int, output_fd: int) -> StubProcess:
        """Start the process of the stub `name`, with these descriptors. Raises OSError."""
        return StubProcess(
            name,
            self.python,
            work_fd=work_fd,
            control_fd=control_fd,
            calls_fd=calls_fd,
            output_fd=output_fd,
            environment=self.environment,
            folder=self.folder,
            is_foreign=self.is_foreign,
            is_in_tree=self.policy.may_start_processes,
            # If instances share the user, the end of one must not end all processes of the user.
            user=None if self.shares_user else self.policy.user,
        )

    @property
    def may_be_forked(self) -> bool:
        """True if the process may be a fork of one that has imported numpy, without the sandbox.

        Libraries look at the processors when they are imported, and limits of memory must hold for the import, too.
        """
        policy = self.policy
        return not (policy.is_contained or policy.cpus or set(MEMORY) & set(policy.limits))

    @property
    def may_be_spare(self) -> bool:
        """True if the process may be one that waited for a model, with numpy imported and the sandbox still to be put
        on.

        Not with another interpreter, whose own files may be hostile, and not in a tree of processes, of which it has to
        be the first. Libraries look at the processors when they are imported, and GPUs have not been tried.
        """
        policy = self.policy
        is_alone = not (policy.cpus or policy.may_start_processes or self.gpus)
        return policy.is_contained and not self.is_foreign and is_alone

    @property
    def shares_user(self) -> bool:
        """True if other instances may run as the same user."""
        return self.policy.user is not None and self.policy.user >= FIRST_SHARED_USER

    def for_a_fork(self, model: Model, template: Confinement) -> IsolationPlan:
        """Return the plan for a fork of this plan's process, which has the confinement `template`."""
        policy = self.policy.changed(forks=False, limits=_limits(model), shares_scratch=True)
        return replace(self, policy=policy, processes=1, template=template, held=ExitStack())

    def number_of(self, gpu: int) -> int:
        """Return the number by which the process knows a GPU."""
        return self.gpus.index(gpu) if self.gpus else gpu

    def release(self) -> None:
        """Release user and folder after the process has ended. May be called many times; only the first call has an
        effect.
        """
        self.held.close()


def plan_for(
    model: Model,
    environment: Environment,
    folder: str,
    *,
    gpus: tuple[int, ...] = (),
    cpus: tuple[int, ...] = (),
    forks: bool = False,
    leading: Sequence[str] = environment_variables.OF_THE_INTERPRETER,
) -> IsolationPlan:
    """Return the plan for another process of a model. `folder` is its backend's, "" for none.

    `gpus` are those that it will use, and `cpus` the processors that it may use, () for all. With `forks`, it is a
    template, from which all instances are forked. `leading` has the meaning that it has in
    `environment_variables.inherited`. Raises OSError, `LoadFailed`.
    """
    options = model.options
    processes = 1 + _forked(model) if forks else 1
    compiled = _compile_cache(model)
    variables = _variables(model, environment, leading, compiled)
    common = Policy(
        level=options.sandbox, limits=_limits(model, processes), cpus=cpus, nice=_nice(options.cpu_weight), forks=forks
    )
    if not common.is_contained:
        return IsolationPlan(common, str(environment.python), variables, working_folder(), ())
    _check_paths(model)
    access = access_to(gpus)
    read = needed_paths(model.source, environment, variables, folder)
    paths = (*options.sandbox_paths, *([] if compiled is None else [(str(compiled), True)]))
    shared = users.of_folders(path for path, writes in paths if writes)
    user, own_folder, held = _take(shared)
    policy = common.changed(
        user=user,
        # The kernel counts the tasks of a user.
        limits=_limits(model, processes if shared is None else processes + _forked(model)),
        devices=access.devices,
        read=read,
        granted=paths,
        scratch=own_folder,
        scratch_bytes=options.scratch_bytes,
        ports=options.sandbox_ports,
        syscalls=options.sandbox_syscalls,
    )
    variables |= _of_its_folder(own_folder, access.visible if gpus else None, compiled)
    return IsolationPlan(
        policy,
        str(environment.python),
        variables,
        own_folder,
        granted(options, gpus),
        gpus,
        is_foreign=environment.root is not None,
        processes=processes,
        held=held,
    )


def _check_paths(model: Model) -> None:
    """Check the paths at each start, since the files may have changed after the load. Raises `LoadFailed`."""
    keep_bytecode()  # before the check, as it may make a folder that was granted
    check_stays_inside(model)
    check_granted(model.options.sandbox_paths)


def _variables(model: Model, environment: Environment, leading: Sequence[str], compiled: Path | None) -> dict[str, str]:
    """Return the variables of a process, which keeps what it compiles in the folder `compiled`."""
    options = model.options
    variables = environment_variables.inherited(
        os.environ,
        sandbox=options.sandbox,
        allowed=options.environment,
        own=environment.variables,
        leading=leading,
        threads=options.threads,
        withheld=model.withheld,
    )
    if not is_compiled(options):
        variables[PURE] = "1"
    if compiled is not None:
        variables |= {name: str(compiled / below) for name, below in _COMPILED.items()}
    return variables


def _of_its_folder(folder: str, visible_gpus: str | None, compiled: Path | None) -> dict[str, str]:
    """Return the variables of a contained process which has this folder, and sees these GPUs."""
    variables = {"HOME": folder, "TMPDIR": folder}
    if visible_gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpus
        if compiled is None:
            # CUDA keeps what it compiles where other instances do not find it.
            variables["CUDA_CACHE_PATH"] = f"{folder}/cuda"
    return variables


def _take(shared: int | None) -> tuple[int | None, str, ExitStack]:
    """Take a user, if there is one, and make its folder; return both, and a stack that gives them back. Raises OSError.

    If instances share a user, it is `shared`.
    """
    with ExitStack() as held:
        user = shared
        if user is None:
            user = users.take()
            held.callback(users.give_back, user)
        folder = scratch.make(user)
        held.callback(scratch.remove, folder)
        return user, folder, held.pop_all()


def _forked(model: Model) -> int:
    """Return the number of instances that a template has."""
    return sum(group.count * max(1, len(group.gpus)) for group in model.config.instance_groups)


def _limits(model: Model, processes: int = 1) -> dict[str, int]:
    """Return the limits of so many processes of one user, whose tasks the kernel counts together."""
    options = model.options
    tasks = options.task_limit
    # A GPU's driver reserves more addresses than any machine has memory.
    limits = {
        "data_bytes" if model.config.uses_gpu else "memory_bytes": options.memory_limit_bytes,
        "tasks": None if tasks is None else tasks * processes,
        "open_files": options.open_files,
        "file_bytes": options.scratch_bytes if is_contained(options.sandbox) else None,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _nice(weight: int) -> int:
    """Return the niceness that gives a process the share of this weight beside one of the usual weight."""
    return max(-20, min(19, -round(math.log(weight / USUAL_WEIGHT, _NICE_RATIO))))


def check_processors(cpus: Sequence[int]) -> None:
    """Raise `LoadFailed` for a processor on which this process may not run. The kernel would leave it out without an
    error.
    """
    allowed = os.sched_getaffinity(0)
    if refused := sorted(set(cpus) - allowed):
        failure = LoadFailed(
            f"MOONPOOL_CPUS names {listed(refused)}, on which this runtime may not run; it may run on "
            f"{listed(sorted(allowed))}",
            stage="start",
        )
        failure.instead = {"MOONPOOL_CPUS": ""}
        raise failure


def _compile_cache(model: Model) -> Path | None:
    """Return the folder in which a version of a model keeps what it compiles, and make it; None if it has none.

    Where the runtime is root, the folder of a contained model belongs to a shared user, so that all instances of the
    version may write into it, and to none that another model has: one model must not put code where another one looks
    for it. Raises OSError, `LoadFailed`.
    """
    if not model.options.compile_cache:
        return None
    is_confined = is_contained(model.options.sandbox)
    source = model.source
    # Files that a client brought lie elsewhere each time.
    where = source.content or source.file.resolve()
    named = "\0".join(map(str, (where, model.name, model.version, is_confined)))
    root = cache_root() / "compiled"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(root)
    folder = root.resolve() / hashlib.sha256(named.encode()).hexdigest()[:32]
    with _alone_in(root):
        folder.mkdir(mode=0o700, exist_ok=True)
        # Also one whose maker was killed before it had given it away.
        if is_confined and folder.stat().st_uid == os.geteuid():
            owner = users.unshared(root)
            if owner is not None:
                os.chown(folder, owner, owner)
    return folder


@contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """Keep other instances, and other runtimes, from making a folder meanwhile: two models must not get the same user.

    Raises OSError, and `LoadFailed` if another process, which may be stopped, does not come to an end with it.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end_s = time.monotonic() + _ALONE_S
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= end_s:
                what = f"another process has had {root} locked for {_ALONE_S:g} s"
                raise LoadFailed(f"{what}: end it, and load the model again", stage="start")
            time.sleep(_ASK_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file, or return False if another process has it locked. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_private(root: Path) -> None:
    status = root.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        what = f"the cache {root} must belong to this user, and no other user may write to it"
        raise LoadFailed(f"{what}, as models run code from there", stage="start")
