"""Tests of a model's environment: packages, environment variables, locale, path."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.wheels import PACKAGES, variables, write_numpy, write_wheel

import moonpool
from moonpool import BadEnvironment, LoadFailed
from moonpool.runtime.repository import environment

FILE = MODELS / "evaluate.py"
SIGNATURE: Config = {"input": [tensor("CODE", "STRING", -1)], "output": [tensor("SAID", "STRING", -1)]}


def said(runtime: moonpool.Runtime, code: str, model: str = "m") -> Any:
    """Return the value of an expression inside the model."""
    text = runtime.infer(model, {"CODE": [code]}, timeout_s=60.0)["SAID"][0].decode()
    return ast.literal_eval(text)


def env_path(path: object) -> Config:
    return {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(path)}}}


def standard(**parameters: str) -> Config:
    """Make parameters for `standard`, whatever level the run has."""
    given = {"MOONPOOL_SANDBOX": "standard", **parameters}
    return {"parameters": {key: {"string_value": text} for key, text in given.items()}}


Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unpack into the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def ask(runtime: moonpool.Runtime) -> Ask:
    """Load a model and return the value of an expression in it."""

    def ask(code: str, config: Config | None = None) -> Any:
        with hosted(runtime, "m", FILE, SIGNATURE | (config or {})):
            return said(runtime, code)

    return ask


@pytest.mark.promise(
    "Environments",
    "An environment is a virtual one, a conda one, or either packed as tar or zip; relative and "
    "model paths lead to it.",
)
class TestEnvironments:
    def test_a_virtual_one_runs_with_its_own_packages(self, ask: Ask, virtual: Path) -> None:
        where, path, variable, libraries = ask(
            "(__import__('only_here').WHERE, os.environ['PATH'], os.environ['VIRTUAL_ENV'],"
            " os.environ['LD_LIBRARY_PATH'])",
            env_path(virtual),
        )

        assert where.startswith(f"{virtual}/lib/")
        assert path.startswith(f"{virtual}/bin:")
        assert variable == str(virtual)
        assert libraries.split(":")[0] == f"{virtual}/lib"

    def test_condas_is_its_own_prefix(self, ask: Ask, conda: Path) -> None:
        where, prefix, base, variable, is_virtual = ask(
            "(__import__('only_here').WHERE, sys.prefix, sys.base_prefix,"
            " os.environ['CONDA_PREFIX'], 'VIRTUAL_ENV' in os.environ)",
            env_path(conda),
        )

        assert where.startswith(f"{conda}/lib/")
        assert (prefix, base, variable, is_virtual) == (str(conda), str(conda), str(conda), False)

    def test_a_relative_path_begins_at_the_runtimes_directory(
        self, ask: Ask, virtual: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(virtual.parent)

        assert ask("sys.prefix", env_path("./env")) == str(virtual)

    def test_the_models_directory_can_hold_it(self, runtime: moonpool.Runtime, virtual: Path, tmp_path: Path) -> None:
        version = tmp_path / "m" / "1"
        version.mkdir(parents=True)
        shutil.copy(FILE, version / "model.py")
        pack_tar(virtual, tmp_path / "m" / "env.tar.gz")
        config = SIGNATURE | env_path("$$TRITON_MODEL_DIRECTORY/env.tar.gz")

        with hosted(runtime, "m", tmp_path / "m", config):
            assert said(runtime, "__import__('only_here').WHERE.split('/')[-1]") == "only_here.py"

    def test_another_interpreters_home_is_left_behind(
        self, ask: Ask, virtual: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A Python that used this variable would not even start.
        monkeypatch.setenv("PYTHONHOME", "/nowhere")

        assert ask("sys.prefix", env_path(virtual)) == str(virtual)

    def test_one_that_is_not_there_is_refused_by_its_name(
        self, runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)

        with pytest.raises(BadEnvironment, match=r"canonical path for nothing/here\."):
            runtime.load("m", FILE, config=SIGNATURE | env_path("nothing/here"))


def pack_tar(root: Path, path: Path) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for entry in sorted(root.iterdir()):
            tar.add(entry, entry.name)


def pack_zip(root: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in sorted(root.rglob("*")):
            name = str(entry.relative_to(root))
            if entry.is_symlink():
                link = zipfile.ZipInfo(name)
                link.external_attr = 0o120777 << 16
                packed.writestr(link, os.readlink(entry))
            else:
                packed.write(entry, name)


@pytest.mark.promise("Environments", "An environment is a virtual one, …")
class TestPacked:
    @pytest.mark.promise(
        "Environments",
        "A packed environment is unpacked once for all instances, models and runtimes, and never used half unpacked.",
    )
    @pytest.mark.parametrize(
        ("kind", "name", "pack"),
        [("virtual", "env.tar.gz", pack_tar), ("virtual", "env.zip", pack_zip), ("conda", "env.tar", pack_tar)],
    )
    def test_it_is_unpacked_once_for_all_instances_and_models(
        self,
        runtime: moonpool.Runtime,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        kind: str,
        name: str,
        pack: Callable[[Path, Path], None],
    ) -> None:
        pack(request.getfixturevalue(kind), tmp_path / name)
        config = SIGNATURE | env_path(tmp_path / name)

        with hosted(runtime, "one", FILE, config, instances=2), hosted(runtime, "other", FILE, config):
            places = {said(runtime, "sys.prefix", model) for model in ("one", "other", "one")}
            (place,) = places
            cache = environment.EnvironmentCache().root
            assert Path(place).parent == cache
            assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
            assert environment.EnvironmentCache().remove_unused() == []

        assert environment.EnvironmentCache().remove_unused() == [Path(place)]
        assert list(cache.iterdir()) == []


@pytest.mark.promise("Environments", "A list of packages gives an environment …")
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_a_list_beside_the_model_gives_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_numpy(wheels)
    write_wheel(wheels, "only_here", {"only_here.py": "WORD = 'listed'\n"})
    for name, value in variables(wheels).items():
        monkeypatch.setenv(name, value)
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    block = "# /// script\n# dependencies = ['only_here']\n# ///\n"
    (version / "model.py").write_text(block + FILE.read_text())
    config = SIGNATURE | env_path("$$TRITON_MODEL_DIRECTORY/1/model.py")
    config["parameters"] |= options(SANDBOX=level, SANDBOX_PATHS=PACKAGES)["parameters"]

    with moonpool.Runtime(sandbox_grants=["m"]) as runtime:
        runtime.load("m", tmp_path / "m", config=config, instances=2)
        cache = environment.EnvironmentCache()

        assert said(runtime, "__import__('only_here').WORD") == "listed"
        assert [each.is_used for each in cache.folders()] == [True]

    cache.remove_unused()


@pytest.mark.promise(
    "Environments",
    "A model has PYTHONPATH, the user's packages and the locale of the runtime; the directory "
    "that the runtime was started in is not on its path.",
)
class TestPath:
    def test_where_the_runtime_was_started_is_not_on_it(
        self, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        assert str(tmp_path) not in ask("sys.path")

    def test_pythonpath_goes_before_everything_as_in_triton(
        self, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "from_pythonpath.py").write_text("WHERE = __file__\n")
        (tmp_path / "colorsys.py").write_text("MINE = True\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

        first, where, mine = ask("(sys.path[0], __import__('from_pythonpath').WHERE, __import__('colorsys').MINE)")

        assert first == str(tmp_path)
        assert where == str(tmp_path / "from_pythonpath.py")
        assert mine

    def test_packages_of_another_python_on_it_are_suspected(
        self, runtime: moonpool.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "numpy.py").write_text("raise ImportError('made for another Python')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        with pytest.raises(LoadFailed, match=r"made for another Python; .* whether PYTHONPATH"):
            runtime.load("m", FILE, config=SIGNATURE)

    def test_the_users_own_packages_are_found(
        self, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conda: Path
    ) -> None:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = tmp_path / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        (packages / "from_the_user.py").write_text("HERE = True\n")
        monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))

        # This Python may be that of a virtual environment, which has no packages of a user. A conda environment has
        # them.
        assert ask("__import__('from_the_user').HERE", env_path(conda))

    def test_the_stubs_own_files_are_no_modules(self, ask: Ask) -> None:
        assert ask("[path for path in sys.path if path.endswith('stub')]") == []
        assert ask("__import__('importlib.util').util.find_spec('handshake') is None")

    def test_the_arguments_are_not_the_models(self, ask: Ask) -> None:
        assert ask("len(sys.argv)") == 1


class TestVariables:
    @pytest.mark.promise(
        "Environments",
        "A model sees the whole environment of the runtime, as in Triton. One in a sandbox sees "
        "no variable that may be a secret unless its configuration names it, and the error of a "
        "model that misses one, in its import or in a request, says how to get it. One line of "
        "the log lists the names of what it does not see.",
    )
    @pytest.mark.parametrize("level", ["off", "standard"])
    def test_all_are_seen_as_in_triton(self, ask: Ask, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
        monkeypatch.setenv("MY_ENV", "there")

        seen = ask("dict(os.environ)", options(SANDBOX=level))

        assert {name: seen.get(name) for name in os.environ} == dict(os.environ)

    @pytest.mark.promise("The sandbox: `strict`", "It sees the …")
    @pytest.mark.promise("Environments", "A model sees the whole environment …")
    @pytest.mark.parametrize("level", ["best-effort", "strict"])
    def test_a_contained_model_sees_none_that_may_be_a_secret_unless_it_was_granted(
        self, ask: Ask, monkeypatch: pytest.MonkeyPatch, level: str
    ) -> None:
        monkeypatch.setenv("MY_ENV", "secret")
        monkeypatch.setenv("MY_OTHER", "also")
        asked = "[os.environ.get(name) for name in ('MY_ENV', 'MY_OTHER')]"

        assert ask(asked, options(SANDBOX=level)) == [None, None]
        assert ask(asked, options(SANDBOX=level, ENVIRONMENT="MY_ENV")) == ["secret", None]
        assert ask(asked, options(SANDBOX=level, ENVIRONMENT="MY_*")) == ["secret", "also"]

    @pytest.mark.promise("Environments", "A model sees the whole environment …")
    def test_a_contained_model_that_misses_one_is_told_how_to_get_it(
        self,
        runtime: moonpool.Runtime,
        model_file: Callable[[str], Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        file = model_file("import os\nos.environ['MY_ENV']\nclass TritonPythonModel: pass\n")
        config = SIGNATURE | options(SANDBOX="strict")
        monkeypatch.setenv("MY_ENV", "its value")
        words = "sees MY_ENV only if it is set for the runtime and MOONPOOL_ENVIRONMENT names it"
        with (
            caplog.at_level("INFO", logger="moonpool"),
            pytest.raises(LoadFailed, match=rf"KeyError: 'MY_ENV'; .* 'strict' {words}"),
        ):
            runtime.load("m", file, config=config)
        (line,) = [text for text in caplog.messages if "does not see" in text]
        assert line.startswith("[m] ")
        assert "MY_ENV" in line
        assert line.endswith("; MOONPOOL_ENVIRONMENT can name those that it needs")
        assert "its value" not in caplog.text

    @pytest.mark.promise("Environments", "A model sees the whole environment …")
    @pytest.mark.parametrize(
        ("level", "words"),
        [
            ("off", "'MY_ENV'; set MY_ENV for the runtime, whose environment the model has"),
            ("standard", "'MY_ENV'; set MY_ENV for the runtime, whose environment the model has"),
            ("strict", "it is set for the runtime and MOONPOOL_ENVIRONMENT names it"),
        ],
    )
    def test_a_request_that_misses_one_is_told_as_well(
        self,
        runtime: moonpool.Runtime,
        model_file: Callable[[str], Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        level: str,
        words: str,
    ) -> None:
        """Check that the line which lists them is limited, and comes once for all instances."""
        monkeypatch.delenv("MY_ENV", raising=False)
        for number in range(300):
            monkeypatch.setenv(f"MY_{number:03}_{'X' * 200}", "")
        file = model_file(
            "import os\nclass TritonPythonModel:\n    def execute(self, requests): return os.environ['MY_ENV']\n"
        )
        caplog.set_level("INFO", logger="moonpool")
        config = SIGNATURE | options(SANDBOX=level)
        with hosted(runtime, "m", file, config, instances=2), pytest.raises(moonpool.ModelError, match=words):
            said(runtime, "")
        lines = [text for text in caplog.messages if "does not see" in text]
        assert len(lines) == (1 if level == "strict" else 0)
        for line in lines:
            assert len(line) < 8000
            assert " more; MOONPOOL_ENVIRONMENT" in line

    @pytest.mark.promise(
        "Environments",
        "If a model imports a module that its Python does not have, the error names that Python "
        "and `EXECUTION_ENV_PATH`.",
    )
    def test_a_missing_module_leads_to_the_environment(
        self, runtime: moonpool.Runtime, model_file: Callable[[str], Path]
    ) -> None:
        file = model_file("import scipy_of_another_world\nclass TritonPythonModel: pass\n")
        words = r"install scipy_of_another_world for /.*, or name an environment .* in EXECUTION_ENV_PATH"
        with pytest.raises(LoadFailed, match=words):
            runtime.load("m", file, config=SIGNATURE)

    @pytest.mark.promise(
        "Environments", "No variable leads a model's own interpreter to the packages of the runtime's."
    )
    def test_an_environment_of_its_own_leads_to_no_other_interpreter(
        self, ask: Ask, virtual: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs = {"PYTHONHOME": "/nowhere", "VIRTUAL_ENV": "/nowhere", "CONDA_PREFIX": "/nowhere"}
        for name, value in {**theirs, "MY_ENV": "there"}.items():
            monkeypatch.setenv(name, value)

        seen = ask("dict(os.environ)", standard(EXECUTION_ENV_PATH=str(virtual)))

        assert "/nowhere" not in seen.values()
        assert seen["MY_ENV"] == "there"

    @pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "TZ"])
    def test_variables_of_libraries_are_seen(self, ask: Ask, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "3")

        assert ask(f"os.environ['{name}']") == "3"

    def test_pythons_own_take_effect(self, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("PYTHONSAFEPATH", "1")

        hashes = {ask("hash('moonpool')") for _ in range(2)}

        assert len(hashes) == 1
        assert ask("sys.dont_write_bytecode")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("PYTHONOPTIMIZE", "2"),
            ("PYTHONDEVMODE", "1"),
            ("PYTHONMALLOC", "debug"),
            ("PYTHONTRACEMALLOC", "1"),
            ("PYTHONWARNINGS", "error"),
            ("PYTHONIOENCODING", "ascii"),
            ("PYTHONUTF8", "0"),
            ("PYTHONCOERCECLOCALE", "0"),
            ("PYTHONINSPECT", "1"),
            ("PYTHONNOUSERSITE", "1"),
            ("PYTHONASYNCIODEBUG", "1"),
        ],
    )
    def test_a_stub_lives_with_any_of_pythons_own(
        self, ask: Ask, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)

        assert ask(f"(os.environ['{name}'], print('\\u6708'))[0]") == value


@pytest.mark.promise("Environments", "A model has PYTHONPATH, the user's …")
class TestLocale:
    @pytest.mark.parametrize(
        ("value", "expected", "language"),
        [
            # Pythons before 3.12 take C.UTF-8 for American English.
            ("C.UTF-8", "C.UTF-8", ("C" if sys.version_info >= (3, 12) else "en_US", "UTF-8")),
            ("C", "C", (None, None)),
            ("no_SUCH.locale", "C", (None, None)),
        ],
    )
    def test_it_is_set_from_the_environment(
        self,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
        value: str,
        expected: str,
        language: tuple[str | None, str | None],
    ) -> None:
        monkeypatch.setenv("LC_ALL", value)

        found, of_language, of_files = ask(
            "(locale.setlocale(locale.LC_CTYPE), locale.getlocale(), sys.getfilesystemencoding())"
        )

        assert found == expected
        assert tuple(of_language) == language
        assert of_files == "utf-8"

    def test_text_of_any_language_is_printed(
        self, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("LC_ALL", "C")

        with caplog.at_level("INFO", logger="moonpool"):
            ask("print('\\u6708\\u306e\\u30d7\\u30fc\\u30eb')")

        assert any("\u6708\u306e\u30d7\u30fc\u30eb" in text for text in caplog.messages)
