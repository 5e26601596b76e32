"""`moonpool bench --hosts`: one model in several hosts, in turns."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine
from tests.triton.server import VARIABLE, interpreter

QUICK = ("--concurrency", "1,2", "--seconds", "0.05", "--warm-up", "0", "--windows", "3")


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "One model can be measured in several hosts in turns, with ratios over the first one; a host that cannot be "
    "started is left out with the reason.",
)
def test_a_model_is_measured_in_several_hosts(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing may be downloaded, and nothing is in the cache.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(VARIABLE, raising=False)
    ended = cli(
        "bench", MODELS, "add_sub", "--hosts", "moonpool,processpool,mosec,triton", *QUICK, "--instances", "2",
        "--save", ".", "--sandbox-grants", "add_sub", "--model-option", "*:MOONPOOL_THREADS=1",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    for name in ("mosec", "triton"):
        told = ended.stderr.partition(f"moonpool: starts {name}\n")[2].splitlines()
        assert re.fullmatch(rf"builds the environment of .*/{name}\.txt with (uv|pip), which may take minutes", told[0])
        assert told[1].startswith(f"moonpool: {name} is left out: no environment can be built")
    found = json.loads((cli.folder / "add_sub.json").read_text())
    assert found["host"]["name"] == "moonpool"
    command = found["host"]["command"].split()
    assert {"serve", "--sandbox-grants=add_sub", "--model-option=*:MOONPOOL_THREADS=1"} <= {*command}
    in_process, pool = found["hosts"]
    assert [each["host"]["name"] for each in found["hosts"]] == ["moonpool", "processpool"]
    # A pool is called from threads, so it is compared with moonpool in this process.
    assert pool["over"] == in_process["where"] == "in process, threads"
    for each in (found, in_process, pool):
        assert [point["failed"] for point in each["series"]] == [0, 0]
        assert all(point["requests"] for point in each["series"])
    assert pool["series"][0]["ratios"].keys() == {"requests_per_s", "p50", "p99"}
    assert "processpool, in process over in process, threads:" in ended.stdout


@pytest.mark.triton
def test_a_model_is_measured_in_triton(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(interpreter()))
    ended = cli("bench", MODELS, "add_sub", "--hosts", "moonpool,triton", *QUICK, "--resources", "--save", ".")

    assert ended.returncode == 0, ended.stderr
    found = json.loads((cli.folder / "add_sub.json").read_text())
    [triton] = found["hosts"]
    assert triton["over"] == found["where"] == "moonpool, HTTP"
    assert "nvidia-pytriton" in triton["host"]["versions"]
    assert os.path.basename(triton["host"]["command"].split()[0]) == "tritonserver"
    for point in triton["series"]:
        # tritonserver counts a request after it has answered it.
        assert point["requests"] > 0
        assert point["server"]["requests"] > 0
        assert point["resources"]["memory_bytes"] > 0
        assert point["ratios"]["p50"]["median"] > 0


@pytest.mark.triton
@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Faults reach the instances of a model in a tritonserver on this machine, too: for a share of its requests they "
    "hang.",
)
def test_instances_hang_in_triton(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(interpreter()))
    ended = cli(
        "bench", MODELS, "add_sub", "--hosts", "triton", "--hang", "20%@0.05s", "--concurrency", "2",
        "--seconds", "1", "--windows", "3", "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    found = json.loads((cli.folder / "add_sub.json").read_text())
    faults = found["faults"]
    assert (faults["kind"], faults["share"], faults["for_s"]) == ("stopped", 0.2, 0.05)
    # Five answers and a fault fit into a window of any machine; the last fault may be cut short by the end.
    assert faults["count"] > 0
    assert faults["not_recovered"] == 0
    assert faults["recovered_s"]["median"] >= 0.05
    [point] = found["series"]
    assert point["failed"] == 0


def test_none_of_the_hosts_can_be_measured(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    ended = cli("bench", MODELS, "add_sub", "--hosts", "triton", *QUICK)

    assert ended.returncode == 1
    assert "moonpool: triton is left out" in ended.stderr
    assert "none of the hosts can be measured here" in ended.stderr
