"""The built-in backend: every instance is a stub, a process of its own that runs a Python model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import Kind
from moonpool.ipc.policy import is_contained
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation.environment_variables import OF_THE_INTERPRETER, unseen
from moonpool.runtime.isolation.plan import IsolationPlan, check_processors, plan_for
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model, ModelInstance
from moonpool.runtime.model.config.options import hardened, policy_of
from moonpool.runtime.model.device_intake import DeviceIntake
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.files import parsed_object
from moonpool.runtime.repository.environment import Environment, resolve
from moonpool.runtime.stubs.handle import StubHandle, Stubs
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.regions import CallerMemory
from moonpool.runtime.stubs.start_message import completed, start_of
from moonpool.runtime.stubs.template import Template, TemplateStub

MakeStub = Callable[..., StubHandle]

_log = RuntimeLog("moonpool")
_UNSEEN = "[%s] does not see these variables of the environment: %s; MOONPOOL_ENVIRONMENT can name those that it needs"


class EndedIdle(PeerGone):
    """The process ended while it had no batch."""


@dataclass
class _ModelState:
    """The state that all instances of a model share."""

    environment: Environment
    caller_memory: CallerMemory
    # The process in which the model completes its configuration. It stays until an instance takes it, if one may.
    completing: StubHandle | None = None
    # The template from which instances are forked, if the model asks for that.
    template: Template | None = None
    # True once the log lists the variables that the model does not see.
    is_environment_told: bool = False

    def take_completing(self, instance: str) -> StubHandle | None:
        """Return the process of that name that has completed the configuration, once; the caller owns it."""
        stub = self.completing
        if stub is None or stub.name != instance:
            return None
        self.completing = None
        return stub

    def end_completing(self) -> None:
        """End the process that completes or has completed the configuration, if no instance has taken it."""
        stub, self.completing = self.completing, None
        if stub is not None:
            stub.end()


def _processors(model: Model, host_policy: str, kind: str, device_id: int) -> tuple[int, ...]:
    """Return the processors of an instance, () for all: those of its model's option, or else of the policy of its
    group.
    """
    name = policy_of(host_policy, kind, device_id)
    return model.options.cpus or model.host_policies.get(name, ())


def _processors_of_first(model: Model) -> tuple[int, ...]:
    """Return the processors of the model's first instance."""
    first = model.config.instance_groups[0]
    return _processors(model, first.host_policy, first.kind, (first.gpus or (0,))[0])


