"""`moonpool check`: one line a finding, and an exit code for CI."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, write_model

IO = 'input { name: "X" data_type: TYPE_FP32 dims: 1 }\noutput { name: "Y" data_type: TYPE_FP32 dims: 1 }\n'
TRITON = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with everything that can be wrong."""
    repository = tmp_path_factory.mktemp("repository") / "models"
    write_model(repository, "good", TRITON, IO)
    write_model(repository, "misspelt", TRITON, IO + "max_bach_size: 3\n")
    write_model(repository, "unused", TRITON, IO + "optimization { eager_batching: true }\n")
    (repository / "unused" / "01").mkdir()
    write_model(repository, "syntax", "x = 1\ndef f(:\n  # TritonPythonModel\n", IO)
    write_model(repository, "needs", "import not_there\n" + TRITON, IO)
    write_model(repository, "raises", TRITON + "    def initialize(self, args):\n        1 / 0\n", IO)
    write_model(repository, "dies", "import os\nos._exit(7)\n" + TRITON, IO)
    environment = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/no/env" } }\n'
    write_model(repository, "homeless", TRITON, IO + environment)
    (repository / "empty").mkdir()
    return repository


EXPECTED = {
    "good": r"ok: good: version 1, 1 instance, loaded in [0-9.]+ s",
    "misspelt": r"error: misspelt: models/misspelt/config\.pbtxt:3: max_bach_size: .+",
    "syntax": r"error: syntax: models/syntax/1/model\.py:2: SyntaxError: .+",
    "needs": r"error: needs: models/needs/1/model\.py:1: ModuleNotFoundError: .+'not_there'; install not_there for .+ EXECUTION_ENV_PATH",
    "raises": r"error: raises: models/raises/1/model\.py:5: .*ZeroDivisionError: .+",
    "dies": r"error: dies: models/dies: .+ exited with 7 .+",
    "homeless": r"error: homeless: models/homeless/config\.pbtxt:3: .+/no/env.+",
    "empty": r"error: empty: models/empty(/config\.pbtxt)?: .+",
}


def test_every_model_gets_its_line(cli: CommandLine, models: Path) -> None:
    (cli.folder / "models").symlink_to(models)

    ended = cli("check", "models")

    lines = ended.stdout.splitlines()
    by_model = {line.split(": ")[1]: line for line in lines if "unused" not in line}
    assert [line for name, line in by_model.items() if not re.fullmatch(EXPECTED[name], line)] == []
    assert set(by_model) == set(EXPECTED)
    assert [line for line in lines if "unused" in line] == [
        "warning: unused: models/unused/config.pbtxt:3: optimization: has no effect in moonpool",
        "warning: unused: models/unused/01: is no version: versions are numbers without leading zeros",
        next(line for line in lines if line.startswith("ok: unused: version 1, 1 instance")),
    ]
    assert ended.returncode == 1
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["good"], 0),
        (["unused"], 0),
        (["unused", "--strict"], 1),
        (["homeless", "needs"], 1),
        (["homeless", "needs", "--allow-missing"], 0),
        (["no_such_model"], 1),
    ],
)
def test_the_exit_code_is_1_for_errors(cli: CommandLine, models: Path, arguments: list[str], code: int) -> None:
    ended = cli("check", models, *arguments)

    assert ended.returncode == code, ended.stdout


def test_an_empty_repository_is_a_warning(cli: CommandLine) -> None:
    ended = cli("check", ".")

    assert ended.stdout.startswith("warning: ")
    assert ended.stdout.endswith("there are no models\n")
    assert ended.returncode == 0


def test_the_examples_need_nothing_but_moonpool(cli: CommandLine) -> None:
    ended = cli("check", MODELS)

    assert ended.returncode == 0, ended.stdout
    assert "error" not in ended.stdout


