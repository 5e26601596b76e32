"""What the process of an instance is started with: interpreter, variables, folder, and what it may do."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moonpool.ipc.policy import Policy, is_contained
from moonpool.runtime import environment_variables
from moonpool.runtime.config_values import USUAL_WEIGHT
from moonpool.runtime.process import StubProcess
from moonpool.runtime.sandbox import bytecode, scratch, users
from moonpool.runtime.sandbox.gpu_access import access_to
from moonpool.runtime.sandbox.grants import granted
from moonpool.runtime.sandbox.paths import needed_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import Model
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.environment import Environment
    from moonpool.runtime.sandbox.confinement import Confinement

# As the kernel weighs a step of `nice`.
_NICE_RATIO = 1.25


@dataclass(frozen=True)
class Plan:
    """Holds a user and a folder until `release`."""

    policy: Policy
    python: str
    environment: dict[str, str]
    # Where the process begins.
    folder: str
    granted: tuple[str, ...]
    # The GPUs that it can see, as CUDA numbers them here; None for all, numbered as here.
    gpus: tuple[int, ...] | None = None
    # Whether the interpreter is somebody else's, who may be hostile.
    is_foreign: bool = False
    # The number of processes that have their limits together: a template and the instances that are forked from it.
    processes: int = 1
    # Of the process that this one is forked from, which has the user and the folder, too.
    template: Confinement | None = None
    # What gives the user and the folder back.
    held: ExitStack = field(default_factory=ExitStack)

    def spawn(
        self, name: str, work_fd: int, control_fd: int, calls_fd: int, output_fd: int
    ) -> StubProcess:
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
            is_nested=self.policy.may_start_processes,
            user=self.policy.user,
        )

    def for_a_fork(self, model: Model, template: Confinement) -> Plan:
        """The plan for a process that the one of this plan, which is so confined, forks."""
        policy = self.policy.changed(forks=False, limits=_limits(model))
        return replace(self, policy=policy, processes=1, template=template, held=ExitStack())

    def number_of(self, gpu: int) -> int:
        """The number under which the process knows a GPU of its own, or any where it sees all."""
        return self.gpus.index(gpu) if self.gpus else gpu

    def release(self) -> None:
        """Its process has ended. May be called many times: what is another plan's by then stays so."""
        self.held.close()


def plan_for(
    model: Model,
    environment: Environment,
    folder: str,
    *,
    gpus: tuple[int, ...] = (),
    forks: bool = False,
    leading: Sequence[str] = environment_variables.OF_THE_INTERPRETER,
) -> Plan:
    """The plan for another process of a model; `folder` is its backend's, "" for none.

    `gpus` are those that it is to use. `forks`: it is a template, from which all instances are forked. `leading` as in
    `environment_variables.inherited`. Raises OSError, `LoadFailed`.
    """
    options = model.options
    processes = 1 + _forked(model) if forks else 1
    variables = _variables(options, environment, leading)
    common = Policy(
        level=options.sandbox,
        limits=_limits(model, processes),
        cpus=options.cpus,
        nice=_nice(options.cpu_weight),
        forks=forks,
    )
    python = str(environment.python)
    if not common.is_contained:
        return Plan(common, python, variables, os.getcwd(), ())
    bytecode.keep()
    access = access_to(gpus)
    read = needed_paths(model.source, environment, variables, folder, options.sandbox_paths)
    user, own_folder, held = _take()
    policy = common.changed(
        user=user,
        devices=access.devices,
        read=read,
        write=[os.path.realpath(path) for path, writes in options.sandbox_paths if writes],
        scratch=own_folder,
        scratch_bytes=options.scratch_bytes,
        ports=options.sandbox_ports,
        syscalls=options.sandbox_syscalls,
    )
    variables |= {"HOME": own_folder, "TMPDIR": own_folder}
    if gpus:
        # What CUDA compiles for the card is not kept where others would find it.
        cache = f"{own_folder}/cuda"
        variables |= {"CUDA_VISIBLE_DEVICES": access.visible, "CUDA_CACHE_PATH": cache}
    return Plan(
        policy,
        python,
        variables,
        own_folder,
        granted(options, gpus),
        gpus,
        is_foreign=environment.root is not None,
        processes=processes,
        held=held,
    )


def _variables(
    options: ModelOptions, environment: Environment, leading: Sequence[str]
) -> dict[str, str]:
    return environment_variables.inherited(
        os.environ,
        sandbox=options.sandbox,
        allowed=options.environment,
        own=environment.variables,
        leading=leading,
        threads=options.threads,
    )


def _take() -> tuple[int | None, str, ExitStack]:
    """A user, if there is one, and a folder of its, with what gives them back. Raises OSError."""
    with ExitStack() as held:
        user = users.take()
        held.callback(users.give_back, user)
        folder = scratch.make(user)
        held.callback(scratch.remove, folder)
        return user, folder, held.pop_all()


def _forked(model: Model) -> int:
    """How many instances a template has."""
    return sum(group.count * max(1, len(group.gpus)) for group in model.config.instance_groups)


def _limits(model: Model, processes: int = 1) -> dict[str, int]:
    """For so many that are one user, whose tasks are counted together."""
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
    """How nice a process is that has so much of a processor beside one of the usual weight."""
    return max(-20, min(19, -round(math.log(weight / USUAL_WEIGHT, _NICE_RATIO))))
