"""Tests of the response cache: what is found again, what is not, and what is dropped."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.inside import hosted_in, registry_of
from tests.runtime.held_batches import Caller, HoldingBackend
from tests.runtime.recorder import PATIENCE_S, Recorder, config, row, tensor, x
from tests.waiting import wait_until

from moonpool import ConfigError, ModelInstance, ModelUnavailable, QueueFull, Response, ResponseAllocator, Runtime
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.model.signature import Signature, make_request
from moonpool.runtime.observe.metrics_options import MetricsOptions
from moonpool.runtime.schedule.response_cache import CachedResponse, CachingScheduler, ResponseCache, digest_of

pytestmark = pytest.mark.promise(
    "Requests",
    "A model with `response_cache` answers an equal request from the cache, which wakes no instance. Requests are "
    "equal if their inputs, requested outputs and parameters are; the digest has 256 bits.",
)
CACHED: dict[str, Any] = {"response_cache": {"enable": True}}


def cached(folder: Path, backend: Recorder, size: int = 1 << 20, **more: Any) -> Runtime:
    runtime = Runtime(backends=[backend], response_cache_bytes=size)
    runtime.load("m", folder, config=config(backend=backend.name, **{**CACHED, **more}))
    return runtime


def executions(backend: Recorder) -> int:
    return [call for call, _ in backend.calls].count("model_instance_execute")


def stats(runtime: Runtime) -> dict[str, Any]:
    shown: dict[str, Any] = runtime.statistics("m")["inference_stats"]
    return {name: shown[name]["count"] for name in ("success", "compute_infer", "cache_hit", "cache_miss")}


def test_an_equal_request_executes_nothing(folder: Path) -> None:
    backend = Recorder()
    with cached(folder, backend) as runtime:
        answers = [runtime.request("m", x(1, 2), request_id=name) for name in "abc"]
        # The backend names no request, but each answer from the cache has the id of its own.
        assert [answer.request_id for answer in answers] == ["", "b", "c"]
        assert [answer.outputs["Y"].tolist() for answer in answers] == [[1, 2]] * 3
        assert executions(backend) == 1
        assert stats(runtime) == {"success": 3, "compute_infer": 1, "cache_hit": 2, "cache_miss": 1}
        assert runtime.statistics("m")["inference_count"] == 1
        metrics = runtime.metrics()
        assert 'nv_cache_num_hits_per_model{model="m",version="1"} 2' in metrics
        assert 'nv_cache_num_misses_per_model{model="m",version="1"} 1' in metrics
        assert "moonpool_response_cache_size_bytes 1048576" in metrics
        assert "moonpool_response_cache_entries 1" in metrics
        assert "moonpool_response_cache_evictions_total 0" in metrics
        assert "nv_cache_hit_summary_per_model" not in metrics
        # A caller may write to its outputs. Others do not see that.
        answers[1].outputs["Y"][:] = 9
        assert runtime.infer("m", x(1, 2))["Y"].tolist() == [1, 2]


def test_times_have_summaries_where_the_metrics_have_them(folder: Path) -> None:
    backend = Recorder()
    options = MetricsOptions(summary_latencies=True)
    with Runtime(backends=[backend], response_cache_bytes=1 << 20, metrics=options) as runtime:
        runtime.load("m", folder, config=config(backend=backend.name, **CACHED))
        for _ in range(3):
            runtime.infer("m", x(1, 2))
        metrics = runtime.metrics()
    assert 'nv_cache_hit_summary_per_model_count{model="m",version="1"} 2' in metrics
    assert 'nv_cache_miss_summary_per_model_count{model="m",version="1"} 1' in metrics
    assert 'nv_cache_hit_summary_per_model{model="m",version="1",quantile="0.5"}' in metrics


SIGNATURE = Signature(
    ModelConfig.from_dict(
        {
            "name": "m",
            "backend": "any",
            "input": [
                tensor("X", "FP32", -1),
                tensor("T", "STRING", -1) | {"optional": True},
                tensor("Z", "FP32", -1) | {"optional": True},
            ],
            "output": [tensor("Y", "FP32", -1), tensor("W", "FP32", -1)],
        }
    )
)
# Pairs of requests that must differ, in the arguments of `make_request`.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"inputs": {"X": [2.0]}}),
    ({}, {"inputs": {"X": [1.0, 1.0]}}),
    ({}, {"inputs": {"X": [-0.0]}}),
    ({"inputs": {"X": [0.0]}}, {"inputs": {"X": [-0.0]}}),
    ({"inputs": {"X": [1.0], "T": ["ab", "c"]}}, {"inputs": {"X": [1.0], "T": ["a", "bc"]}}),
    ({"inputs": {"X": [1.0], "T": ["a"]}}, {"inputs": {"X": [1.0], "T": ["a", ""]}}),
    ({"inputs": {"X": [1.0, 2.0]}}, {"inputs": {"X": [1.0], "Z": [2.0]}}),
    ({}, {"outputs": ["Y"]}),
    ({"outputs": ["Y"]}, {"outputs": ["W"]}),
    ({}, {"parameters": {"a": 1}}),
    ({"parameters": {"a": 1}}, {"parameters": {"a": True}}),
    ({"parameters": {"a": 1}}, {"parameters": {"a": 1.0}}),
    ({"parameters": {"a": 1}}, {"parameters": {"a": "1"}}),
    ({"parameters": {"a": "b"}}, {"parameters": {"b": "a"}}),
    ({}, {"correlation_id": 1}),
    ({"correlation_id": 1}, {"correlation_id": "1"}),
    ({"correlation_id": 1}, {"correlation_id": 1, "flags": 1}),
]
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"parameters": {"a": 1, "b": 2}}, {"parameters": {"b": 2, "a": 1}}),
    ({"request_id": "a", "parameters": {"a": 1}}, {"request_id": "b", "parameters": {"a": 1}}),
    ({"priority": 1}, {"priority": 2, "queue_timeout_us": 7}),
    ({}, {"request_id": "a"}),
]  # fmt: skip


def digest(given: dict[str, Any]) -> bytes:
    arguments = {"inputs": {"X": [1.0]}, **given}
    return digest_of(make_request(SIGNATURE, arguments.pop("inputs"), **arguments))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_requests_that_a_model_could_tell_apart_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(one) != digest(other)
    assert len(digest(one)) * 8 == 256


@pytest.mark.parametrize(("one", "other"), SAME)
def test_requests_that_differ_for_the_runtime_alone_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(one) == digest(other)


@given(st.lists(st.lists(st.binary(max_size=3), max_size=3), min_size=2, max_size=2, unique_by=str))
def test_no_two_texts_have_one_digest(texts: list[list[bytes]]) -> None:
    one, other = ({"inputs": {"X": [1.0], "T": np.array(each, object)}} for each in texts)
    assert digest(one) != digest(other)


class CacheAgainstPlainModel(RuleBasedStateMachine):
    SIZE = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.cache = ResponseCache(self.SIZE)
        self.owners = [self.cache.join() for _ in range(2)]
        self.plain: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    @rule(owner=st.integers(0, 1), key=st.binary(max_size=1), size=st.integers(0, 12_000))
    def keep(self, owner: int, key: bytes, size: int) -> None:
        whole = self.owners[owner], key
        response = CachedResponse({"Y": WireTensor(1, (size,), np.zeros(size, np.uint8))}, {})
        self.cache.keep(whole, response)
        if response.size_bytes <= self.SIZE:
            self.plain.pop(whole, None)
            while sum(self.plain.values()) + response.size_bytes > self.SIZE:
                self.plain.popitem(last=False)
            self.plain[whole] = response.size_bytes
        self.check()

    @rule(owner=st.integers(0, 1), key=st.binary(max_size=1))
    def find(self, owner: int, key: bytes) -> None:
        whole = self.owners[owner], key
        found = self.cache.find(whole)
        assert (None if found is None else found.size_bytes) == self.plain.get(whole)
        if found is not None:
            self.plain.move_to_end(whole)

    @rule(owner=st.integers(0, 1), key=st.binary(max_size=1))
    def leave(self, owner: int, key: bytes) -> None:
        gone = self.owners[owner]
        self.cache.leave(gone)
        self.cache.keep((gone, key), CachedResponse({}, {}))
        self.owners[owner] = self.cache.join()
        for whole in [each for each in self.plain if each[0] == gone]:
            del self.plain[whole]
        self.check()

    def check(self) -> None:
        assert len(self.cache) == len(self.plain)
        assert self.cache.used_bytes == sum(self.plain.values()) <= self.SIZE


TestCacheAgainstPlainModel = CacheAgainstPlainModel.TestCase
TestCacheAgainstPlainModel.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.promise(
    "Requests",
    "The response cache has a size in bytes; those responses go first that nobody has asked for the longest.",
)
def test_the_oldest_response_goes_first(folder: Path) -> None:
    backend = Recorder()
    with cached(folder, backend, size=4000) as runtime:
        for value in (1, 2, 1, 3, 1, 2):
            runtime.infer("m", x(value))
        # Two fit. When 3 came, 2 was the one that nobody had asked for the longest.
        assert executions(backend) == 4


def test_an_error_is_not_kept(folder: Path) -> None:
    outcomes: list[Any] = [ValueError("no"), Response({"Y": np.ones(1, np.float32)})]

    def execute(_: ModelInstance, requests: Any) -> list[Any]:
        return [outcomes.pop(0) for _ in requests]

    backend = Recorder(execute=execute)
    with cached(folder, backend) as runtime:
        with pytest.raises(ValueError, match="no"):
            runtime.infer("m", x(1))
        assert [runtime.infer("m", x(1))["Y"].tolist() for _ in range(2)] == [[1], [1]]
        assert stats(runtime) == {"success": 2, "compute_infer": 1, "cache_hit": 1, "cache_miss": 1}


@pytest.mark.promise("Requests", "Nothing of a model that was unloaded or reloaded is found in the response cache.")
def test_entries_go_with_their_version(folder: Path) -> None:
    backend = Recorder()
    with cached(folder, backend) as runtime:
        cache = registry_of(runtime).cache
        assert cache is not None
        runtime.infer("m", x(1))
        assert len(cache) == 1
        again = config(backend=backend.name, **CACHED, parameters={"a": "b"})
        runtime.load("m", folder, config=again)
        runtime.infer("m", x(1))
        assert executions(backend) == 2
        runtime.unload("m")
        # The version that was replaced is unloaded in the background.
        wait_until(lambda: (len(cache), cache.used_bytes) == (0, 0), PATIENCE_S)


def test_a_hit_is_refused_as_any_request_while_the_model_is_unloaded(folder: Path) -> None:
    backend = HoldingBackend()
    with cached(folder, backend) as runtime:
        backend.is_quick = True
        runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        backend.is_quick = False
        caller = Caller(runtime, x(2))
        hosted, held = hosted_in(runtime, "m"), backend.wait_for(2)
        unloading = threading.Thread(target=runtime.unload, args=("m",))
        unloading.start()
        request = make_request(hosted.signature, x(1))
        while True:
            try:
                hosted.scheduler.submit(_with_waiter(request))
            except ModelUnavailable:
                break
        held.answer()
        assert caller.result() == 2
        unloading.join(PATIENCE_S)


def _with_waiter(request: Any) -> Any:
    from moonpool.runtime.schedule.lane import ThreadWaiter

    request.waiter = ThreadWaiter()
    return request


@pytest.mark.promise(
    "Requests", "Memory that a caller changes after its request was sent puts no wrong answer into the response cache."
)
def test_inputs_are_copied_before_they_are_hashed(folder: Path) -> None:
    backend = HoldingBackend()
    with cached(folder, backend) as runtime:
        memory = np.array([0, 1, 0], np.float32)
        first = Caller(runtime, {"X": memory[1:2]}, timeout_s=PATIENCE_S)
        held = backend.wait_for(1)
        memory[1] = 5
        held.answer()
        assert first.result() == 1
        backend.is_quick = True
        assert runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].tolist() == [1]
        assert runtime.infer("m", x(5), timeout_s=PATIENCE_S)["Y"].tolist() == [5]
        assert len(backend.batches) == 2


class Allocator(ResponseAllocator):
    def alloc(self, *facts: Any) -> Any:
        return bytearray(facts[3])


def test_responses_in_memory_of_the_caller_are_not_kept(folder: Path) -> None:
    backend = Recorder()
    with cached(folder, backend) as runtime:
        for _ in range(2):
            runtime.infer("m", x(1), allocator=Allocator())
        assert executions(backend) == 2
        assert stats(runtime)["cache_miss"] == 0


def test_texts_and_parameters_come_back(folder: Path) -> None:
    def execute(_: ModelInstance, requests: Any) -> list[Any]:
        texts = np.array([b"a", b""], object)
        return [Response({"Y": texts}, {"n": 1, "t": "x"}) for _ in requests]

    backend = Recorder(execute=execute)
    with cached(folder, backend, output=[tensor("Y", "STRING", -1)]) as runtime:
        answers = [runtime.request("m", x(1)) for _ in range(2)]
        assert [each.outputs["Y"].tolist() for each in answers] == [[b"a", b""]] * 2
        assert [each.parameters for each in answers] == [{"n": 1, "t": "x"}] * 2
        assert executions(backend) == 1


def test_batches_and_event_loops_find_it_too(folder: Path) -> None:
    import asyncio

    backend = Recorder()
    more: dict[str, Any] = {"max_batch_size": 4, "dynamic_batching": {"preserve_ordering": True}}
    with cached(folder, backend, **more) as runtime:
        assert runtime.submit("m", row(1)).result(PATIENCE_S).outputs["Y"].tolist() == [[1]]

        async def ask() -> list[Any]:
            return [(await runtime.ainfer("m", row(1)))["Y"].tolist() for _ in range(3)]

        assert asyncio.run(ask()) == [[[1]]] * 3
        assert [each.outputs["Y"].tolist() for each in runtime.stream("m", row(1))] == [[[1]]]
        assert executions(backend) == 1


def test_requests_that_come_together_are_looked_for_each_by_itself(folder: Path) -> None:
    backend = HoldingBackend()
    more: dict[str, Any] = {"max_batch_size": 4, "dynamic_batching": {"default_queue_policy": {"max_queue_size": 1}}}
    with cached(folder, backend, **more) as runtime:
        backend.is_quick = True
        runtime.infer("m", row(1), timeout_s=PATIENCE_S)
        backend.is_quick = False
        hosted = hosted_in(runtime, "m")
        scheduler = hosted.scheduler
        assert isinstance(scheduler, CachingScheduler)
        requests = [_with_waiter(make_request(hosted.signature, row(value))) for value in (1, 2, 1, 3, 4)]
        scheduler.submit_all(requests)
        backend.is_quick = True
        backend.wait_for(2).answer()
        outcomes = [
            wait_until(lambda each=each: each.waiter.outcome, PATIENCE_S)  # type: ignore[misc]
            for each in requests
        ]
        values = ["full" if isinstance(each, QueueFull) else each.outputs["Y"].item() for each in outcomes]
        # One waits, as the policy says, and two are refused. The refused ones leave nothing behind.
        assert values == [1, 2, 1, "full", "full"]
        left = [weakref.ref(each.arrays[0]) for each in requests[3:]]
        del requests, outcomes
        wait_until(lambda: gc.collect() >= 0 and all(each() is None for each in left))
        assert [values for _, values in backend.batches] == [[1], [2]]


class Unwilling:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_response_that_cannot_be_kept_reaches_its_caller(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = Unwilling()

    def execute(_: ModelInstance, requests: Any) -> list[Any]:
        return [Response({"Y": np.array([given], object)}) for _ in requests]

    backend = Recorder(execute=execute)
    with cached(folder, backend) as runtime:
        for _ in range(2):
            assert runtime.infer("m", x(1))["Y"].tolist() == [given]
        assert executions(backend) == 2
        assert "a response of model 'm' cannot be kept" in caplog.text


def test_without_a_cache_every_request_is_executed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = Recorder()
    with Runtime(backends=[backend]) as runtime:
        runtime.load("m", folder, config=config(**CACHED))
        for _ in range(2):
            runtime.infer("m", x(1))
        assert executions(backend) == 2
        assert "model 'm' asks for a response cache, but there is no cache: make the runtime with Runtime(resp" in (
            caplog.text
        )
        assert "nv_cache" not in runtime.metrics()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model_transaction_policy": {"decoupled": True}}, "'decoupled' transaction policy"),
        ({"sequence_batching": {}}, "sequence batching scheduler"),
    ],
)
def test_models_that_cannot_have_one_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({"name": "m", **config(**CACHED), **more})
    assert (
        caught.value.what
        == f"Response Cache does not currently support model m with {why}. Please disable the response cache."
    )


@pytest.mark.parametrize("size", [0, -1, 1.5, "1", True])
def test_a_size_is_a_number_of_bytes(size: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number from 1 on"):
        Runtime(response_cache_bytes=size)


def _parameters(count: int, name: str, value: Any) -> Any:
    return lambda number: Response({}, {f"{name}{number}{i}": value for i in range(count)})


def _outputs(count: int, name: str, *shape: int) -> Any:
    tensor: Any = WireTensor(1, shape, np.zeros(int(np.prod(shape)), np.uint8))
    return lambda number: Response({f"{name}{number}{i}": tensor for i in range(count)})


# What a model chooses of its responses, and what an estimate could leave out.
CHOSEN: dict[str, Any] = {
    "nothing": _parameters(0, "", ""),
    "numbers": _parameters(200, "p", 1 << 62),
    "long names": _parameters(50, "n" * 1000, True),
    "wide names": _parameters(50, "\N{GRINNING FACE}" + "n" * 1000, True),
    "wide texts": lambda number: Response({}, {"p": f"{number}\N{GRINNING FACE}" + "t" * 9999}),
    "accents": lambda number: Response({}, {"p": f"{number}" + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 9999}),
    "many outputs": _outputs(200, "o", 1),
    "wide names of outputs": _outputs(50, "\N{GRINNING FACE}" + "n" * 1000, 1),
    "many dimensions": _outputs(20, "o", *[1] * 16),
    "no values of large dimensions": _outputs(50, "o", 0, *[1 << 40] * 15),
    "large outputs": _outputs(2, "o", 1 << 16),
}


@pytest.mark.promise(
    "Requests",
    "The response cache takes no more memory than it was given, whatever models put into their responses: names, "
    "parameters and shapes count.",
)
@pytest.mark.parametrize("what", CHOSEN)
def test_an_entry_takes_no_more_memory_than_is_counted(what: str) -> None:
    cache = ResponseCache(1 << 30)
    owner, make = cache.join(), CHOSEN[what]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(10):
            kept = CachedResponse.of(make(number), cache.size_bytes)
            assert kept is not None
            cache.keep((owner, number.to_bytes(32, "little")), kept)
            # CPython keeps the UTF-8 of texts for which a protocol has asked.
            orjson.dumps([*kept.parameters.items(), *kept.outputs])
            del kept
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert len(cache) == 10
    assert taken <= cache.used_bytes
    # An estimate that is far too large would make the cache useless. Small entries have a margin.
    assert cache.used_bytes <= 5 * taken + 10 * 2048


def test_a_response_larger_than_the_cache_is_not_copied() -> None:
    """It has a terabyte, of which no copy could be made."""
    large = np.broadcast_to(np.float32(0), (1 << 38,))
    assert CachedResponse.of(Response({"Y": large}), 1 << 20) is None
