"""Tests of the agent that checks the digests of a model's files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.adders import CONFIG, rows, write_model
from tests.waiting import wait_until

import moonpool
from moonpool import ConfigError, LoadFailed
from moonpool.runtime.model.checksums import Checksum, Checksums
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.server.repository_control import RepositoryControl

PATIENCE_S = 60.0
FILE = "1/model.py"


def agent(**parameters: str) -> dict[str, Any]:
    return {"agents": [{"name": "checksum", "parameters": parameters}]}


def text(name: str, **parameters: str) -> str:
    shown = " ".join(f'parameters {{ key: "{k}" value: "{v}" }}' for k, v in parameters.items())
    return f'\nmodel_repository_agents {{ agents [{{ name: "{name}" {shown} }}] }}'


def guard(folder: Path, algorithm: str = "MD5") -> str:
    """Demand the present digest of the model's file, and return it."""
    digest = hashlib.new(algorithm, (folder / FILE).read_bytes()).hexdigest()
    (folder / "config.pbtxt").write_text(CONFIG + text("checksum", **{f"{algorithm}:{FILE}": digest}))
    return digest


@pytest.mark.promise(
    "Models",
    "A model whose configuration names the agent `checksum` loads only if its files have the MD5 or SHA256 digests "
    "that it demands.",
)
@pytest.mark.parametrize("algorithm", ["MD5", "SHA256"])
def test_a_file_with_another_digest_fails_the_load(tmp_path: Path, algorithm: str) -> None:
    folder = write_model(tmp_path, "m", 1)
    digest = guard(folder, algorithm)
    with moonpool.Runtime(tmp_path, models=()) as runtime:
        runtime.load("m")
        with (folder / FILE).open("a") as file:
            file.write("# forged\n")
        forged = hashlib.new(algorithm, (folder / FILE).read_bytes()).hexdigest()
        with pytest.raises(LoadFailed) as caught:
            runtime.load("m")
        assert str(caught.value) == f"Mismatched {algorithm} hash for file {FILE}, expect: {digest}, got: {forged}"
        assert caught.value.code == "INVALID_ARG"
        assert runtime.infer("m", rows(1), timeout_s=PATIENCE_S)["SUM"].tolist() == [[2]]


@pytest.mark.promise(
    "Models", "A file of such a model that is exchanged while it serves keeps its instances from being restarted."
)
@pytest.mark.parametrize("prefork", ["no", "imports"])
def test_a_file_that_is_forged_later_is_not_run_by_a_restart(tmp_path: Path, prefork: str) -> None:
    folder = write_model(tmp_path, "m", 1)
    guard(folder)
    with moonpool.Runtime(tmp_path, models=()) as runtime:
        runtime.load(
            "m", options={"MOONPOOL_MAX_RESTARTS": "1", "MOONPOOL_RESTART_BACKOFF_S": "0", "MOONPOOL_PREFORK": prefork}
        )
        os.utime(folder / FILE)
        (folder / FILE).write_text((folder / FILE).read_text().replace("a + b", "a - b"))
        hosted = hosted_in(runtime, "m")
        state: Any = hosted.supervisor.records[0].instance.state
        state.process.kill()
        wait_until(lambda: "gave up" in str(hosted.why_not_serving()), PATIENCE_S)
        assert "Mismatched MD5 hash" in str(hosted.why_not_serving())


def test_a_file_is_read_again_only_if_it_may_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    checksums = Checksums((Checksum("md5", "f", hashlib.md5(b"abc").hexdigest()),), tmp_path)
    read: list[str] = []
    original = hashlib.new

    def noted(algorithm: str, *, usedforsecurity: bool) -> Any:
        read.append(algorithm)
        return original(algorithm, usedforsecurity=usedforsecurity)

    monkeypatch.setattr(hashlib, "new", noted)
    # The file is so new that its times could be those of a later change.
    for count in (1, 2):
        checksums.check(stays_inside=True)
        assert len(read) == count
    monkeypatch.setattr("moonpool.runtime.model.checksums._SETTLED_NS", -1)
    for _ in range(3):
        checksums.check(stays_inside=True)
    assert len(read) == 3
    (tmp_path / "g").write_bytes(b"abd")
    os.replace(tmp_path / "g", tmp_path / "f")
    with pytest.raises(LoadFailed, match="Mismatched"):
        checksums.check(stays_inside=True)


