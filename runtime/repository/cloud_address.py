"""Addresses of repositories in the cloud, and the credentials for them. Nothing is contacted here.

An address is shown in logs and in answers to clients, so it must not hold a secret: queries, as in signed URLs, and
users with passwords are refused. Credentials come from Triton's variables, or from the file that one of these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote_plus

from moonpool.runtime.process.files import RepositoryError, parsed_json, read_file

CREDENTIAL_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"
_MOST_CREDENTIAL_BYTES = 1 << 20
# A server that does not answer is given up after these times.
CONNECT_S, READ_S = 10.0, 30.0


class _Service(NamedTuple):
    """One kind of store: the package that reads it, and the variables that name its credentials and its copies'
    folder.
    """

    package: str
    secrets: tuple[str, ...]
    folder: str = ""


_AZURE = _Service("adlfs", ("AZURE_*",), "TRITON_AZURE_MOUNT_DIRECTORY")
SERVICES = {
    "s3": _Service("s3fs", ("AWS_*",), "TRITON_AWS_MOUNT_DIRECTORY"),
    "gs": _Service("gcsfs", ("GOOGLE_*", "GCLOUD_*"), "TRITON_GCS_MOUNT_DIRECTORY"),
    "az": _AZURE,
    "as": _AZURE,
    "hf": _Service("huggingface_hub", ("HF_TOKEN*", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_*")),
}


@dataclass(frozen=True, slots=True)
class CloudAddress:
    """The place of a repository, as its file system takes it. `options` may have secrets, and are not shown."""

    url: str
    scheme: str
    path: str
    options: Mapping[str, Any] = field(repr=False)

    @property
    def service(self) -> _Service:
        """Return the kind of store."""
        return SERVICES[self.scheme]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return patterns of the variables with credentials, which no model may see."""
        return (*self.service.secrets, CREDENTIAL_FILE)


# What a library may repeat of a request: who asks, in an address, and what is signed. Azure's texts have their keys as
# `AccountKey=…`.
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"<>]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#'\"<>]*)[?#][^\s'\"<>]*")
_SIGNED = re.compile(
    r"\b(AccountKey|SharedAccessSignature|sig|X-Amz-(?:Signature|Credential|Security-Token)|Signature)=[^\s;&'\"<>]+",
    re.IGNORECASE,
)
# The names of variables and options whose values are secrets. The shortest that is looked for in texts.
_SECRET = re.compile(r"key|secret|token|password|connection_string", re.IGNORECASE)
_SHORTEST = 6