@pytest.mark.promise("Models", "A configuration that asks for more …")
def test_limits_of_configurations_are_those_of_the_server(cli: CommandLine, tmp_path: Path) -> None:
    write_model(tmp_path / "many", "m", TRITON, IO + "instance_group [{ count: 2 }]\n")

    ended = cli("check", str(tmp_path / "many"), "--model-config-limit=instances=1")
    assert "m/config.pbtxt:3: instance_group[0].count: asks for 2 instances" in ended.stdout
    assert ended.returncode == 1
    assert cli("check", str(tmp_path / "many"), "--model-config-limit=instances=2").returncode == 0
    ended = cli("check", str(tmp_path / "many"), "--model-config-limit=bogus")
    assert "--model-config-limit must be one of config_bytes" in ended.stderr


def test_a_pipe_is_an_error_of_its_model_alone(cli: CommandLine, tmp_path: Path) -> None:
    write_model(tmp_path / "mixed", "good", TRITON, IO)
    write_model(tmp_path / "mixed", "pipe", TRITON, IO)
    (tmp_path / "mixed" / "pipe" / "config.pbtxt").unlink()
    os.mkfifo(tmp_path / "mixed" / "pipe" / "config.pbtxt")
    (tmp_path / "mixed" / "root").symlink_to("/")

    ended = cli("check", str(tmp_path / "mixed"))

    assert "ok: good: " in ended.stdout
    assert "pipe/config.pbtxt: cannot be read: it is a named pipe" in ended.stdout
    assert "root links to /, a folder that it lies in" in ended.stdout
    assert ended.returncode == 1


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


