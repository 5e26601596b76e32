"""Model repositories on disk, whole and broken."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.runtime.model.config.model import ConfigError, VersionPolicy, minimal
from moonpool.runtime.repository.repository import ModelRepository, RepositoryError

CONFIG = """\
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    add(tmp_path, "add_sub", CONFIG)
    return ModelRepository(tmp_path)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """Make a directory that nobody may look into."""
    if os.geteuid() == 0:
        pytest.skip("root may look into every directory")
    path = tmp_path / "closed"
    path.mkdir(mode=0o000)
    yield path
    path.chmod(0o700)


def add(root: Path, name: str, config: str | None, *versions: str) -> Path:
    for version in versions or ("1",):
        (root / name / version).mkdir(parents=True)
        (root / name / version / "model.py").write_text("class TritonPythonModel: ...\n")
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return root / name


class TestModels:
    def test_models_are_the_directories_in_order(self, repository: ModelRepository) -> None:
        add(repository.path, "b", None)
        add(repository.path, "a", None)
        for extra in (".git", "__pycache__"):
            (repository.path / extra).mkdir()
        (repository.path / "README.md").write_text("")
        (repository.path / "linked").symlink_to(repository.path / "a")
        (repository.path / "dangling").symlink_to(repository.path / "nowhere")

        assert repository.models() == ["a", "add_sub", "b", "linked"]

    def test_a_model_is_found_by_its_name(self, repository: ModelRepository) -> None:
        model = repository.find("add_sub")

        assert model.name == "add_sub"
        assert model.path == repository.path / "add_sub"

    def test_a_model_that_comes_later_is_found_too(self, repository: ModelRepository) -> None:
        with pytest.raises(RepositoryError) as caught:
            repository.find("later")
        add(repository.path, "later", None)

        assert caught.value.code == "NOT_FOUND"
        assert str(caught.value) == f"no model 'later' in the repository {repository.path}"
        assert repository.find("later").versions() == [1]

    @pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../add_sub", "/etc", "a\0", "a;b"])
    def test_a_name_never_leads_out_of_the_repository(self, repository: ModelRepository, name: str) -> None:
        with pytest.raises(RepositoryError) as caught:
            repository.find(name)

        assert caught.value.code == "INVALID_ARG"

    def test_a_repository_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to("gone")

        with pytest.raises(RepositoryError, match=r"model repository: there is no directory .*/none"):
            ModelRepository(tmp_path / "none")
        with pytest.raises(RepositoryError, match=r"/file is not a directory$"):
            ModelRepository(tmp_path / "file")
        with pytest.raises(RepositoryError, match="/link links to gone, which is not there"):
            ModelRepository(tmp_path / "link")

    def test_a_model_that_links_to_nowhere_or_is_a_file_is_named(self, repository: ModelRepository) -> None:
        (repository.path / "m").symlink_to("gone")
        (repository.path / "file").write_text("")

        with pytest.raises(RepositoryError, match=r"model 'm': .*/m links to gone, which is not"):
            repository.find("m")
        with pytest.raises(RepositoryError, match=r"model 'file': .*/file is not a directory"):
            repository.find("file")

    def test_a_directory_that_may_not_be_read_is_named(self, closed: Path) -> None:
        with pytest.raises(RepositoryError, match=r"cannot read .*/closed.*: Permission denied"):
            ModelRepository(closed).models()

    def test_a_repository_may_be_named_relative_to_where_one_is(
        self, repository: ModelRepository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(repository.path.parent)
        relative = ModelRepository(repository.path.name)
        monkeypatch.chdir("/")

        assert relative.models() == ["add_sub"]


class TestConfig:
    def test_name_and_backend_come_from_the_directory(self, repository: ModelRepository) -> None:
        config = repository.find("add_sub").config()

        assert (config.name, config.backend, config.max_batch_size) == ("add_sub", "python", 4)
        assert config.source.file == str(repository.path / "add_sub" / "config.pbtxt")

    def test_a_model_without_a_configuration_has_the_minimal_one(self, tmp_path: Path) -> None:
        add(tmp_path, "bare", None)

        model = ModelRepository(tmp_path).find("bare")

        assert model.read_config()[0] == minimal("bare")
        assert model.config(partial=True).backend == "python"
        with pytest.raises(ConfigError, match="must specify inputs and outputs for bare"):
            model.config()

    def test_a_name_that_is_not_the_directorys_is_refused(self, tmp_path: Path) -> None:
        model = ModelRepository(tmp_path).find(add(tmp_path, "here", '\nname: "there"').name)

        with pytest.raises(ConfigError) as caught:
            model.config()

        assert str(caught.value) == (
            f"{tmp_path}/here/config.pbtxt:2: name: unexpected directory name 'here' for model"
            " 'there', directory name must equal model name"
        )

    def test_another_backend_stays(self, tmp_path: Path) -> None:
        add(tmp_path, "m", 'backend: "mine"\n' + CONFIG)

        config = ModelRepository(tmp_path).find("m").config()

        assert (config.backend, config.default_model_filename) == ("mine", "")

    def test_a_configuration_without_a_backend_and_without_a_model_file_has_none(self, tmp_path: Path) -> None:
        (add(tmp_path, "m", CONFIG) / "1" / "model.py").unlink()

        with pytest.raises(ConfigError, match=r"config.pbtxt: backend: unexpected platform type ''"):
            ModelRepository(tmp_path).find("m").config()

    def test_a_mistake_in_the_file_names_the_file(self, repository: ModelRepository) -> None:
        path = repository.path / "add_sub" / "config.pbtxt"
        path.write_text(CONFIG + "max_queue_delay: 3")

        with pytest.raises(ConfigError, match=re.escape(f"{path}:4: max_queue_delay: no field")):
            repository.find("add_sub").config()

    def test_a_configuration_that_links_to_nowhere_is_not_taken_for_absent(self, tmp_path: Path) -> None:
        (add(tmp_path, "m", None) / "config.pbtxt").symlink_to("gone")

        with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
            ModelRepository(tmp_path).find("m").read_config()

    def test_a_model_that_is_named_as_the_repository_is_recognised(self, tmp_path: Path) -> None:
        add(tmp_path, "m", None)
        (tmp_path / "flat").mkdir()
        (tmp_path / "flat" / "model.py").touch()

        with pytest.raises(ConfigError, match=re.escape(f"or name {tmp_path} as the repository")):
            ModelRepository(tmp_path / "m").find("1").read_config()
        with pytest.raises(ConfigError, match=re.escape(f"such as {tmp_path}/flat/1; move model.py there") + "$"):
            ModelRepository(tmp_path).find("flat").read_config()

    def test_a_directory_with_nothing_of_a_model_says_what_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "bare" / "1").mkdir(parents=True)
        repository = ModelRepository(tmp_path)

        with pytest.raises(ConfigError, match="neither this file nor a version directory such as"):
            repository.find("empty").read_config()
        missing = re.escape(f"Python model file not found in '{tmp_path}/bare/1/model.py'")
        with pytest.raises(RepositoryError, match=missing):
            repository.find("bare").read_config()


