"""Changes while models serve: packed models, live options, replicas that Ray replaces, and nodes that die.

The tests under load take minutes, and run with `MOONPOOL_RAY_LOAD=1`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.ray.cluster.conftest import Nodes
from tests.waiting import wait_until

pytest.importorskip("ray", reason="Ray is not installed here; bash .ci/run ray installs it apart")

import ray
from ray import serve
from ray.exceptions import RayError

import moonpool.ray as mr
from moonpool import MoonpoolError, StubDied

T = TypeVar("T")
X = np.array([[1.0, 2.0]], np.float32)
LONG_S = 300.0
pytestmark = pytest.mark.timeout(900)
under_load = pytest.mark.skipif(
    not os.environ.get("MOONPOOL_RAY_LOAD"), reason="takes minutes: set MOONPOOL_RAY_LOAD=1"
)


@pytest.fixture
def deploy(nodes: Nodes, repository: Path) -> Iterator[Callable[..., None]]:  # noqa: ARG001
    """Return a function that deploys models as the application `changes`."""

    def run_application(**arguments: Any) -> None:
        app = mr.application(repository, **arguments)
        serve.run(app, name="changes", route_prefix="/changes")

    yield run_application
    serve.delete("changes")


def run(asking: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under a deadline."""
    return asyncio.run(asyncio.wait_for(asking, LONG_S))


def infer(model: str) -> list[float]:
    found = run(mr.get("changes", model).infer({"X": X}, timeout_s=LONG_S))
    values: list[float] = found["Y"][0].tolist()
    return values


def ask(deployment: str, method: str) -> Any:
    """Call a method of one replica."""
    target = serve.get_deployment_handle(deployment, "changes")
    return getattr(target, method).remote().result(timeout_s=LONG_S)


@pytest.mark.promise(
    "Ray Serve",
    "Packed, a replica loads a model when it is asked for, and drops the one that was used the longest ago when it has "
    "too many.",
)
def test_packed_models_come_and_go(deploy: Callable[..., None]) -> None:
    deploy(models=["double", "once"], packed=True, models_per_replica=1, defaults=mr.Options(num_cpus=0.1))

    assert ask("moonpool-models", "processes") == {}
    for name in ("double", "once", "double"):
        assert infer(name) == [2.0, 4.0]
        assert list(ask("moonpool-models", "processes")) == [name]


@pytest.mark.promise("Ray Serve", "Packed, the requests of a sequence go to one replica, too.")
def test_packed_sequences_stay_with_their_replica(deploy: Callable[..., None]) -> None:
    two = mr.Options(num_cpus=0.1, replicas=2)
    deploy(models=["sums", "double"], packed=True, models_per_replica=2, defaults=two)
    one = np.ones((1, 1), np.float32)

    async def sequence(key: int) -> list[dict[str, Any]]:
        handle = mr.get("changes", "sums")
        return [await handle.infer({"X": one}, correlation_id=key, flags=0 if n else 1) for n in range(4)]

    async def all_sequences() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(sequence(key) for key in range(1, 7)))

    for answers in run(all_sequences()):
        assert [float(each["Y"][0, 0]) for each in answers] == [1, 2, 3, 4]
        assert len({int(each["PID"][0, 0]) for each in answers}) == 1


@pytest.mark.promise("Ray Serve", "A replica of an ensemble has its members, too.")
def test_an_ensemble_has_its_members_in_its_replica(deploy: Callable[..., None]) -> None:
    deploy(models={"twice": mr.Options(num_cpus=0.1)})

    assert infer("twice") == [4.0, 8.0]
    assert len(ask("twice", "processes")["double"]) == 1


@pytest.mark.promise(
    "Ray Serve",
    "Another number of instances, and every other live option, changes the model inside the replicas that run.",
)
def test_live_options_change_replicas_that_run(deploy: Callable[..., None]) -> None:
    deploy(models={"once": mr.Options(num_cpus=0.1)})
    replica, (stub,) = ask("once", "process"), ask("once", "processes")["once"]

    deploy(models={"once": mr.Options(num_cpus=0.1, instances=2)})

    wait_until(lambda: len(ask("once", "processes")["once"]) == 2, LONG_S, "the second instance")
    assert stub in ask("once", "processes")["once"]
    assert ask("once", "process") == replica


@pytest.mark.promise("Ray Serve", "If a model gives up, Ray replaces its replica, and the model serves again.")
def test_a_replica_whose_model_gives_up_is_replaced(deploy: Callable[..., None]) -> None:
    gives_up = mr.Options(num_cpus=0.1, options={"MOONPOOL_MAX_RESTARTS": 0}, deployment={"health_check_period_s": 0.5})
    deploy(models={"once": gives_up})
    replica = ask("once", "process")

    with pytest.raises(StubDied):
        run(mr.get("changes", "once").infer({"X": X * np.nan}, timeout_s=LONG_S))

    def other() -> bool:
        try:
            return bool(ask("once", "process") != replica and infer("once") == [2.0, 4.0])
        except (MoonpoolError, RayError):
            return False

    wait_until(other, LONG_S, "another replica")


@pytest.fixture
def go(repository: Path) -> Iterator[Path]:
    """Return the file that `waits` waits for."""
    path = repository / "waits" / "go"
    yield path
    path.unlink(missing_ok=True)