KEPT = "kept"


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that ask for more than `strict` gives them."""
    repository = tmp_path_factory.mktemp("strangers") / "strangers"
    (repository / KEPT).mkdir(parents=True)
    asks = parameter("MOONPOOL_SANDBOX_PATHS", f"/usr, rw:{repository / KEPT}")
    write_model(repository, "asks", TRITON, IO + asks + parameter("MOONPOOL_SANDBOX_PORTS", "443"))
    hostile = parameter("EXECUTION_ENV_PATH", "/env,MOONPOOL_SANDBOX_PATHS=rw:/")
    write_model(repository, "hostile", TRITON, IO + hostile)
    return repository


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`moonpool check --sandbox strict` prints what a model asks for beyond its level as an option "
    "that grants this and no more.",
)
def test_the_grants_of_a_model_are_printed_as_an_option_that_grants_them(cli: CommandLine, strangers: Path) -> None:
    (cli.folder / "strangers").symlink_to(strangers)
    paths = f"MOONPOOL_SANDBOX_PATHS=/usr,rw:{strangers / KEPT}"
    grant = f"asks:{paths},MOONPOOL_SANDBOX_PORTS=443"

    ended = cli("check", "strangers", "asks", "--sandbox", "strict")

    file = "strangers/asks/config.pbtxt"
    assert ended.stdout.splitlines() == [
        f"error: asks: {file}:3: asks for {paths}, beyond its sandbox",
        f"error: asks: {file}:4: asks for MOONPOOL_SANDBOX_PORTS=443, beyond its sandbox",
        f"error: asks: to grant this and no more: --sandbox-grants={grant}; "
        f'in Python: Runtime(sandbox_grants=["{grant}"])',
    ]
    assert ended.returncode == 1
    # The line is split as a shell would split it.
    pasted = shlex.split(ended.stdout.splitlines()[-1].split("no more: ")[1].split("; in Python")[0])
    assert pasted == [f"--sandbox-grants={grant}"]
    ended = cli("check", "strangers", "asks", "--sandbox", "strict", *pasted)
    assert ended.stdout.startswith("ok: asks: version 1")
    ended = cli("check", "strangers", "asks", "--sandbox=strict", "--sandbox-grants=asks")
    assert ended.stdout.startswith("ok: asks: version 1")


def test_a_grant_that_would_paste_as_something_else_is_not_printed(cli: CommandLine, strangers: Path) -> None:
    ended = cli("check", strangers, "hostile", "--sandbox", "strict")

    assert ended.stdout.splitlines()[-1].startswith(
        "error: hostile: to grant whatever its configuration says, now and later: --sandbox-grants=hostile; "
    )


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`check`, `infer` and `bench` host models as the operator says, with the options of `serve`.",
)
def test_options_of_models_are_those_of_the_server(cli: CommandLine, strangers: Path) -> None:
    options = ("--model-option=a*:MOONPOOL_SANDBOX_PATHS=/usr", "--model-option=asks:MOONPOOL_SANDBOX_PORTS=80")

    ended = cli("check", strangers, "asks", "--sandbox=strict", *options)
    assert ended.stdout.startswith("ok: asks: version 1")
    ended = cli("check", strangers, "asks", "--model-option=asks:MOONPOOL_SANDBOX=strict")
    assert "asks for MOONPOOL_SANDBOX_PORTS=443" in ended.stdout
    ended = cli("check", strangers, "asks", *options, "--model-option=nobody:MOONPOOL_THREADS=1")
    assert "options are set for model 'nobody', and no repository has such" in ended.stdout
    ended = cli("check", strangers, "--model-option=asks:MOONPOOL_THREAD=1")
    assert (ended.returncode, 'did you mean "MOONPOOL_THREADS"' in ended.stderr) == (2, True)


def test_a_value_that_the_operator_replaces_is_wrong_for_nobody(cli: CommandLine, tmp_path: Path) -> None:
    """The load does not read it either."""
    write_model(tmp_path, "m", TRITON, IO + parameter("MOONPOOL_TASK_LIMIT", "lots"))

    assert "'lots'" in cli("check", tmp_path).stdout
    ended = cli("check", tmp_path, "--model-option=m:MOONPOOL_TASK_LIMIT=64")
    assert (ended.returncode, ended.stdout.split(",")[0]) == (0, "ok: m: version 1")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of a machine that has more than this one: no machine has these GPUs and processors."""
    repository = tmp_path_factory.mktemp("elsewhere") / "elsewhere"
    gpus = "instance_group [{ count: 2 kind: KIND_GPU gpus: [ 4000, 4001 ] }]\n"
    write_model(repository, "gpu", TRITON, IO + gpus)
    both = "instance_group [{ kind: KIND_GPU gpus: [ 4000 ] }, { kind: KIND_GPU gpus: [ 4001 ] }]\n"
    write_model(repository, "gpus", TRITON, IO + both)
    write_model(repository, "needs", "import not_there\n" + TRITON, IO + gpus)
    write_model(repository, "processors", TRITON, IO + parameter("MOONPOOL_CPUS", "9000-9002"))
    step = (
        'step { model_name: "gpu" model_version: -1 input_map { key: "X" value: "X" } '
        'output_map { key: "Y" value: "Y" } }'
    )
    ensemble = f'platform: "ensemble"\n{IO}ensemble_scheduling {{ {step} }}\n'
    write_model(repository, "steps", "", ensemble)
    return repository


def levels(stdout: str) -> list[str]:
    """Return the level and the model of each line but those of steps."""
    lines = [line.split(": ")[:2] for line in stdout.splitlines()]
    return [" ".join(line) for line in lines if line[0] != "step"]


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`moonpool check` finds the mistakes of a model also where the machine lacks its GPUs and processors. "
    "`--as-cpu` checks it on the CPU, and `--allow-missing` makes warnings of what is missing.",
)
def test_a_model_of_a_larger_machine_is_checked_without_what_is_missing(cli: CommandLine, elsewhere: Path) -> None:
    ended = cli("check", elsewhere)

    assert ended.returncode == 1
    assert levels(ended.stdout) == [
        *("error gpu", "ok gpu", "error gpus", "error gpus", "ok gpus"),
        *("error needs", "error needs"),
        *("error processors", "ok processors", "error steps", "ok steps"),
    ]
    lines = ended.stdout.splitlines()
    assert re.search(r"gpu/config.pbtxt:3: instance_group\[0\].*KIND_GPU|gpu id 4000", lines[0])
    assert "use MOONPOOL_AS_CPU=yes, or `moonpool check --as-cpu`" in lines[0]
    assert lines[1].endswith(" s with MOONPOOL_AS_CPU=yes")
    # Both mistakes have the same cure.
    assert ["instance_group[0]" in lines[2], "instance_group[1]" in lines[3]] == [True, True]
    assert "No module named 'not_there'" in lines[6]
    ended = cli("check", elsewhere, "--allow-missing")
    assert ended.returncode == 0
    assert not any(each.startswith("error ") for each in levels(ended.stdout))


