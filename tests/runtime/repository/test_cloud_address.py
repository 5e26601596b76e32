"""Addresses of repositories in the cloud: what is read, what is refused, and which credentials go with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.repository.cloud_address import is_address, read_address


def options_of(url: str, **variables: str) -> dict[str, Any]:
    options = dict(read_address(url, variables).options)
    options.pop("config_kwargs", None)
    return options


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("s3://bucket", "bucket"),
        ("s3://bucket/a/b/", "bucket/a/b"),
        ("s3://localhost:9000/bucket/a", "bucket/a"),
        ("s3://https://host.example/bucket", "bucket"),
        ("s3://http://[::1]:9000/bucket/a", "bucket/a"),
        ("gs://bucket/a", "bucket/a"),
        ("as://account/container/a", "container/a"),
        ("hf://owner/model", "owner/model"),
        ("hf://owner/model@v1.0/a", "owner/model@v1.0/a"),
        ("hf://owner/model@refs%2Fpr%2F1", "owner/model@refs%2Fpr%2F1"),
    ],
)
def test_an_address_names_a_store_and_a_folder_in_it(url: str, path: str) -> None:
    assert is_address(url)
    assert read_address(url, {}).path == path


@pytest.mark.parametrize("path", ["models", "/srv/models", "s3:/bucket", "./s3:", Path("s3://b"), ""])
def test_paths_are_no_addresses(path: object) -> None:
    assert not is_address(path)


@pytest.mark.promise(
    "Repositories in the cloud",
    "An address with a user, a password or a query is refused, since it is shown in logs and to clients; the refusal "
    "does not repeat it.",
)
@pytest.mark.parametrize(
    "url",
    [
        "s3://key:SECRET@bucket/a",
        "s3://https://key:SECRET@host:9000/bucket",
        "as://account/container/a?sv=SECRET",
        "gs://bucket/a#SECRET",
        "gs://bucket/SECRET a",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RepositoryError, match="must be a plain address") as raised:
        read_address(url, {})
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://host/a", "moonpool reads s3://, gs://, az://, as://, hf:// and folders"),
        ("https://host/a", "moonpool reads s3://"),
        ("S3://bucket", "moonpool reads s3://"),
        ("s3://", "a folder in it is empty"),
        ("s3://bucket//a", "a folder in it is empty"),
        ("gs://bucket/../other", "a folder in it is empty, '.' or '..'"),
        ("s3://host:port/bucket", "a server of one's own is s3://https://host:port/bucket/folder"),
        ("as://account", "it needs an account and a container"),
        ("az://container/a", "AZURE_STORAGE_ACCOUNT must name the account"),
        ("hf://owner", "it needs an owner and a model"),
        ("hf://owner/model@v1@v2", "it needs an owner and a model"),
    ],
)
def test_an_address_that_cannot_be_read_says_why(url: str, text: str) -> None:
    with pytest.raises(RepositoryError) as raised:
        read_address(url, {})
    assert text in str(raised.value)


def test_a_server_of_ones_own_is_asked_without_tls_unless_the_address_says_so() -> None:
    assert options_of("s3://h:9000/b")["endpoint_url"] == "http://h:9000"
    assert options_of("s3://https://h:9000/b")["endpoint_url"] == "https://h:9000"
    assert "endpoint_url" not in options_of("s3://b/a")


def test_the_variables_of_azure_and_google_are_used() -> None:
    azure = {"AZURE_STORAGE_ACCOUNT": "one", "AZURE_STORAGE_KEY": "key"}
    assert options_of("az://c/a", **azure)["account_name"] == "one"
    found = options_of("as://two/c/a", **azure)
    assert (found["account_name"], found["account_key"], found["anon"]) == ("two", "key", False)
    assert options_of("as://two/c/a")["anon"]
    assert not options_of("as://two/c", AZURE_STORAGE_SAS_TOKEN="token")["anon"]
    managed = options_of("as://two/c", AZURE_STORAGE_AUTH_TYPE="managed_identity")
    assert (managed["anon"], managed["managed_identity"]) == (False, "")
    with pytest.raises(RepositoryError, match="must be managed_identity or default"):
        options_of("as://two/c", AZURE_STORAGE_AUTH_TYPE="magic")
    assert options_of("gs://b", GOOGLE_APPLICATION_CREDENTIALS="/key.json")["token"] == "/key.json"
    assert options_of("hf://o/m", HF_TOKEN="hf_1")["token"] == "hf_1"


@pytest.fixture
def credentials(tmp_path: Path) -> Callable[[object], dict[str, str]]:
    def write(content: object) -> dict[str, str]:
        file = tmp_path / "credentials.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return {"TRITON_CLOUD_CREDENTIAL_PATH": str(file)}

    return write


@pytest.mark.promise(
    "Repositories in the cloud",
    "In the file that TRITON_CLOUD_CREDENTIAL_PATH names, the entry with the longest beginning of the address has its "
    "credentials, as in Triton.",
)
def test_the_entry_with_the_longest_beginning_of_the_address_is_used(
    credentials: Callable[[object], dict[str, str]],
) -> None:
    entries = {
        "": {"key_id": "any", "secret_key": "s"},
        "s3://bucket": {"key_id": "bucket", "secret_key": "s", "region": "", "session_token": "t"},
        "s3://bucket/deep": {"profile": "deep"},
        "s3://https://host:1/bucket": {"key_id": "own", "secret_key": "s", "region": "r"},
    }
    file = credentials({"s3": entries, "gs": {"gs://b": "/b.json"}, "as": {"as://a": {"account_key": "k"}}})

    assert options_of("s3://other", **file) == {"key": "any", "secret": "s"}
    assert options_of("s3://bucket/a", **file) == {"key": "bucket", "secret": "s", "token": "t"}
    assert options_of("s3://bucket/deep/er", **file) == {"profile": "deep"}
    own = options_of("s3://https://host:1/bucket/a", **file)
    assert (own["key"], own["client_kwargs"]) == ("own", {"region_name": "r"})
    assert options_of("gs://bucket", **file) == {"token": "/b.json"}
    azure = options_of("as://account/c", AZURE_STORAGE_KEY="not this", **file)
    assert azure["account_key"] == "k"
    # Triton's files have no entries for this store.
    assert options_of("hf://o/m", HF_TOKEN="hf_1", **file) == {"token": "hf_1"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "which is not JSON"),
        ("[" * 100_000, "which is not JSON"),
        ([], "in which 's3' has no entries by address"),
        ({"s3": "key"}, "in which 's3' has no entries by address"),
        ({"s3": {"s3://other": {}}}, 'which has no entry for s3://bucket, and none for ""'),
        ({"s3": {"": {"key_id": 5}}}, "'key_id' must be a text"),
    ],
)
def test_a_credential_file_that_does_not_fit_is_refused(
    credentials: Callable[[object], dict[str, str]], content: object, text: str
) -> None:
    with pytest.raises(RepositoryError) as raised:
        read_address("s3://bucket", credentials(content))
    assert text in str(raised.value)


def test_a_missing_credential_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="which cannot be read: No such file"):
        read_address("s3://bucket", {"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "none")})


@pytest.mark.promise("Repositories in the cloud", "Credentials are in no text that an address is shown as.")
def test_credentials_are_not_shown() -> None:
    address = read_address("as://account/c", {"AZURE_STORAGE_KEY": "SECRET"})
    assert "SECRET" not in repr(address) + str(address)
