"""Options that an operator sets of models by name, before any of them is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.repositories import CONFIG, write

import moonpool
from moonpool.runtime.model.config.options import OperatorOptions, read_model_option, said_in_a_load
from moonpool.runtime.repository.grants import Grants
from moonpool.runtime.repository.loading import HostingRules, Wanted, prepare
from moonpool.runtime.repository.repository import ModelRepositories

MEMORY, THREADS = "MOONPOOL_MEMORY_LIMIT_BYTES", "MOONPOOL_THREADS"


def options(*texts: str) -> OperatorOptions:
    return OperatorOptions(map(read_model_option, texts))


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "An exact name takes precedence over a pattern, a longer pattern over a shorter one, and the command line over the "
    "environment and the file.",
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_name_overrides_a_pattern_and_a_longer_pattern_a_shorter_one(order: int) -> None:
    said = (f"a-1:{MEMORY}=1G", f"a-*:{MEMORY}=2G", f"*:{MEMORY}=3G", f"*:{THREADS}=1")
    found = options(*said[::order])

    assert found.of("a-1") == {MEMORY: "1G", THREADS: "1"}
    assert found.of("a-2") == {MEMORY: "2G", THREADS: "1"}
    assert found.of("b") == {MEMORY: "3G", THREADS: "1"}


def test_the_later_of_two_values_counts() -> None:
    assert options(f"a:{MEMORY}=1G", f"a:{MEMORY}=2G").of("a") == {MEMORY: "2G"}


def test_only_a_star_stands_for_other_characters() -> None:
    found = options(f"a.b:{THREADS}=1", f"*-x:{THREADS}=2", f"c*:{THREADS}=3")

    assert [name for name in ("a.b", "acb", "-x", "y-x", "c", "c-x", "d") if found.of(name)] == [
        "a.b",
        "-x",
        "y-x",
        "c",
        "c-x",
    ]


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "An option that does not exist, on the command line, in the environment, in the file or in a "
    "program, is an error that names the place and the nearest option. A model that is in no "
    "repository is a warning.",
)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a", "MODEL:OPTION=VALUE"),
        (f"a:{THREADS}", "MODEL:OPTION=VALUE"),
        (f":{THREADS}=1", "MODEL:OPTION=VALUE"),
        ("a:MOONPOOL_MEMORY_LIMIT_BITES=1G", f'did you mean "{MEMORY}"'),
        ("a:MEMORY_LIMIT_BYTES=1G", f'did you mean "{MEMORY}"'),
        ("a:memory-limit-bytes=1G", f'did you mean "{MEMORY}"'),
        ("a:sandbox=strict", 'did you mean "MOONPOOL_SANDBOX"'),
        ("a:color=red", "there is no option 'color'"),
        (f"a:{MEMORY}=much", f"{MEMORY} must be a number of bytes"),
        (f"a b:{THREADS}=1", "the name of a model"),
        (f"a,b:{THREADS}=1", "the name of a model"),
        (f"[ab]:{THREADS}=1", "the name of a model"),
        (f"a:b:{THREADS}=1", "there is no option"),
    ],
)
def test_a_malformed_option_is_an_error_that_shows_the_form(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        read_model_option(text)


def test_a_load_takes_plain_values_and_knows_its_options() -> None:
    assert said_in_a_load(None, None, None) is None
    said = said_in_a_load("strict", {MEMORY: "1G", THREADS: 2}, {"color": "red", "size": 1.5})
    assert said == {"MOONPOOL_SANDBOX": "strict", MEMORY: "1G", THREADS: "2", "color": "red", "size": "1.5"}
    for wrong, what in (
        ((None, {"MOONPOOL_THREAD": "2"}, None), f'did you mean "{THREADS}"'),
        ((None, {MEMORY: "much"}, None), "must be a number of bytes"),
        ((None, {"MOONPOOL_RETRY": True}, None), "must be a text or a number, not True"),
        ((None, None, {THREADS: "2"}), "give it in options="),
        ((None, None, {"MOONPOOL_NEW": "2"}), "give it in options="),
        (("strict", {"MOONPOOL_SANDBOX": "off"}, None), "give one of them"),
        (("strictly", None, None), "sandbox: must be off, standard"),
        ((None, f"{THREADS}=2", None), "options: must be a map of texts to texts or numbers, not 'MOONPOOL_THREADS=2'"),
        ((None, None, ["color=red"]), "parameters: must be a map"),
    ):
        with pytest.raises(moonpool.ConfigError) as caught:
            said_in_a_load(*wrong)
        assert what in str(caught.value)


def test_a_runtime_knows_its_levels_its_grants_and_its_options() -> None:
    with pytest.raises(ValueError, match="sandbox must be off, standard"):
        moonpool.Runtime(sandbox="strictly")
    with pytest.raises(ValueError, match="'MOONPOOL_THREADS' cannot be granted; these can: "):
        moonpool.Runtime(sandbox="strict", sandbox_grants=["m:MOONPOOL_THREADS=1"])
    with pytest.raises(moonpool.ConfigError, match=r'model_options\[m\].*did you mean "MOON'):
        moonpool.Runtime(model_options={"m": {"MOONPOOL_THREAD": "1"}})
    with pytest.raises(moonpool.ConfigError, match=r"model_options\[m\]: must be a map"):
        moonpool.Runtime(model_options={"m": "MOONPOOL_THREADS=1"})  # type: ignore[dict-item]
    with pytest.raises(moonpool.ConfigError, match="model_options: must be a map"):
        moonpool.Runtime(model_options=["m:MOONPOOL_THREADS=1"])  # type: ignore[arg-type]
    # A text is a sequence of letters, which could be names of models.
    with pytest.raises(ValueError, match="sandbox_grants must be a list of texts, not 'm:"):
        moonpool.Runtime(sandbox="strict", sandbox_grants="m:MOONPOOL_SANDBOX_PORTS=1")
    with pytest.raises(ValueError, match="sandbox_grants must be a list of texts, not 'm'"):
        moonpool.Runtime(sandbox="strict", sandbox_grants="m")


@pytest.mark.promise("The server (`moonpool serve`)", "An option that does not exist, …")
def test_options_of_missing_models_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "there")
    said = {"their": {THREADS: "1"}, "the*": {THREADS: "1"}, "no-*": {THREADS: "1"}}
    with moonpool.Runtime(tmp_path, models=(), sandbox_grants=["thee", "there"], model_options=said):
        pass

    assert [record.getMessage() for record in caplog.records] == [
        "options are set for model 'no-*', and no repository has such a model",
        "options are set for model 'their', and no repository has such a model; did you mean \"there\"?",
        "model 'thee' is granted something, and no repository has such a model; did you mean \"there\"?",
    ]


# Levels


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A sandbox level that the operator sets for one model is the least level of that model, in "
    "place of the level for all.",
)
@pytest.mark.parametrize(
    ("rule", "operator", "own", "level"),
    [
        (None, "strict", None, "strict"),
        (None, "strict", "off", "strict"),
        (None, "standard", "strict", "strict"),
        ("strict", "standard", None, "standard"),
        ("strict", "standard", "off", "standard"),
        ("strict", "standard", "strict", "strict"),
        ("strict", "off", "off", "off"),
    ],
)
def test_a_level_for_one_model_is_its_lowest_level(
    tmp_path: Path, rule: str | None, operator: str, own: str | None, level: str
) -> None:
    parameter = f'key: "MOONPOOL_SANDBOX" value {{ string_value: "{own}" }}'
    write(tmp_path, "m", config=CONFIG if own is None else f"{CONFIG} parameters {{ {parameter} }}")
    rules = HostingRules(rule, options=options(f"m:MOONPOOL_SANDBOX={operator}"))

    assert prepared(tmp_path, Wanted("m"), rules).options.sandbox == level


# What clients and models bring


def prepared(repository: Path, wanted: Wanted, rules: HostingRules) -> moonpool.Model:
    found = prepare(wanted, ModelRepositories([repository]), lambda _: None, rules)
    found.discard()
    return found.models[0]


def brought(parameters: dict[str, str], files: dict[str, bytes] | None = None) -> Wanted:
    config = {"backend": "python", "parameters": {key: {"string_value": text} for key, text in parameters.items()}}
    return Wanted("m", config=config, files=files, is_whole=True)


FILES = {"1/model.py": b"class TritonPythonModel: pass"}


def test_a_configuration_that_is_brought_overrules_nothing_that_the_operator_set(tmp_path: Path) -> None:
    write(tmp_path, "m")
    rules = HostingRules(options=options(f"m:{MEMORY}=64M", "m:MOONPOOL_SANDBOX=strict"))

    for wanted in (
        brought({MEMORY: "64G", "MOONPOOL_SANDBOX": "off"}),
        brought({MEMORY: "64G", "MOONPOOL_SANDBOX": "off"}, FILES),
    ):
        model = prepared(tmp_path, wanted, rules)
        assert model.options.memory_limit_bytes == 64 << 20
        assert model.options.sandbox == "strict"
        assert model.config.parameters[MEMORY] == "64M"
    null = Wanted("m", config={"backend": "python", "parameters": None}, is_whole=True)
    assert prepared(tmp_path, null, rules).options.memory_limit_bytes == 64 << 20


def test_a_configuration_that_is_brought_has_the_grants_of_values_and_not_those_of_a_whole_model(
    tmp_path: Path,
) -> None:
    write(tmp_path, "m")
    whole = HostingRules("strict", grants=Grants(["m"]))
    values = HostingRules("strict", grants=Grants(["m:MOONPOOL_SANDBOX_PATHS=/data"]))

    with pytest.raises(moonpool.ConfigError, match="cannot give it more"):
        prepared(tmp_path, brought({"MOONPOOL_SANDBOX_PATHS": "/data"}), whole)
    model = prepared(tmp_path, brought({"MOONPOOL_SANDBOX_PATHS": "/data"}), values)
    assert model.options.sandbox_paths == (("/data", False),)
    with pytest.raises(moonpool.ConfigError, match="cannot give it more"):
        prepared(tmp_path, brought({"MOONPOOL_SANDBOX_PATHS": "rw:/data"}), values)


@pytest.mark.parametrize(
    "rules",
    [
        HostingRules("strict", grants=Grants(["m"])),
        HostingRules("strict", grants=Grants(["m:MOONPOOL_SANDBOX_PATHS=/data"])),
        HostingRules("strict", options=options("m:MOONPOOL_SANDBOX_PATHS=/data")),
        HostingRules(options=options("*:MOONPOOL_SANDBOX_PATHS=/data", "m:MOONPOOL_SANDBOX=strict")),
    ],
)
def test_files_that_are_brought_have_no_grants(tmp_path: Path, rules: HostingRules) -> None:
    """Such a model is other code than the operator had in mind, and a client could choose the name for its grants."""
    write(tmp_path, "m")

    with pytest.raises(moonpool.ConfigError, match="not for those that a load brings"):
        prepared(tmp_path, brought({"MOONPOOL_SANDBOX_PATHS": "/data"}, FILES), rules)


@pytest.mark.promise(
    "The sandbox: grants",
    "A client or a model that loads a model with a configuration of its own overrules nothing "
    "that the operator set. A grant of a whole model is for the configuration in the repository, "
    "not for one that comes with a load; files that come with a load have no grants at all. A "
    "level that the operator lowered for a model holds for neither.",
)
@pytest.mark.parametrize("files", [None, FILES], ids=["config", "files"])
def test_files_of_a_load_have_no_lower_level_than_all_models(tmp_path: Path, files: dict[str, bytes] | None) -> None:
    """The operator lowered it for what the repository has."""
    write(tmp_path, "m")
    lowered = HostingRules("strict", options=options("m*:MOONPOOL_SANDBOX=off"))

    assert prepared(tmp_path, Wanted("m"), lowered).options.sandbox == "off"
    assert prepared(tmp_path, brought({}, files), lowered).options.sandbox == "strict"
    asking = brought({"MOONPOOL_SANDBOX": "off"}, files)
    assert prepared(tmp_path, asking, lowered).options.sandbox == "strict"
    with pytest.raises(moonpool.ConfigError, match="cannot give it more"):
        prepared(tmp_path, brought({"EXECUTION_ENV_PATH": "/usr"}, files), lowered)
    raised = HostingRules("standard", options=options("m:MOONPOOL_SANDBOX=strict"))
    assert prepared(tmp_path, brought({}, files), raised).options.sandbox == "strict"


@pytest.mark.promise("The server (`moonpool serve`)", "Options that the operator sets of …")
def test_a_program_s_configuration_changes_parameters_one_by_one(tmp_path: Path) -> None:
    parameters = " ".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
        for key, value in (("color", "red"), ("EXECUTION_ENV_PATH", "/env"))
    )
    write(tmp_path, "m", config=f"{CONFIG} {parameters}")

    wanted = Wanted("m", config={"parameters": {"color": "blue", "shape": {"string_value": "o"}}})
    assert prepared(tmp_path, wanted, HostingRules()).config.parameters == {
        "color": "blue",
        "shape": "o",
        "EXECUTION_ENV_PATH": "/env",
    }


# Names


@pytest.mark.promise(
    "The sandbox: grants",
    "No model has a name that the operator's options would read as another name, a pattern or a value.",
)
@pytest.mark.parametrize("name", ["*", "m*", "m;n", "m\nn", "m%3An"])
def test_no_model_has_a_name_that_options_would_read_as_something_else(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    write(tmp_path, "m")
    rules = HostingRules(options=options("m:MOONPOOL_SANDBOX=strict"))

    with pytest.raises(moonpool.MoonpoolError):
        prepared(tmp_path, Wanted(name), rules)
    with pytest.raises(moonpool.MoonpoolError):
        prepared(tmp_path, Wanted(name, tmp_path / "m"), rules)
    # The same holds for files that a client brings.
    wanted = Wanted(name, config={"backend": "python"}, files=FILES, is_whole=True)
    with pytest.raises(moonpool.MoonpoolError):
        prepared(tmp_path, wanted, rules)