def test_models_of_gpus_are_checked_as_for_cpus(cli: CommandLine, elsewhere: Path) -> None:
    ended = cli("check", elsewhere, "gpu", "steps", "--as-cpu")

    assert (ended.returncode, levels(ended.stdout)) == (0, ["ok gpu", "ok steps"])
    assert "2 instances" in ended.stdout
    ended = cli("check", elsewhere, "gpu", "--model-option=*:MOONPOOL_AS_CPU=yes", "--sandbox=strict")
    assert (ended.returncode, levels(ended.stdout)) == (0, ["ok gpu"])


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`moonpool check` lists all mistakes that the files of a model show at once: those of its configuration, "
    "its backend, its versions and the machine.",
)
def test_all_mistakes_of_a_model_are_listed_at_once(cli: CommandLine) -> None:
    config = (
        'max_bach_size: 3\ninput [ { name: "A" data_type: TYPE_FP23 dims: [ 0 ] } ]\n'
        "instance_group [ { kind: KIND_GPU gpus: [ 4000 ] } ]\n"
        'backend: "tensorrt"\n' + parameter("MOONPOOL_PIN", "maybe")
    )
    (cli.folder / "models" / "m").mkdir(parents=True)
    (cli.folder / "models" / "m" / "config.pbtxt").write_text(config)

    ended = cli("check", "models")

    places = [
        *("config.pbtxt:1: max_bach_size", "config.pbtxt:2: input[0].data_type"),
        *("config.pbtxt:2: input[0].dims", "config.pbtxt:3: instance_group[0]"),
        "config.pbtxt:5: parameters[MOONPOOL_PIN]",
    ]
    begins = [f"error: m: models/m/{place}" for place in places]
    begins += [
        "error: m: models/m: unable to find backend library for backend 'tensorrt'",
        "error: m: models/m: at least one version must be available",
    ]
    lines = ended.stdout.splitlines()
    assert [line for line, begin in zip(lines, begins, strict=True) if not line.startswith(begin)] == []
    assert "Run such a model in a tritonserver that has the backend" in lines[5]


def test_templates_are_filled_in_for_the_check(cli: CommandLine) -> None:
    config = 'backend: "${backend}"\nmax_batch_size: ${size}\n' + IO + parameter("LIMIT", "${limit}")
    write_model(cli.folder / "models", "m", TRITON, config)

    (line, *others) = cli("check", "models").stdout.splitlines()
    assert "config.pbtxt:5: parameters: has values that look like places of a template" in line
    (line,) = others
    assert "is a template that is not filled in: ${backend} (line 1), ${size} (line 2);" in line
    filled = ["--fill=backend=python", "--fill=size=4", "--fill=limit=3"]
    ended = cli("check", "models", *filled)
    assert (ended.returncode, levels(ended.stdout)) == (0, ["ok m"])
    ended = cli("check", "models", *filled, "--fill=no=1")
    assert "no configuration has a place 'no' that --fill could fill in" in ended.stdout
    assert "--fill must be NAME=VALUE" in cli("check", "models", "--fill=size").stderr