def without_secrets(text: str, address: CloudAddress, environment: Mapping[str, str]) -> str:
    """Return the text of a store's library without the credentials for an address, and without users and queries of
    addresses.
    """
    secrets = [value for name, value in address.options.items() if _SECRET.search(name)]
    for name, value in environment.items():
        if _SECRET.search(name) and any(fnmatchcase(name, each) for each in address.secrets):
            secrets.append(value)
    known = {each for each in secrets if isinstance(each, str) and len(each) >= _SHORTEST}
    for secret in sorted({*known, *map(quote_plus, known)}, key=len, reverse=True):
        text = text.replace(secret, "…")
    return _SIGNED.sub(r"\1=…", _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", text)))


def is_address(path: object) -> bool:
    """Return True for a text with a scheme, such as `s3://bucket`, which no path of a file begins with."""
    return isinstance(path, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def is_hub_root(path: str) -> bool:
    """Return True for the address of a whole model on the Hugging Face Hub: no folder in it, no data set, no space."""
    return re.fullmatch(r"hf://(?!datasets/|spaces/)[\w.-]+/[\w.-]+(@[\w.%-]+)?/?", path) is not None


def read_address(url: str, environment: Mapping[str, str]) -> CloudAddress:
    """Read the address of a repository, and find its credentials. Raises `RepositoryError`."""
    scheme, _, rest = url.partition("://")
    # Not the address itself: what is wrong with it may be that it holds a password.
    shown = f"the model repository at {scheme[:20]}://"
    if scheme not in SERVICES:
        _refuse(f"{shown}…: moonpool reads {', '.join(f'{each}://' for each in SERVICES)} and folders")
    if re.search(r"[?#\s\x00-\x1f\x7f\\]", url) or ("@" in rest and scheme != "hf"):
        _refuse(
            f"{shown}… must be a plain address, without a user, a query or spaces; credentials belong into variables"
        )
    rest = rest.rstrip("/")
    read = {"s3": _s3, "gs": _gs, "az": _az, "as": _as, "hf": _hf}[scheme]
    path, options = read(rest, _Credentials(scheme, f"{scheme}://{rest}", environment))
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        _refuse(f"{shown}{rest}: a folder in it is empty, '.' or '..'")
    return CloudAddress(f"{scheme}://{rest}", scheme, path, options)


def _refuse(what: str) -> NoReturn:
    raise RepositoryError(what)


class _Credentials:
    """The credentials for one address: the entry of the file, if a variable names one, or else the variables."""

    def __init__(self, scheme: str, url: str, environment: Mapping[str, str]) -> None:
        self.environment = environment
        file = environment.get(CREDENTIAL_FILE, "")
        self.entry = _entry(file, scheme, url) if file else None

    def of(self, field_name: str, variable: str = "") -> str | None:
        """Return a field of the entry, or without a file the variable; None for an empty one."""
        if self.entry is None:
            return self.environment.get(variable) or None
        entry = self.entry if isinstance(self.entry, dict) else {}
        text = entry.get(field_name)
        if text is not None and not isinstance(text, str):
            _refuse(f"{CREDENTIAL_FILE}: '{field_name}' must be a text")
        return text or None


def _entry(file: str, scheme: str, url: str) -> Any:
    """Return the entry of the credential file whose name is the longest beginning of the address. None for no need."""
    try:
        found = parsed_json(read_file(file, _MOST_CREDENTIAL_BYTES))
    except OSError as error:
        _refuse(f"{CREDENTIAL_FILE} names {file}, which cannot be read: {error.strerror}")
    except ValueError:
        _refuse(f"{CREDENTIAL_FILE} names {file}, which is not JSON")
    section = "as" if scheme == "az" else scheme
    entries = found.get(section, {}) if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        _refuse(f"{CREDENTIAL_FILE} names {file}, in which '{section}' has no entries by address")
    names = [name for name in entries if url.startswith(name)]
    if not names:
        if scheme == "hf":
            return None  # Triton knows no such store, so its files have no entries for it
        _refuse(f'{CREDENTIAL_FILE} names {file}, which has no entry for {url}, and none for ""')
    return entries[max(names, key=len)]


_ENDPOINT = re.compile(r"(https?://)?((?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?)/(.+)")


def _s3(rest: str, credentials: _Credentials) -> tuple[str, dict[str, Any]]:
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"max_attempts": 3, "mode": "standard"},
    }
    # Without a file, botocore finds its variables and files itself.
    of_file = {
        "key": credentials.of("key_id"),
        "secret": credentials.of("secret_key"),
        "token": credentials.of("session_token"),
        "profile": credentials.of("profile"),
    }
    options: dict[str, Any] = {key: text for key, text in of_file.items() if text}
    options["config_kwargs"] = config
    if region := credentials.of("region"):
        options["client_kwargs"] = {"region_name": region}
    match = _ENDPOINT.fullmatch(rest)
    if match is not None and (match[1] or ":" in match[2]):
        # As in Triton, a server of one's own is asked without TLS unless the address says so.
        options["endpoint_url"] = f"{match[1] or 'http://'}{match[2]}"
        config["s3"] = {"addressing_style": "path"}
        rest = match[3]
    elif "://" in rest or ":" in rest:
        _refuse(f"s3://{rest}: a server of one's own is s3://https://host:port/bucket/folder")
    return rest, options


def _gs(rest: str, credentials: _Credentials) -> tuple[str, dict[str, Any]]:
    if isinstance(credentials.entry, dict):
        _refuse(f"{CREDENTIAL_FILE}: an entry of 'gs' is the path of a file")
    token = credentials.entry or credentials.environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    return rest, {"token": token or None}


def _az(rest: str, credentials: _Credentials) -> tuple[str, dict[str, Any]]:
    account = credentials.of("account_str", "AZURE_STORAGE_ACCOUNT")
    if account is None:
        _refuse(f"az://{rest}: AZURE_STORAGE_ACCOUNT must name the account, or say as://account/{rest}")
    return rest, _azure(account, credentials)


def _as(rest: str, credentials: _Credentials) -> tuple[str, dict[str, Any]]:
    account, _, path = rest.partition("/")
    if not path:
        _refuse(f"as://{rest}: it needs an account and a container, as://account/container/folder")
    return path, _azure(account, credentials)


def _azure(account: str, credentials: _Credentials) -> dict[str, Any]:
    options: dict[str, Any] = {"account_name": account, "connection_timeout": CONNECT_S, "read_timeout": READ_S}
    key = credentials.of("account_key", "AZURE_STORAGE_KEY")
    kind = credentials.of("auth_type", "AZURE_STORAGE_AUTH_TYPE")
    if kind in (None, "key", "shared_key"):
        # As in Triton, an account without a key is read as anyone may read it. The library reads the variables for
        # signatures.
        signed = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING")
        is_anonymous = not (key or any(map(credentials.environment.get, signed)))
        return {**options, "account_key": key, "anon": is_anonymous}
    if kind == "default":
        return {**options, "anon": False}
    if kind != "managed_identity":
        _refuse(f"AZURE_STORAGE_AUTH_TYPE must be managed_identity or default, not {kind!r:.60}")
    client = credentials.of("client_id", "AZURE_STORAGE_CLIENT_ID")
    return {**options, "anon": False, "managed_identity": client or ""}


_HF = re.compile(r"((?:datasets/|spaces/)?[\w.-]+/[\w.-]+)(@[\w./%-]+?)?((?:/[^@]*)?)")


def _hf(rest: str, credentials: _Credentials) -> tuple[str, dict[str, Any]]:
    if _HF.fullmatch(rest) is None:
        _refuse(f"hf://{rest}: it needs an owner and a model, hf://owner/model@revision/folder")
    return rest, {"token": credentials.of("token", "HF_TOKEN")}