@pytest.mark.promise(
    "Models",
    "A model with a repository agent that moonpool does not have is refused, except in a tritonserver, which runs the "
    "agents.",
)
@pytest.mark.parametrize(
    ("agents", "what"),
    [
        (text("relocation"), "moonpool has no repository agent 'relocation', only 'checksum'"),
        (text("checksum", MD5="0" * 32), "failed to parse key: MD5"),
        (text("checksum", **{"CRC:f": "00"}), "Unsupported checksum algorithm: CRC"),
        (text("checksum", **{"MD5:f": "00"}), "a digest of MD5 has 32 hexadecimal digits, not '00'"),
        (text("checksum", **{"MD5:../f": "0" * 32}), "must lie in the folder of the model, not at '../f'"),
        (text("checksum", **{"MD5:/etc/passwd": "0" * 32}), "must lie in the folder of the model"),
        (text("checksum", **{"MD5:": "0" * 32}), "must lie in the folder of the model"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused(tmp_path: Path, agents: str, what: str) -> None:
    write_model(tmp_path, "m", 1, config=CONFIG + agents)
    with moonpool.Runtime(tmp_path, models=()) as runtime, pytest.raises(ConfigError) as caught:
        runtime.load("m")
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("file", "why"), [("missing", "No such file or directory"), ("fifo", "a named pipe"), ("1", "Is a directory")]
)
def test_what_cannot_be_read_fails_the_load(tmp_path: Path, file: str, why: str) -> None:
    folder = write_model(tmp_path, "m", 1, config=CONFIG + text("checksum", **{f"MD5:{file}": "0" * 32}))
    os.mkfifo(folder / "fifo")
    with moonpool.Runtime(tmp_path, models=()) as runtime, pytest.raises(LoadFailed) as caught:
        runtime.load("m")
    assert str(caught.value).startswith(f"failed to open text file for read {file}: ")
    assert why in str(caught.value)


def test_in_a_sandbox_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"abc")
    folder = write_model(tmp_path / "repository", "m", 1)
    (folder / "link").symlink_to(secret)
    checksum = Checksum("md5", "link", hashlib.md5(b"abc").hexdigest())
    Checksums((checksum,), folder).check(stays_inside=False)
    with pytest.raises(LoadFailed, match="outside of"):
        Checksums((checksum,), folder).check(stays_inside=True)


@pytest.mark.promise(
    "Models", "A client that loads a model with a configuration of its own does not get around its checksums."
)
@pytest.mark.parametrize("agents", [None, {"agents": []}, agent(**{f"MD5:{FILE}": "0" * 32})])
def test_a_configuration_of_a_client_takes_no_check_away(tmp_path: Path, agents: dict[str, Any] | None) -> None:
    folder = write_model(tmp_path, "m", 1)
    guard(folder)
    (folder / FILE).write_text((folder / FILE).read_text() + "# forged\n")
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config: dict[str, Any] = {
        "backend": "python",
        "input": [{"name": "A", **tensor}],
        "output": [{"name": "SUM", **tensor}],
    }
    if agents is not None:
        config["model_repository_agents"] = agents
    with moonpool.Runtime(tmp_path, models=()) as runtime:
        with pytest.raises(LoadFailed, match="Mismatched MD5 hash"):
            RepositoryControl(runtime).load("m", json.dumps(config))
        with pytest.raises(LoadFailed, match="Mismatched MD5 hash"):
            runtime.load("m", config={"model_repository_agents": {"agents": []}})


@pytest.mark.parametrize("field", ["cc_model_filenames", "model_operations"])
def test_fields_that_change_results_are_refused_where_a_backend_would_act_on_them(field: str) -> None:
    values: dict[str, Any] = {
        "cc_model_filenames": {"8.0": "model_80.onnx"},
        "model_operations": {"op_library_filename": ["lib.so"]},
    }
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}
    raw = {"name": "m", "input": [tensor], "output": [tensor], field: values[field]}

    ModelConfig.from_dict({**raw, "backend": "python"})
    with pytest.raises(ConfigError, match=f"{field}: has no effect in moonpool, which would"):
        ModelConfig.from_dict({**raw, "backend": "onnxruntime"})


@pytest.mark.promise(
    "Models", "A configuration with a field that would change results, and that moonpool does not act on, is refused."
)
def test_a_passive_instance_is_refused() -> None:
    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}
    raw = {
        "name": "m",
        "backend": "python",
        "input": [tensor],
        "output": [tensor],
        "instance_group": [{"passive": True}],
    }
    with pytest.raises(ConfigError, match="moonpool has no passive instances"):
        ModelConfig.from_dict(raw)