async def waiting(count: int = 1) -> list[asyncio.Task[Any]]:
    """Return requests to `waits`, the first of which executes."""
    handle = mr.get("changes", "waits")
    x = np.array([1.0, 2.0], np.float32)
    tasks = [asyncio.create_task(handle.infer({"X": x}, timeout_s=LONG_S)) for _ in range(count)]
    await asyncio.to_thread(
        wait_until,
        lambda: ask("waits", "record_autoscaling_stats")["moonpool_busy"] == 1.0,
        LONG_S,
        "a request that executes",
    )
    return tasks


@pytest.mark.promise("Ray Serve", "A replica that Ray replaces answers the requests that it has before it ends.")
def test_a_replica_that_is_replaced_answers_what_it_has(deploy: Callable[..., None], go: Path) -> None:
    def options(revision: str) -> dict[str, Any]:
        patient = {"graceful_shutdown_timeout_s": LONG_S}
        model = mr.Options(num_cpus=0.1, revision=revision, deployment=patient)
        return {"models": {"waits": model}}

    deploy(**options("a"))
    replica = ask("waits", "process")

    async def replaced() -> Any:
        (request,) = await waiting()
        update = asyncio.create_task(asyncio.to_thread(deploy, **options("b")))
        try:
            what = "another replica"
            await asyncio.to_thread(wait_until, lambda: ask("waits", "process") != replica, LONG_S, what)
            assert not request.done()
            # The process is still there, as it has a request.
            os.kill(replica, 0)
        finally:
            await asyncio.to_thread(go.touch)
        outputs = await request
        await update
        return outputs

    assert run(replaced())["Y"].tolist() == [2.0, 4.0]


@pytest.mark.promise(
    "Ray Serve",
    "If a replica dies, requests inside it fail with `ReplicaDied` unless the model says that it is idempotent.",
)
def test_a_request_in_a_replica_that_dies_is_not_executed_twice(
    deploy: Callable[..., None],
    go: Path,  # noqa: ARG001
) -> None:
    deploy(models={"waits": mr.Options(num_cpus=0.1)})

    async def killed() -> None:
        (request,) = await waiting()
        target = serve.get_deployment_handle("waits", "changes")
        os.kill(await target.process.remote(), signal.SIGKILL)
        with pytest.raises(mr.ReplicaDied):
            await request

    run(killed())


@pytest.mark.promise(
    "Ray Serve", "Ray gets the load from the replicas, and their number follows it in both directions."
)
def test_replicas_come_and_go_with_the_time_that_requests_wait(deploy: Callable[..., None], go: Path) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1.0,
    }
    deploy(models={"waits": mr.Options(num_cpus=0.1, target_wait_ms=1.0, autoscaling=scaling)})

    def replicas() -> int:
        found = serve.status().applications["changes"].deployments["waits"].replica_states
        return sum(count for state, count in found.items() if "RUNNING" in str(state))

    async def scaled() -> None:
        requests = await waiting(8)
        try:
            await asyncio.to_thread(wait_until, lambda: replicas() == 2, LONG_S, "more replicas")
        finally:
            await asyncio.to_thread(go.touch)
        await asyncio.gather(*requests)

    run(scaled())
    wait_until(lambda: replicas() == 1, LONG_S, "fewer replicas")


async def asked_meanwhile(model: str, act: Callable[[], Awaitable[None]]) -> int:
    """Have callers ask a model until `act` is done, and some times more. Returns the number of their answers."""
    handle, is_done, count = mr.get("changes", model), asyncio.Event(), 0

    async def caller() -> None:
        nonlocal count
        after = 0
        while after < 20:
            outputs = await handle.infer({"X": X}, timeout_s=LONG_S)
            assert outputs["Y"].tolist() == [[2.0, 4.0]]
            count += 1
            after += is_done.is_set()

    callers = [asyncio.create_task(caller()) for _ in range(8)]
    await act()
    is_done.set()
    await asyncio.gather(*callers)
    return count


@under_load
def test_scaling_and_a_rolling_update_cost_no_request(deploy: Callable[..., None]) -> None:
    def options(replicas: int, revision: str) -> dict[str, Any]:
        # A model that may not be executed twice: nothing is tried again.
        return {"models": {"once": mr.Options(num_cpus=0.1, replicas=replicas, revision=revision)}}

    deploy(**options(1, "a"))

    async def act() -> None:
        for replicas, revision in ((3, "a"), (1, "a"), (2, "a"), (2, "b"), (2, "c")):
            await asyncio.to_thread(deploy, **options(replicas, revision))

    assert run(asked_meanwhile("once", act)) > 160


@under_load
def test_a_node_that_dies_costs_idempotent_models_no_request(nodes: Nodes, deploy: Callable[..., None]) -> None:
    third = nodes.cluster.add_node(num_cpus=4, resources={"third": 4})
    spread = {"max_replicas_per_node": 1}
    model = mr.Options(num_cpus=0.1, replicas=3, deployment=spread)
    deploy(models={"double": model})
    assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 3

    async def act() -> None:
        await asyncio.to_thread(nodes.cluster.remove_node, third, allow_graceful=False)

    assert run(asked_meanwhile("double", act)) >= 160