class PythonBackend(Backend):
    """Runs Triton's Python models and moonpool's own kind, or the models of one Python-based backend."""

    blocks = False

    # Variables that lead to the files of the runtime's interpreter. A model with another one does not get them.
    _leading: tuple[str, ...] = OF_THE_INTERPRETER
    # True if an instance may be the process that has completed the configuration.
    _keeps_completing = True

    def __init__(self, stubs: Stubs, name: str = "python", folder: str = "") -> None:
        """`folder` is a folder from which all models of the backend may import; "" for none."""
        super().__init__(name)
        self._folder = folder
        self._stubs = stubs

    def model_initialize(self, model: Model) -> None:
        """Find the interpreter, and let the model complete its configuration in another process."""
        with self._stubs.spares.while_loading():
            self._initialize(model)

    def _initialize(self, model: Model) -> None:
        model.options = hardened(model.options)
        if is_contained(model.options.sandbox):
            model.source = model.source.without_links()
        check_processors(model.options.cpus)
        environment = resolve(
            model.options.execution_env_path,
            model.source.model_directory,
            only_wheels=is_contained(model.options.sandbox),
            stop=model.given_up,
        )
        options = model.options
        memory = CallerMemory(options.region_limit_bytes, is_contained=is_contained(options.sandbox))
        model.state = _ModelState(environment, memory)
        try:
            if model.options.prefork == "imports" and not model.is_asleep:
                self._start_template(model)
            if model.completes:
                self._complete(model)
            else:
                model.config = completed(model, {})
            if model.options.prefork == "initialize" and not model.is_asleep:
                self._start_template(model)
        except BaseException:
            self.model_finalize(model)
            raise

    def _complete(self, model: Model) -> None:
        """Let the model complete its configuration. The process stays for the first instance unless code of the model
        ran there.
        """
        name = f"{model.name}_auto_complete"
        gpus: tuple[int, ...] = ()
        may_stay = self._keeps_completing and not model.options.has_template
        if may_stay:
            first = model.config.instance_groups[0]
            name, gpus = f"{first.name}_0", first.gpus[:1]
        deadline = _deadline(model.options.load_timeout_s)
        state: _ModelState = model.state
        cpus = _processors_of_first(model)
        state.completing = stub = self._new_stub(model, name, gpus, cpus, deadline)
        start = self._start(model, name, "CPU", 0, "complete")
        _, config, is_fresh = stub.start(start, deadline)
        if not (may_stay and is_fresh):
            stub.finalize(model.options.finalize_timeout_s)
            state.end_completing()
        model.config = completed(model, _object(config, model.name))

    def _start_template(self, model: Model) -> None:
        # The model's `initialize` gets the same values as in the first instance.
        groups = model.config.instance_groups
        gpus = tuple(sorted({gpu for group in groups for gpu in group.gpus}))
        first = groups[0]
        start = self._start(model, f"{first.name}_0", first.kind, (first.gpus or (0,))[0], "template")
        start["initializes"] = model.options.prefork == "initialize"
        name = f"{model.name}_template"

        def start_stub() -> TemplateStub:
            model.check_files()
            plan = self._plan(model, name, gpus, _processors_of_first(model), forks=True)
            return TemplateStub(self._stubs, model, name, plan)

        template = Template(model.name, model.options, start_stub, start)
        model.state.template = template
        template.start()

    def model_finalize(self, model: Model) -> None:
        state: _ModelState = model.state
        state.end_completing()
        if state.template is not None:
            state.template.close(model.options.finalize_timeout_s)
        state.caller_memory.close()
        state.environment.release()

    def model_sleep(self, model: Model) -> None:
        state: _ModelState = model.state
        state.end_completing()
        template, state.template = state.template, None
        if template is not None:
            template.close(model.options.finalize_timeout_s)

    def model_processes(self, model: Model) -> list[int]:
        state: _ModelState = model.state
        pid = None if state.template is None else state.template.pid
        return [] if pid is None else [pid]

    def model_shared_bytes(self, model: Model) -> int:
        return self.memory_of(model).counted_bytes

    def model_wake(self, model: Model) -> None:
        if model.options.has_template:
            self._start_template(model)

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        """Start the stub and wait until its model is initialized."""
        model = instance.model
        with self._stubs.spares.while_loading():
            stub = self.start_stub(instance, StubHandle)
        stub.link.serve(model.config, self.memory_of(model))
        stub.link.is_on_gpu = instance.kind == "GPU"
        stub.serve(instance.respond)
        stub.bounds.serves(instance.report_grown)

        def report_end() -> None:
            # The reactor may learn of it late, when the instance has its next process.
            if instance.state is stub:
                instance.report_broken(EndedIdle("the stub has ended"))

        stub.notify_exit(report_end)

    def start_stub(self, instance: ModelInstance, make: MakeStub) -> StubHandle:
        """Start the process of an instance and initialize its model. Sets `instance.state`. Raises `LoadFailed`."""
        model = instance.model
        deadline = _deadline(model.options.load_timeout_s)
        kind, device_id = instance.kind, instance.device_id
        gpus = (device_id,) if kind == "GPU" else ()
        state: _ModelState = model.state
        stub = state.take_completing(instance.name)
        if stub is None:
            cpus = _processors(model, instance.host_policy, kind, device_id)
            stub = self._new_stub(model, instance.name, gpus, cpus, deadline, make)
        instance.state, instance.port = stub, stub.link.usual_port
        try:
            if kind == "GPU":
                device_id = stub.plan.number_of(device_id)
            start = self._start(model, instance.name, kind, device_id, "serve")
            _, facts = stub.start(start, deadline)
            stub.readiness.has_check = facts.get("has_is_ready") is True
            stub.can_sleep = facts.get("can_sleep") is True
        except BaseException:
            stub.end()
            raise
        return stub

    def can_sleep(self, instance: ModelInstance) -> bool:
        stub: StubHandle = instance.state
        return stub.can_sleep

    def model_instance_sleep(self, instance: ModelInstance) -> None:
        stub: StubHandle = instance.state
        limit_s = instance.model.options.sleep_timeout_s
        try:
            stub.call_hook(Kind.SLEEP, limit_s, "MOONPOOL_SLEEP_TIMEOUT_S")
        except BaseException:
            # A model whose `sleep` raised can still finalize.
            instance.is_healthy = stub.reason is None
            raise

    def model_instance_wake(self, instance: ModelInstance) -> None:
        stub: StubHandle = instance.state
        limit_s = instance.model.options.wake_timeout_s
        try:
            stub.call_hook(Kind.WAKE, limit_s, "MOONPOOL_WAKE_TIMEOUT_S")
        except BaseException as error:
            stub.abort(error)
            raise

    def model_instance_finalize(self, instance: ModelInstance) -> None:
        stub: StubHandle = instance.state
        try:
            if instance.is_healthy:
                stub.finalize(instance.model.options.finalize_timeout_s)
        finally:
            stub.end()

    def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Link:
        link: Link = instance.state.link
        link.execute(requests)
        return link

    def device_intake(self, model: Model) -> DeviceIntake:
        # A contained process has the driver of a GPU only if its configuration names one.
        options = model.options
        can_see = model.config.uses_gpu or not is_contained(options.sandbox)
        takes_devices = can_see and not options.force_cpu_only_input_tensors
        return DeviceIntake(self.memory_of(model), takes_devices=takes_devices)

    def cancel(self, instance: ModelInstance, request: InferenceRequest) -> None:
        stub: StubHandle = instance.state
        stub.cancel(request)

    def model_instance_ready(self, instance: ModelInstance, answer: Callable[[str | None], object]) -> None:
        stub: StubHandle = instance.state
        stub.readiness.ask(answer)

    def explain(self, instance: ModelInstance, error: BaseException) -> BaseException:
        stub: StubHandle = instance.state
        doing = "while it was idle" if isinstance(error, EndedIdle) else "during execute"
        return stub.explain(error, doing)

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:
        template: Template | None = instance.model.state.template
        if template is not None:
            template.abort(instance.name, reason)
        stub: StubHandle | None = instance.state
        if stub is not None:
            stub.abort(reason)

    def model_abort(self, model: Model, reason: BaseException) -> None:
        state: _ModelState | None = model.state
        stub = None if state is None else state.completing
        if stub is not None:
            stub.abort(reason)
        if state is not None and state.template is not None:
            state.template.abort_start(reason)

    def tidy(self, instance: ModelInstance) -> None:
        now_s = time.monotonic()
        self.memory_of(instance.model).tidy(now_s)
        stub: StubHandle = instance.state
        stub.tidy(now_s)
        if stub.is_worn:
            instance.report_worn(stub.given_bytes)

    @staticmethod
    def memory_of(model: Model) -> CallerMemory:
        """Return the memory in which callers write arrays for this model in place."""
        state: _ModelState = model.state
        return state.caller_memory

    def _new_stub(
        self,
        model: Model,
        name: str,
        gpus: tuple[int, ...],
        cpus: tuple[int, ...],
        deadline: float | None,
        make: MakeStub = StubHandle,
    ) -> StubHandle:
        template: Template | None = model.state.template
        if template is not None:
            forked = template.fork(
                name, deadline, lambda stub: make(self._stubs, model, name, stub.plan_of_a_fork(), stub.fork)
            )
            if forked is not None:
                return forked
        plan = self._plan(model, name, gpus, cpus)
        return make(self._stubs, model, name, plan, partial(self._start_process, model, plan, deadline))

    def _start_process(
        self, model: Model, plan: IsolationPlan, deadline: float | None, name: str, *fds: int
    ) -> ChildProcess:
        """Fork a process from a blank template, let a spare become it, or start it, whichever is possible first. Raises
        OSError.
        """
        stubs = self._stubs
        process = None
        if model.options.prefork == "blank" and plan.may_be_forked:
            process = stubs.blank_templates.fork(plan.python, plan.environment, plan.folder, name, fds, deadline)
        elif model.options.prefork == "blank" and plan.may_be_spare:
            memory = plan.policy.limits.get("memory_bytes")
            process = stubs.spares.take(
                plan.python, plan.environment, name, fds, memory_bytes=memory, deadline=deadline
            )
        return process or plan.spawn(name, *fds)

    def _plan(
        self, model: Model, name: str, gpus: tuple[int, ...], cpus: tuple[int, ...], *, forks: bool = False
    ) -> IsolationPlan:
        environment: Environment = model.state.environment
        try:
            plan = plan_for(model, environment, self._folder, gpus=gpus, cpus=cpus, forks=forks, leading=self._leading)
        except OSError as error:
            raise LoadFailed(
                f"nothing could be prepared for the process of '{name}': {error}", stage="start"
            ) from error
        state: _ModelState = model.state
        names = unseen(os.environ, plan.environment)
        if names and plan.policy.is_contained and not state.is_environment_told:
            state.is_environment_told = True
            _log.info(_UNSEEN, model.name, names)
        return plan

    def _start(self, model: Model, instance: str, kind: str, device_id: int, mode: str) -> dict[str, Any]:
        return start_of(model, instance, kind, device_id, mode, backend_dir=self._folder, log=self._stubs.log)


def _object(text: str, model: str) -> dict[str, Any]:
    """Parse the JSON object that a stub sent. Raises `LoadFailed`."""
    try:
        return parsed_object(text, f"the completed configuration of model '{model}'")
    except ValueError as error:
        raise LoadFailed(str(error), stage="auto_complete_config") from error


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
