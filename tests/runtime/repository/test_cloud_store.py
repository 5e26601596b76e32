"""Listings of a store that may say anything, and questions to one that may not answer."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.repository.buckets import NEVER, Bucket, bucket

from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.repository import cloud_store
from moonpool.runtime.repository.cloud_address import read_address
from moonpool.runtime.repository.cloud_store import CloudStore, checked_listing

__all__ = ["bucket"]


def listed(*names: str, size: object = 1, **facts: object) -> dict[str, dict[str, Any]]:
    tags = facts or {"ETag": "1"}
    return {name: {"name": name, "type": "file", "size": size, **tags} for name in names}


HOSTILE = [
    "b/m/../x",
    "b/m/../../etc/passwd",
    "b/m/./x",
    "b/m//x",
    "b/m/1//model.py",
    "b/m/..",
    "b/m/\0",
    "b/m/1/\ud800",
    "b/m/" + "x" * 256,
    "b/m/" + "/".join("d" * 65),
    "b/m/" + "/".join(["d" * 200] * 6),
    "b/other/x",
    "/etc/passwd",
]


@pytest.mark.promise(
    "Repositories in the cloud",
    "A name that leads out of the model's folder, or that no file can have, fails the load of its model.",
)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(RepositoryError, match="which no file can be named"):
        checked_listing("b/m", listed("b/m/1/model.py", name))


PARTS = st.sampled_from(["1", "model.py", "..", ".", "", "a", "a" * 300, "é", "\0", "b", "m"])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=5).map("/".join), max_size=6))
def test_no_path_of_a_listing_leads_out(names: list[str]) -> None:
    try:
        listing = checked_listing("b/m", listed(*(f"b/m/{name}" for name in names)))
    except RepositoryError:
        return
    paths = [*(file.path for file in listing.files), *listing.folders]
    for path in paths:
        parts = PurePosixPath(path).parts
        assert "/".join(parts) == path
        assert ".." not in parts
        assert not path.startswith("/")
    # Each thing has one place, and each folder is made before the things in it.
    assert len(set(paths)) == len(paths)
    made = {""}
    for folder in listing.folders:
        assert folder.rpartition("/")[0] in made
        made.add(folder)
    assert {file.path.rpartition("/")[0] for file in listing.files} <= made


def test_empty_folders_of_a_store_are_folders() -> None:
    found = listed("b/m/1/model.py", "b/m/config.pbtxt") | listed("b/m/2/", "b/m/", size=0)
    found["b/m/3"] = {"name": "b/m/3", "type": "directory", "size": 0}

    listing = checked_listing("b/m", found)

    assert listing.folders == ("1", "2", "3")
    assert [file.path for file in listing.files] == ["1/model.py", "config.pbtxt"]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (listed("b/m/1", "b/m/1/model.py"), "has a file and a folder of the same name, '1'"),
        (listed("b/m/x", size=None), "does not say the size and the time of 'x'"),
        (listed("b/m/x", size=-1), "does not say the size"),
        (listed("b/m/x", size="5"), "does not say the size"),
        (listed("b/m/x", other="1"), "does not say the size and the time"),
        (listed("b/m/x", size=1 << 41), "has more than 1024 GiB"),
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(found: dict[str, dict[str, Any]], text: str) -> None:
    with pytest.raises(RepositoryError) as raised:
        checked_listing("b/m", found)
    assert text in str(raised.value)


def test_more_files_than_a_model_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_store, "MOST_FILES", 10)
    checked_listing("b/m", listed(*(f"b/m/{number}" for number in range(10))))
    with pytest.raises(RepositoryError, match="has more than 10 files and folders"):
        checked_listing("b/m", listed(*(f"b/m/{number}" for number in range(11))))


@pytest.fixture
def store(bucket: Bucket) -> CloudStore:
    bucket.put("b/r", {"m/config.pbtxt": b"c", "m/1/model.py": b"0123456789", "top": b""})
    return CloudStore(read_address("s3://b/r", {}))


def test_models_are_the_folders(store: CloudStore) -> None:
    assert store.models(NEVER) == ["m"]


def test_a_file_is_read_in_pieces(store: CloudStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_store, "CHUNK_BYTES", 4)
    file = next(each for each in store.listing("m", NEVER).files if each.path == "1/model.py")
    pieces: list[bytes] = []

    assert store.read("m", file, pieces.append, NEVER)
    assert pieces == [b"0123", b"4567", b"89"]
    # It is shorter than it was, or gone: not the file that was listed.
    bucket.objects["b/r/m/1/model.py"] = b"0123"
    assert not store.read("m", file, pieces.append, NEVER)
    del bucket.objects["b/r/m/1/model.py"]
    assert not store.read("m", file, pieces.append, NEVER)


class Failing:
    """Raise these errors before the questions, one for each."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked = 0

    def __call__(self, *_: object, **__: object) -> list[dict[str, Any]]:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return []


