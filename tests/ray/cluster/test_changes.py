"""Changes while models serve: packed models, live options, replicas that Ray replaces, and nodes that die.

The tests under load take minutes, and run with `MOONPOOL_RAY_LOAD=1`.
"""

from __future__ import annotations

import asyncio
import os
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
    "Packed, a replica loads a model when it is asked for, and drops the one that was used the longest ago when it has too many.",
)
def test_packed_models_come_and_go(deploy: Callable[..., None]) -> None:
    deploy(
        models=["double", "once"],
        packed=True,
        models_per_replica=1,
        defaults=mr.Options(num_cpus=0.1),
    )

    assert ask("moonpool-models", "processes") == {}
    for name in ("double", "once", "double"):
        assert infer(name) == [2.0, 4.0]
        assert list(ask("moonpool-models", "processes")) == [name]


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


@pytest.mark.promise(
    "Ray Serve", "If a model gives up, Ray replaces its replica, and the model serves again."
)
def test_a_replica_whose_model_gives_up_is_replaced(deploy: Callable[..., None]) -> None:
    gives_up = mr.Options(
        num_cpus=0.1,
        options={"MOONPOOL_MAX_RESTARTS": 0},
        deployment={"health_check_period_s": 0.5},
    )
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
def test_a_node_that_dies_costs_idempotent_models_no_request(
    nodes: Nodes, deploy: Callable[..., None]
) -> None:
    third = nodes.cluster.add_node(num_cpus=4, resources={"third": 4})
    spread = {"max_replicas_per_node": 1}
    model = mr.Options(num_cpus=0.1, replicas=3, deployment=spread)
    deploy(models={"double": model})
    assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 3

    async def act() -> None:
        await asyncio.to_thread(nodes.cluster.remove_node, third, allow_graceful=False)

    assert run(asked_meanwhile("double", act)) >= 160
