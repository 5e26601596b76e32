"""The figures of a window, when windows have settled, and the comparison of two series."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moonpool.benchmarks import result as results
from moonpool.benchmarks.commands.report import title
from moonpool.benchmarks.loads import Concurrency, Rate
from moonpool.benchmarks.result import Incomparable, check_requests, differences, names, ratios, verdict
from moonpool.benchmarks.windows import Point, Split, Window, between, is_stable, merged, sweep
from moonpool.runtime.client.request import BadAddress, Endpoint, QuestionTensor, Tls


def window(requests: int, latency_us: float = 100.0, seconds: float = 1.0) -> Window:
    return Window(seconds, np.full(requests, round(latency_us * 1000), np.int64))


@pytest.mark.parametrize("seconds", [0.001, 1.0, 20.0])
def test_a_constant_rate_is_even(seconds: float) -> None:
    due_ns = Rate(100, "constant").due_ns(seconds, seed=1)

    assert len(due_ns) == max(1, round(100 * seconds))
    assert due_ns[0] == 0
    assert set(np.diff(due_ns)) <= {10_000_000, 9_999_999, 10_000_001}


def test_a_poisson_rate_has_its_mean_and_its_spread() -> None:
    due_ns = Rate(1000, "poisson").due_ns(50.0, seed=1)
    gaps_s = np.diff(due_ns) / 1e9

    assert due_ns[-1] < 50e9
    # The number may be off by five standard deviations.
    assert len(due_ns) == pytest.approx(50_000, abs=5 * 50_000**0.5)
    # An exponential distribution spreads as far as its mean.
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.05)
    assert due_ns.tolist() != Rate(1000, "poisson").due_ns(50.0, seed=2).tolist()


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "A figure comes from three windows that agree. If they do not, the report says that it has not settled.",
)
def test_three_windows_that_agree_are_stable() -> None:
    assert not is_stable([window(100), window(100)], 10)
    assert is_stable([window(100), window(105), window(95)], 10)
    assert not is_stable([window(100), window(130), window(95)], 10)
    # The rate is the same, but the requests are slower and slower.
    assert not is_stable([window(100, 100), window(100, 150), window(100, 200)], 10)
    # Only the last three windows count.
    assert is_stable([window(10), window(100), window(105), window(95)], 10)
    assert not is_stable([window(0), window(0), window(0)], 10)


def test_windows_together_are_one_long_one() -> None:
    first, second = window(10, 100), window(30, 200)
    second.errors = Counter({"no": 2})
    whole = merged([first, second])

    assert (whole.seconds, whole.requests_per_s, whole.failed) == (2.0, 20.0, 2)
    assert whole.latency_us(50) == 200
    assert whole.mean_latency_us == 175


def statistics(count: int) -> dict[str, object]:
    parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    stats = {part: {"count": count, "ns": count * 1000 * (i + 1)} for i, part in enumerate(parts)}
    return {"inference_count": 3 * count, "execution_count": count, "inference_stats": stats}


def test_a_split_is_what_was_counted_meanwhile() -> None:
    split = between(statistics(10), statistics(30))

    assert split is not None
    assert (split.requests, split.rows_per_execution, split.mean_us("queue")) == (20, 3.0, 2.0)
    assert between(None, statistics(1)) is None


def test_a_split_reads_what_protobuf_makes_of_json() -> None:
    stats = {"queue": {"ns": "5000", "count": "1"}, "success": {"count": "1"}}
    split = between({}, {"inference_count": "1", "execution_count": "1", "inference_stats": stats})

    assert split == Split(1, 1, 1, {"queue": 5000, "compute_input": 0, "compute_infer": 0, "compute_output": 0})


class Steps:
    """A subject whose windows are given."""

    def __init__(self, where: str, counts: list[int], log: list[str]) -> None:
        self.where = where
        self._counts = iter(counts)
        self._log = log

    def window(self, load: object, seconds: float) -> Window:
        del load
        self._log.append(self.where)
        return window(next(self._counts), seconds=seconds)

    def advice(self, whole: Window) -> None:
        del whole

    def answered(self) -> None:
        return None

    def configuration_fields(self) -> None:
        return None

    def measure_resources(self, metrics_url: str | None) -> None:
        del metrics_url

    def instance_pids(self) -> list[int]:
        return []


def test_subjects_take_turns_until_all_are_stable() -> None:
    log: list[str] = []
    subjects = [Steps("a", [100] * 5, log), Steps("b", [10, 20, 30, 30, 30], log)]
    [[first, second]] = sweep(
        subjects, [Concurrency(1)], seconds=1.0, warm_up_s=0.0, most_windows=9, stable_percent=5, tell=lambda *_: None
    )

    assert "".join(log) == "abbaabbaab"
    assert first.stable
    assert second.stable
    assert len(second.whole.latencies_ns) == 90


@pytest.mark.promise("Measuring (`moonpool bench`)", "A figure comes from three …")
def test_a_load_that_does_not_settle_is_given_up_and_reported() -> None:
    [[point]] = sweep(
        [Steps("a", [1, 100, 1, 100], [])],
        [Concurrency(1)],
        seconds=1.0,
        warm_up_s=0.0,
        most_windows=4,
        stable_percent=5,
        tell=lambda *_: None,
    )

    assert not point.stable
    assert len(point.windows) == 4


def test_ratios_are_of_pairs_where_windows_were_in_turns() -> None:
    def figures(rate: float, p50: float | None) -> dict[str, object]:
        return {"requests_per_s": rate, "latency_us": {"p50": p50, "p99": None}}

    ours, theirs = [figures(10, 1), figures(40, 1)], [figures(5, 2), figures(10, None)]

    found = ratios(ours, theirs, in_turns=True)
    assert found["requests_per_s"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert found["p50"]["median"] == 0.5
    assert "p99" not in found
    # Otherwise each window is compared with the others' median.
    assert ratios(ours, theirs, in_turns=False)["requests_per_s"]["most"] == pytest.approx(40 / 7.5)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    point = Point(Concurrency(4), [window(10, 100), window(12, 100)], stable=False)
    found = results.result({"model": "m", "where": "here", "inputs": {}}, [point])
    written = results.write(tmp_path / "new", "m", found)

    assert [path.name for path in written] == ["m.json", "m.csv"]
    assert results.read(written[0]) == json.loads(json.dumps(found))
    head, line = (row.split(",") for row in written[1].read_text().splitlines())
    row = dict(zip(head, line, strict=True))
    assert (row["concurrency"], row["requests"], row["latency_p50_us"]) == ("4", "22", "100.0")
    assert row["server_queue_us"] == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("[]", "is not a JSON object"),
        ('{"series": [], "format": 99}', "is of format 99"),
        ('{"series": [], "format": 1}', "it has no `model`"),
        (
            '{"series": [{}], "format": 1, "model": "", "where": "", "date": "", "inputs": {}}',
            "a point of `series` has no `stable`",
        ),
    ],
)
def test_a_file_that_is_not_a_result_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)

    with pytest.raises(results.BadResult, match=reason):
        results.read(path)


def test_a_result_is_not_replaced_unless_it_is_wanted(tmp_path: Path) -> None:
    found = results.result({"model": "m", "where": "here", "inputs": {}}, [])
    results.check_free(tmp_path, "m")
    results.write(tmp_path, "m", found)

    with pytest.raises(results.BadResult, match=r"m\.json exists already: .*--label"):
        results.check_free(tmp_path, "m")
    with pytest.raises(FileExistsError):
        results.write(tmp_path, "m", found)
    assert len(results.write(tmp_path, "m", found, overwrite=True)) == 2
    results.check_free(tmp_path, "m", overwrite=True)
    results.check_free(tmp_path, "m-other")


def test_a_folder_that_cannot_be_made_is_found_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        results.check_free(tmp_path / "file", "m")


def about(**changes: object) -> dict[str, object]:
    """Return the description in a result."""
    usual = {
        "model": "m", "where": "here", "date": "today", "processes": 1, "instances": None,
        "inputs": {"X": ["FP32", 1, 4]}, "requests_digest": "a", "configuration_fields": {"input": "1"},
    }  # fmt: skip
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inputs": {"X": ["FP32", 2, 4]}}, r"file: X FP32 \[2, 4\] there, X FP32 \[1, 4\] here"),
        ({"requests_digest": "b"}, "with other values"),
    ],
)
def test_results_of_other_requests_are_not_compared(changes: dict[str, object], reason: str) -> None:
    check_requests(about(), about(processes=2), "file")

    with pytest.raises(Incomparable, match=reason.replace("file:", "file was .*:")):
        check_requests(about(), about(**changes), "file")


@pytest.mark.promise("Measuring (`moonpool bench`)", "Results of different requests are not …")
def test_other_differences_are_named() -> None:
    assert differences(about(), about(date="yesterday", where="there")) == []
    assert differences(about(), about(processes=2, configuration_fields={"input": "1", "backend": "2"})) == [
        "processes of the generator (1 and 2)",
        "the model's configuration (backend)",
    ]
    [untold] = differences(about(), about(configuration_fields=None))
    assert untold.startswith("maybe the model's configuration")
    older = about()
    del older["requests_digest"], older["configuration_fields"]
    assert len(differences(about(), older)) == 2


def test_results_are_told_apart_by_what_differs() -> None:
    assert names(about(label="old"), about(label="new")) == ("old", "new")
    assert names(about(label="old"), about(where="http://a")) == ("old", "http://a")
    assert names(about(), about(where="http://a")) == ("here", "http://a")
    assert names(about(instances=2), about()) == (
        "instances: 2", "instances: the model's choice",
    )  # fmt: skip
    assert names(about(), about(date="yesterday")) == ("of today", "of yesterday")


def test_a_picture_s_title_says_what_differs() -> None:
    found = about(instances=2)
    assert title(found) == "m, X FP32 [1, 4]\nhere"
    found["against"] = about(where="http://a")
    assert title(found) == "m, X FP32 [1, 4]\nhere (solid) and http://a (dashed)"


@pytest.mark.promise("Measuring (`moonpool bench`)", "A comparison shows both tables, and …")
@pytest.mark.parametrize(
    ("name", "least", "most", "word"),
    [
        ("requests_per_s", 1.1, 1.3, "better"),
        ("requests_per_s", 0.8, 0.9, "worse"),
        ("p50", 0.8, 0.9, "better"),
        ("p99", 1.1, 1.3, "worse"),
        ("p99", 0.9, 1.3, "alike"),
    ],
)
def test_a_ratio_is_better_or_worse_where_all_windows_agree(name: str, least: float, most: float, word: str) -> None:
    assert verdict(name, {"least": least, "median": 1.0, "most": most}) == word


def test_a_request_s_digest_is_of_every_byte() -> None:
    def digest(name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> str:
        return results.digest_of_requests([QuestionTensor(name, datatype, shape, data)])

    usual = digest("X", "INT8", (2, 1), b"ab")
    assert usual == digest("X", "INT8", (2, 1), b"ab")
    others = [
        digest("Y", "INT8", (2, 1), b"ab"),
        digest("X", "UINT8", (2, 1), b"ab"),
        digest("X", "INT8", (1, 2), b"ab"),
        digest("X", "INT8", (2, 1), b"ac"),
    ]
    assert len({usual, *others}) == 5


def test_a_configuration_s_digest_is_of_its_meaning() -> None:
    over_http = {"name": "m", "max_batch_size": 8, "input": [{"name": "X", "dims": [4]}]}
    over_grpc = {"max_batch_size": "8", "input": [{"name": "X", "dims": ["4"]}], "backend": ""}
    found = results.digests_of_configuration(over_http)

    assert found.keys() == {"max_batch_size", "input"}
    assert found == results.digests_of_configuration({**over_grpc, "unheard_of": 1})
    assert found["input"] != results.digests_of_configuration({"input": [{"name": "Y"}]})["input"]
    with pytest.raises(ValueError, match="no configuration of a model"):
        results.digests_of_configuration({"max_batch_size": {}})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://localhost", Endpoint("http", "localhost", 8000)),
        ("grpc://[::1]:9", Endpoint("grpc", "::1", 9)),
        ("http://a:1/b/", Endpoint("http", "a", 1, "/b")),
        ("https://a", Endpoint("http", "a", 443, tls=Tls())),
        ("grpcs://a:9", Endpoint("grpc", "a", 9, tls=Tls())),
    ],
)
def test_an_address_is_read(text: str, found: Endpoint) -> None:
    assert Endpoint.parse(text) == found
    assert Endpoint.parse(found.url) == found


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://a", "http://a:x", "grpc://a/b", "grpcs://a/b", "http://u@a", ""]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(BadAddress):
        Endpoint.parse(text)
