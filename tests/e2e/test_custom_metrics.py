"""Tests of metrics that models make, which stubs count and the runtime keeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool

CODE: Config = {"input": [tensor("CODE", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
COUNTER = "pb_utils.MetricFamily('{0}', 'about {0}', pb_utils.MetricFamily.COUNTER)"

PAGE = Path(__file__).parents[2] / "docs" / "TRITON_MODELS.md"

Run = Callable[..., str]

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def run(runtime: moonpool.Runtime) -> Iterator[Run]:
    """Run code in a model, and return what it left in `said`."""

    def execute(code: str, model: str = "talks") -> str:
        answer = runtime.infer(model, {"CODE": np.array([code.encode()], np.object_)})
        return bytes(answer["SAID"][0]).decode()

    with hosted(runtime, "talks", MODELS / "talks.py", CODE):
        yield execute


def lines(runtime: moonpool.Runtime, name: str) -> list[str]:
    return re.findall(rf"^{name}[ {{].*$", runtime.metrics(), re.MULTILINE)


def test_all_kinds_are_shown(runtime: moonpool.Runtime, run: Run) -> None:
    run(
        "F = pb_utils.MetricFamily\n"
        "counter = F('c', 'a counter', F.COUNTER); c = counter.Metric({'b': '1', 'a': '2'})\n"
        "gauge = F('g', 'a gauge', F.GAUGE); g = gauge.Metric()\n"
        "histogram = F('h', 'a histogram', F.HISTOGRAM); h = histogram.Metric(buckets=[1, 2.5])\n"
        "c.increment(2); g.set(7); g.increment(-8.5); h.observe(1.5); h.observe(9)\n"
    )

    assert runtime.metrics().endswith(
        "# HELP c a counter\n"
        "# TYPE c counter\n"
        'c{a="2",b="1"} 2\n'
        "# HELP g a gauge\n"
        "# TYPE g gauge\n"
        "g -1.5\n"
        "# HELP h a histogram\n"
        "# TYPE h histogram\n"
        "h_count 2\n"
        "h_sum 10.5\n"
        'h_bucket{le="1"} 0\n'
        'h_bucket{le="2.5"} 1\n'
        'h_bucket{le="+Inf"} 2\n'
    )


@pytest.mark.promise(
    "Metrics",
    "When a response arrives, the changes that its model made to metrics are there. A value "
    "that a model reads includes all changes before it.",
)
def test_a_change_is_there_when_the_response_is(runtime: moonpool.Runtime, run: Run) -> None:
    run(f"family = {COUNTER.format('n')}; metric = family.Metric()")
    for count in range(1, 101):
        run("metric.increment(1)")
        assert lines(runtime, "n") == [f"n {count}"]


@pytest.mark.promise("Metrics", "When a response arrives, the …")
def test_a_value_has_the_changes_that_were_made_before(run: Run) -> None:
    run(f"family = {COUNTER.format('n')}; metric = family.Metric()")
    said = run(
        "said = []\n"
        "for number in range(100):\n"
        "    metric.increment(1)\n"
        "    in_thread(lambda: metric.increment(1))\n"
        "    said.append(metric.value() == 2 * number + 2)\n"
    )

    assert said == repr([True] * 100)


@pytest.mark.promise("Metrics", "Changes from threads, finalizers and forks …")
def test_many_changes_cost_little_and_none_is_lost(runtime: moonpool.Runtime, run: Run) -> None:
    run(f"family = {COUNTER.format('n')}; metric = family.Metric()")
    run("for _ in range(300_000): metric.increment(1)")

    assert lines(runtime, "n") == ["n 300000"]


@pytest.mark.promise(
    "Metrics", "Instances and models share a metric, which ends with the last family and process that has it."
)
def test_instances_and_models_share_a_metric(runtime: moonpool.Runtime, run: Run) -> None:
    with hosted(runtime, "other", MODELS / "talks.py", CODE):
        code = "family = pb_utils.MetricFamily('n', 'of {0}', pb_utils.COUNTER)\n"
        code += "metric = family.Metric({{'a': 'b'}}); metric.increment({1}); said = metric.value()"

        assert run(code.format("talks", 2)) == "2.0"
        assert run(code.format("other", 3), "other") == "5.0"
        assert lines(runtime, "# HELP n") == ["# HELP n of talks"]
        said = run(
            "try: pb_utils.MetricFamily('n', '', pb_utils.GAUGE)\n"
            "except pb_utils.TritonModelException as error: said = str(error)\n",
            "other",
        )
        assert said == repr(
            "Error when creating MetricFamily: Failed to process the request for model 'other_0', "
            "message: Family name already exists with different type"
        )
    assert lines(runtime, "n") == ['n{a="b"} 5']


@pytest.mark.needs("names of metrics")
def test_the_runtimes_own_names_keep_their_kind(runtime: moonpool.Runtime, run: Run) -> None:
    said = run(
        "family = pb_utils.MetricFamily('nv_inference_count', 'mine', pb_utils.COUNTER)\n"
        "family.Metric({'mine': 'yes'}).increment(7)\n"
        "try: pb_utils.MetricFamily('nv_inference_count', 'mine', pb_utils.GAUGE)\n"
        "except pb_utils.TritonModelException as error: said = str(error)\n"
    )

    assert "Family name already exists with different type" in said
    assert len(lines(runtime, "# HELP nv_inference_count")) == 1
    shown = runtime.metrics().splitlines()
    mine = shown.index('nv_inference_count{mine="yes"} 7')
    assert shown[mine - 1].startswith("nv_inference_count{model=")


@pytest.mark.promise("Metrics", "Instances and models share a metric, …")
def test_a_metric_ends_with_its_family_and_its_process(runtime: moonpool.Runtime, run: Run) -> None:
    run(f"family = {COUNTER.format('n')}; family.Metric().increment(1)")
    run(f"other = {COUNTER.format('other')}; other.Metric().increment(1)")
    assert lines(runtime, "n") == ["n 1"]
    run("del family")
    assert lines(runtime, "n") == []
    assert lines(runtime, "other") == ["other 1"]

    with pytest.raises(moonpool.StubDied):
        run("os._exit(1)")
    wait_until(lambda: runtime.is_ready("talks") and lines(runtime, "other") == [])
    run(f"family = {COUNTER.format('other')}; family.Metric().increment(1)")
    assert lines(runtime, "other") == ["other 1"]
    runtime.unload("talks")
    assert lines(runtime, "other") == []
    runtime.load("talks", MODELS / "talks.py", config=CODE)


def test_threads_are_heard_while_no_request_runs(runtime: moonpool.Runtime, run: Run) -> None:
    run(
        f"family = {COUNTER.format('n')}; metric = family.Metric()\n"
        "stop = threading.Event()\n"
        "def count():\n"
        "    while not stop.wait(0.001): metric.increment(1)\n"
        "thread = threading.Thread(target=count); thread.start()\n"
    )

    def count() -> float:
        return float(lines(runtime, "n")[0].split()[1])

    seen = count()
    wait_until(lambda: count() > seen)
    assert run("stop.set(); thread.join(); said = metric.value()") == repr(count())


@pytest.mark.promise("Metrics", "Changes from threads, finalizers and forks …")
@pytest.mark.needs("processes")
def test_forks_count_too_and_their_end_is_not_the_metrics(runtime: moonpool.Runtime, run: Run) -> None:
    said = run(
        f"family = {COUNTER.format('n')}; metric = family.Metric(); metric.increment(1)\n"
        "def child():\n"
        "    global family, metric\n"
        "    metric.increment(2)\n"
        "    if metric.value() != 3: raise ValueError(metric.value())\n"
        f"    own = {COUNTER.format('n')}; own.Metric({{'a': 'b'}}).increment(5)\n"
        "    in_fork(lambda: metric.increment(4))\n"
        "    del family, metric, own; gc.collect()\n"
        "said = [in_fork(child), metric.value()]\n"
    )

    assert said == "[0, 7.0]"
    assert lines(runtime, "n") == ["n 7", 'n{a="b"} 5']


def test_a_value_has_all_that_its_thread_changed_before(run: Run) -> None:
    said = run(
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"family = {COUNTER.format('n')}\n"
        "def counts(number):\n"
        "    metric = family.Metric({'number': str(number)})\n"
        "    for count in range(1, 300):\n"
        "        metric.increment(1)\n"
        "        if metric.value() != count: return count, metric.value()\n"
        "with ThreadPoolExecutor(8) as threads: said = list(threads.map(counts, range(8)))\n"
    )

    assert said == str([None] * 8)


@pytest.mark.promise(
    "Metrics",
    "One model cannot use up all metrics. A stub that lies about its metrics is found out, "
    "and one that floods the runtime with them does not delay others for long.",
)
def test_a_model_cannot_have_all_metrics(runtime: moonpool.Runtime, run: Run) -> None:
    said = run(
        f"family = {COUNTER.format('n')}\n"
        "try:\n"
        "    for number in range(20_000): family.Metric({'number': str(number)})\n"
        "except pb_utils.TritonModelException as error: said = (number, str(error))\n"
    )

    assert said == repr(
        (
            9999,
            "Error when creating Metric: Failed to process the request for model 'talks_0', message: "
            "a model instance has at most 10000 metrics; use labels with fewer values",
        )
    )
    assert len(lines(runtime, "n")) == 9999
    run("del family")
    assert lines(runtime, "n") == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("{'a': 'x' * 5000}", "a label's name and value have at most 4096 characters"),
        ("{f'a{n}': 'x' for n in range(65)}", "a metric has at most 64 labels, not 65"),
        ("{'a': 'x' * 10**7}", "the texts, labels or buckets of a metric are too many"),
        ("{f'a{n}': 'x' for n in range(70_000)}", "the texts, labels or buckets of a metric are too many"),
        ("buckets=[1.0] * 70_000", "Unexpected buckets found"),
        ("{'a': chr(0xd800)}", "the texts of a metric must have a UTF-8 form: 'utf-8' codec"),
    ],
)
def test_a_metric_that_is_too_large_is_refused(run: Run, arguments: str, error: str) -> None:
    said = run(
        f"family = {COUNTER.format('n')}\n"
        f"try: family.Metric({arguments})\n"
        "except pb_utils.TritonModelException as error: said = str(error)\n"
    )

    assert error in said
    assert run("family.Metric().increment(1); said = family.Metric().value()") == "1.0"


def test_metrics_may_be_made_and_used_from_initialize_to_finalize(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path]
) -> None:
    file = model_file(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        self.family = pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.GAUGE)\n"
        "        self.metric = self.family.Metric(labels={'model': args['model_name']})\n"
        "        self.metric.set(3)\n"
        "        if self.metric.value() != 3: raise ValueError(self.metric.value())\n"
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([]) for _ in requests]\n"
        "    def finalize(self):\n"
        "        self.metric.increment(1)\n"
        "        if self.metric.value() != 4: raise ValueError(self.metric.value())\n"
    )
    with hosted(runtime, "early", file, CODE):
        assert lines(runtime, "n") == ['n{model="early"} 3']
    assert lines(runtime, "n") == []


def test_the_model_of_the_page_counts(runtime: moonpool.Runtime, model_file: Callable[[str], Path]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith("# words/1/model.py")]
    config: Config = {"input": [tensor("TEXT", "STRING", 1)], "output": [tensor("COUNT", "INT64", 1)]}
    with hosted(runtime, "words", model_file(block), config):
        text = np.array([b"three words here"], np.object_)
        assert runtime.infer("words", {"TEXT": text})["COUNT"].tolist() == [3]

        assert lines(runtime, "words") == ['words{model="words"} 3']