@pytest.mark.promise(
    "Repositories in the cloud",
    "A store that fails is asked three times. Denied access and missing files are errors at once.",
)
@pytest.mark.parametrize(
    ("errors", "asked", "text"),
    [
        ([ConnectionResetError("reset"), TimeoutError()], 3, ""),
        ([OSError("down")] * 3, 3, "s3://b/r cannot be read: OSError: down"),
        ([TimeoutError()] * 3, 3, "s3://b/r cannot be read: no answer within 60 s"),
        ([PermissionError("denied")], 1, "denied; credentials come from AWS_*, TRITON_CLOUD_CRED"),
        ([FileNotFoundError("b/r")], 1, "there is nothing at s3://b/r"),
        ([ValueError("odd")], 1, "s3://b/r cannot be read: ValueError: odd"),
    ],
)
def test_a_store_that_fails_is_asked_again_where_that_may_help(
    store: CloudStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], asked: int, text: str
) -> None:
    failing = Failing(*errors)
    monkeypatch.setattr(bucket, "ls", failing)
    if text:
        with pytest.raises(RepositoryError) as raised:
            store.models(NEVER)
        assert text in str(raised.value)
    else:
        assert store.models(NEVER) == []
    assert failing.asked == asked


def test_a_load_that_is_given_up_asks_nothing_more(
    store: CloudStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, failing = threading.Event(), Failing(*[OSError("down")] * 3)

    def once(*_: object, **__: object) -> object:
        stop.set()
        return failing()

    monkeypatch.setattr(bucket, "ls", once)
    monkeypatch.setattr(cloud_store, "_PAUSES_S", (600.0, 600.0))
    with pytest.raises(RepositoryError, match="is not read any more: the load was given up"):
        store.models(stop)
    assert failing.asked == 1


@pytest.mark.promise(
    "Repositories in the cloud", "Without the package for an address, the error says how to install it."
)
@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://b", "s3fs"), ("gs://b", "gcsfs"), ("as://a/c", "adlfs"), ("hf://o/m", "huggingface_hub")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, url: str, package: str) -> None:
    # None in the place of a module makes its import fail, as if it were not installed.
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RepositoryError) as raised:
        CloudStore(read_address(url, {}))
    assert f"needs the package {package} (the extra 'cloud')" in str(raised.value)
    assert f"-m pip install '{package}>=" in str(raised.value)


SECRETS = ("wJalrXUtnFEMI/K7MDENG", "FwoGZXIvYXdzEJ", "hunter22", "deadbeefsig", "AccountKeyValue1")


class Repeats:
    """A store whose error repeats all that it was sent."""

    async_impl = False

    def invalidate_cache(self) -> None:
        """Do nothing."""

    def ls(self, *_: object, **__: object) -> None:
        key, token, password, signature, account = SECRETS
        raise ValueError(
            f"PUT https://me:{password}@host/b?X-Amz-Signature={signature}&x=1 with {key} or {quote_plus(key)}, "
            f"{token}; AccountKey={account};EndpointSuffix=x"
        )


@pytest.mark.promise(
    "Repositories in the cloud",
    "What a store's library says of an error is shown without credentials, and without users and queries of addresses.",
)
def test_an_error_that_repeats_credentials_is_shown_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SESSION_TOKEN": SECRETS[1]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    monkeypatch.setattr(cloud_store, "_file_system", lambda _: Repeats())
    store = CloudStore(read_address("s3://http://127.0.0.1:1/b", environment))

    with pytest.raises(RepositoryError, match="https://…@host/b") as raised:
        store.models(NEVER)
    shown = "".join(traceback.format_exception(raised.value)) + caplog.text
    assert not [each for each in SECRETS if each in shown or quote_plus(each) in shown]