class TestVersions:
    def test_versions_are_numbers_without_leading_zeros(self, tmp_path: Path) -> None:
        add(tmp_path, "m", CONFIG, "10", "2", "0", "003", "-1", "abc", "1.5", "²", "9" * 19)
        (tmp_path / "m" / "7").write_text("a file")

        model = ModelRepository(tmp_path).find("m")

        assert model.versions() == [0, 2, 10]
        assert model.ignored() == ["003", "9" * 19, "²"]

    @pytest.mark.parametrize(
        ("policy", "chosen"),
        [
            ("", [3]),
            ("version_policy { latest { num_versions: 2 } }", [2, 3]),
            ("version_policy { all { } }", [1, 2, 3]),
            ("version_policy { specific { versions: [ 3, 1, 9 ] } }", [1, 3]),
        ],
    )
    def test_the_policy_picks_among_them(self, tmp_path: Path, policy: str, chosen: list[int]) -> None:
        add(tmp_path, "m", CONFIG + policy, "1", "2", "3")

        model = ModelRepository(tmp_path).find("m")

        assert model.chosen_versions(model.config()) == chosen

    def test_no_version_to_load_is_an_error_that_lists_those_there(self, tmp_path: Path) -> None:
        add(tmp_path, "m", CONFIG + "version_policy { specific { versions: 4 } }", "1", "2")
        model = ModelRepository(tmp_path).find("m")
        config = model.config()

        assert config.version_policy == VersionPolicy("specific", 0, (4,))
        with pytest.raises(RepositoryError) as caught:
            model.chosen_versions(config)
        assert str(caught.value) == (
            "at least one version must be available under the version policy of model 'm'"
            f" (in {tmp_path}/m there are: 1, 2)"
        )


class TestModelFile:
    def test_it_is_the_absolute_path(self, repository: ModelRepository) -> None:
        model = repository.find("add_sub")

        assert model.model_file(1) == repository.path / "add_sub" / "1" / "model.py"

    def test_a_missing_one_is_an_error_with_tritons_text(self, repository: ModelRepository) -> None:
        model = repository.find("add_sub")

        with pytest.raises(RepositoryError) as caught:
            model.model_file(1, "other.py")

        path = repository.path / "add_sub" / "1" / "other.py"
        assert str(caught.value) == f"Python model file not found in '{path}'"
        assert caught.value.code == "NOT_FOUND"

    def test_a_directory_in_its_place_is_none(self, repository: ModelRepository) -> None:
        (repository.path / "add_sub" / "2" / "model.py").mkdir(parents=True)

        with pytest.raises(RepositoryError, match="Python model file not found in"):
            repository.find("add_sub").model_file(2)

    def test_one_that_may_not_be_read_is_named(self, repository: ModelRepository) -> None:
        path = repository.path / "add_sub" / "1" / "model.py"
        path.chmod(0o000)
        if os.access(path, os.R_OK):
            pytest.skip("root may read every file")

        with pytest.raises(RepositoryError, match=r"model\.py' cannot be read: check its permissions"):
            repository.find("add_sub").model_file(1)
