"""Says what a repository of the Hub is as a model: its task, the files that it needs, the configuration made for it.

Everything here was written by strangers, and is data: a list of names and some small JSON files. No file of the
repository is a configuration of moonpool's. Files are copied by an allow-list of names, so code and pickles are not
there unless the operator granted them for this commit. `remarks` names what the repository asks for beyond that.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from moonpool.runtime.model.config.options import PICKLED_WEIGHTS, REMOTE_CODE, TASK
from moonpool.runtime.process.files import RepositoryError, bounded_json
from moonpool.runtime.repository.cloud_store import CloudFile, CloudListing
from moonpool.runtime.repository.hub_store import HubStore

_BACKEND = "transformers"
# The most bytes of a file that is read here, and of one in JSON that the model's process reads.
_MOST_READ_BYTES, _MOST_JSON_BYTES = 8 << 20, 256 << 20
# Indices of the largest models name 200,000 tensors.
_MOST_VALUES = 500_000
_CONFIG, _MODULES, _INDEX = "config.json", "modules.json", "model.safetensors.index.json"
_WEIGHTS, _PICKLE, _PICKLE_INDEX = "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"
_READ = (_CONFIG, _MODULES, _INDEX, _PICKLE_INDEX, "tokenizer_config.json", "preprocessor_config.json")
# A repository with one of these at its root is a model.
ROOTS = frozenset({_CONFIG, _MODULES, "preprocessor_config.json"})
# Names without characters that terminals obey.
_COPIED = re.compile(
    r"[\w.+-]+\.json|tokenizer\.model|sentencepiece\.bpe\.model|spiece\.model|[\w.+-]+\.spm|vocab\.(txt|bpe)"
    r"|merges\.txt|chat_template\.jinja|additional_chat_templates/[\w.+-]+\.jinja"
    r"|[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)"
)
_SHARD, _CODE = re.compile(r"[\w.+-]+\.(bin|safetensors)"), re.compile(r"[\w./+-]+\.py")
# An adapter names another model to load. Indices of weights are taken with them.
_NOT_COPIED = re.compile(r"adapter_config\.json|.*\.index\.json|.*\.index\..*\.json")
_UNPICKLED = re.compile(r".*\.(bin|pt|pth|pkl|pickle|ckpt|joblib|msgpack|h5|dill)", re.IGNORECASE)
# The parts of sentence-transformers that the backend has.
MODULES = {f"sentence_transformers.{folder}.{name}" for folder, name in (
    ("models", "Transformer"), ("models", "Pooling"), ("models", "Normalize"), ("models", "Dense"),
)}  # fmt: skip
_KERNELS = ("_attn_implementation_internal", "_attn_implementation", "attn_implementation", "experts_implementation")
_TENSOR = '{ name: "%s" data_type: TYPE_%s dims: [ %d ]%s }'


class HubTask(NamedTuple):
    """One task: the file of the backend, and the tensors, each with its datatype and its only dimension."""

    file: str
    inputs: tuple[tuple[str, str, int], ...]
    outputs: tuple[tuple[str, str, int], ...]
    max_batch_size: int = 32
    is_decoupled: bool = False


_TEXT = ("TEXT", "STRING", 1)
_LABELLED = (("LABEL", "STRING", -1), ("SCORE", "FP32", -1))
_ASKED = ("request", "STRING", 1)
TASKS = {
    "text-classification": HubTask("text_classification.py", (_TEXT,), _LABELLED),
    "zero-shot-classification": HubTask("zero_shot.py", (_TEXT, ("LABELS", "STRING", -1)), _LABELLED, 8),
    "token-classification": HubTask("token_classification.py", (_TEXT,), (("ENTITIES", "STRING", 1),)),
    "rerank": HubTask("rerank.py", (_ASKED,), (("ranking", "STRING", 1),), 0, True),
    "embeddings": HubTask("embeddings.py", (("texts", "STRING", 1),), (("embedding", "FP32", -1),), 64),
    "text-generation": HubTask(
        "text_generation.py", (_ASKED,), (("chat", "STRING", 1), ("completion", "STRING", 1)), 0, True
    ),
    "image-classification": HubTask("image_classification.py", (("IMAGE", "STRING", 1),), _LABELLED, 8),
    "automatic-speech-recognition": HubTask(
        "speech_recognition.py", (_ASKED, ("file", "STRING", 1)), (("transcription", "STRING", 1),), 0, True
    ),
}
# Hands over the tensors of pickled weights, for `moonpool convert`.
_CONVERSION = HubTask("conversion.py", (("FILE", "STRING", 1), ("PLACE", "INT64", 3)), (("PIECE", "UINT8", -1),), 0)
# Names of the Hub for the same.
_SAME = {"feature-extraction": "embeddings", "sentence-similarity": "embeddings", "text-ranking": "rerank"}
# Ends of the names of classes in `architectures`.
_ENDS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "ForCTC": "automatic-speech-recognition",
    "Model": "embeddings",
}


class HubGrants(NamedTuple):
    """Holds what the operator said of a model: its task, and commits whose code or pickles it may have."""

    task: str = ""
    remote_code: tuple[str, ...] = ()
    pickled_weights: tuple[str, ...] = ()


class HubModel(NamedTuple):
    """A model at one commit. `remarks` names what the repository asks for, and whether it gets it."""

    url: str
    commit: str
    task: str
    files: tuple[CloudFile, ...]
    config: str
    remarks: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of the files that are copied."""
        return sum(file.size_bytes for file in self.files)

    @property
    def address(self) -> str:
        """Return the address that stays this model."""
        return f"{self.url}@{self.commit}"

    @property
    def pickles(self) -> list[str]:
        """Return the paths of the pickled weights among its files."""
        return [file.path for file in self.files if file.path.endswith(".bin")]

    def as_conversion(self) -> HubModel:
        """Return the model that hands over the tensors of its pickled weights."""
        granted = {"pickled_weights": "yes"}
        return self._replace(config=_config(self.address, self.commit, "conversion", _CONVERSION, granted))

    def converted_config(self) -> str:
        """Return the configuration for its weights as safetensors."""
        return _config(self.address, self.commit, self.task, TASKS[self.task], {})


def is_model(listing: CloudListing) -> bool:
    """Return True if a repository is one model, and not a folder of models."""
    paths = {file.path for file in listing.files}
    return bool(paths & ROOTS) and not any(path.endswith("/config.pbtxt") for path in paths)


def described(store: HubStore, grants: HubGrants, stop: threading.Event) -> HubModel:
    """Return what a repository is as a model. Raises `RepositoryError`."""
    commit, listing = store.find(stop)
    return _Description(store, commit, listing, grants, stop).model()


class _Description:
    def __init__(
        self, store: HubStore, commit: str, listing: CloudListing, grants: HubGrants, stop: threading.Event
    ) -> None:
        self._url, self._commit, self._grants = store.url, commit, grants
        self._files = {file.path: file for file in listing.files}
        self._remarks: list[str] = []
        self._json = {
            path: self._parsed(path, store.read_text(self._files[path], _MOST_READ_BYTES, stop))
            for path in _READ
            if path in self._files
        }
        self._has_code = commit in grants.remote_code
        self._has_pickles = commit in grants.pickled_weights

    def model(self) -> HubModel:
        """Return the model. Raises `RepositoryError`."""
        task = self._task()
        paths = [*self._plain(), *self._weights()]
        if self._has_code:
            paths += [path for path in self._files if _CODE.fullmatch(path)]
        self._remark_on_code()
        files = tuple(self._files[path] for path in sorted(set(paths)))
        for file in files:
            if file.path.endswith(".json") and file.size_bytes > _MOST_JSON_BYTES:
                raise self._refusal(f"{file.path} has {file.size_bytes:,} bytes, and {_MOST_JSON_BYTES:,} is the most")
        granted = {"remote_code": "yes"} if self._has_code else {}
        granted |= {"pickled_weights": "yes"} if self._has_pickles else {}
        config = _config(f"{self._url}@{self._commit}", self._commit, task, TASKS[task], granted)
        return HubModel(self._url, self._commit, task, files, config, tuple(self._remarks))

    def _refusal(self, what: str) -> RepositoryError:
        return RepositoryError(f"{self._url}@{self._commit}: {what}")

    def _parsed(self, path: str, text: bytes) -> Any:
        try:
            found = bounded_json(text, _MOST_VALUES)
        except ValueError as error:
            raise self._refusal(f"{path} is not JSON: {error}") from None
        if not isinstance(found, list if path == _MODULES else dict):
            raise self._refusal(f"{path} holds no {'list' if path == _MODULES else 'object'}")
        return found

    # Task

    def _task(self) -> str:
        wanted = _SAME.get(self._grants.task, self._grants.task)
        if wanted and wanted not in TASKS:
            raise self._refusal(f"{TASK} must be one of {', '.join(TASKS)}, not {wanted!r:.60}")
        if _MODULES in self._json and wanted in ("", "embeddings"):
            self._check_modules()
        if wanted:
            return wanted
        if _MODULES in self._json:
            return "embeddings"
        names = self._json.get(_CONFIG, {}).get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        task = next((task for end, task in _ENDS.items() if name.endswith(end)), "")
        if not task:
            what = f"config.json names the class {name!r:.80}" if name else "config.json names no class"
            raise self._refusal(f"{what}, which fits no task; {TASK} may be one of {', '.join(TASKS)}")
        return self._kind_of_classification() if task == "text-classification" else task

    def _kind_of_classification(self) -> str:
        labels = self._json[_CONFIG].get("id2label")
        names = [str(each).lower() for each in labels.values()] if isinstance(labels, dict) else ["", ""]
        if len(names) == 1:
            return "rerank"
        return "zero-shot-classification" if any(name.startswith("entail") for name in names) else "text-classification"

    def _check_modules(self) -> None:
        for each in self._json[_MODULES]:
            kind, path = (each.get("type"), each.get("path", "")) if isinstance(each, dict) else (None, "")
            if not isinstance(kind, str) or kind not in MODULES:
                raise self._refusal(
                    f"modules.json names the class {str(kind)!r:.100}, which another library would import; the parts "
                    f"of sentence-transformers that moonpool has are {', '.join(sorted(MODULES))}"
                )
            if not isinstance(path, str) or not re.fullmatch(r"|[0-9]+_[A-Za-z]+", path):
                raise self._refusal(
                    f"modules.json names the folder {str(path)!r:.100}, which is not a folder of this repository"
                )

    # Files

    def _plain(self) -> Iterator[str]:
        for path in self._files:
            if _COPIED.fullmatch(path) and not _NOT_COPIED.fullmatch(path):
                # Weights in the root are chosen by themselves.
                yield path

    def _weights(self) -> list[str]:
        """Return the files with weights: one form of them, though the repository may have several."""
        for index, whole in ((_INDEX, _WEIGHTS), *([(_PICKLE_INDEX, _PICKLE)] if self._has_pickles else [])):
            if index in self._json:
                return [index, *self._shards(index)]
            if whole in self._files:
                return [whole]
        pickles = [path for path in self._files if _UNPICKLED.fullmatch(path)]
        if pickles:
            raise self._refusal(
                f"it has no weights in safetensors, only pickles, which are programs: {_listed(pickles)}. "
                f"{PICKLED_WEIGHTS}={self._commit} lets its process at its sandbox level read {_PICKLE}; "
                f"`moonpool convert {self._url}@{self._commit} FOLDER --pickled-weights={self._commit}` makes "
                "safetensors of it, once"
            )
        raise self._refusal(f"it has neither {_WEIGHTS} nor {_INDEX}")

    def _shards(self, index: str) -> list[str]:
        found = self._json[index].get("weight_map")
        names = set(map(str, found.values())) if isinstance(found, dict) else set()
        suffix = ".bin" if index == _PICKLE_INDEX else ".safetensors"
        for name in sorted(names):
            if not _SHARD.fullmatch(name) or not name.endswith(suffix) or name not in self._files:
                raise self._refusal(f"{index} names {name!r:.100}, which is not a file with weights in this folder")
        if not names:
            raise self._refusal(f"{index} names no files")
        return sorted(names)

    # What it asks for

    def _remark_on_code(self) -> None:
        asked = {
            f"{path}: auto_map names {name!r:.100}"
            for path, found in self._json.items()
            if isinstance(found, dict) and isinstance(found.get("auto_map"), dict)
            for name in _texts_in(found["auto_map"].values())
        }
        config = self._json.get(_CONFIG, {})
        for key in _KERNELS:
            value = config.get(key)
            if isinstance(value, str) and re.search(r"[/.:@]", value):
                asked.add(f"config.json: {key} names {value!r:.100}, whose code some versions of transformers fetch")
        if isinstance(config.get("model_file"), str):
            asked.add(f"config.json: model_file names {config['model_file']!r:.100}, which other libraries import")
        self._remarks += [f"{what}; {self._verdict()}" for what in sorted(asked)]
        code = [path for path in self._files if path.endswith(".py")]
        if code:
            self._remarks.append(f"it has code, {_listed(code)}; {self._verdict()}")
        if "adapter_config.json" in self._files:
            self._remarks.append("adapter_config.json would load another model; it is not copied")
        pickles = [path for path in self._files if _UNPICKLED.fullmatch(path)]
        if pickles:
            what = "granted" if self._has_pickles else "not copied"
            self._remarks.append(f"it has pickles, which are programs: {_listed(pickles)}; {what}")

    def _verdict(self) -> str:
        if self._has_code:
            return "granted, and run in the model's process"
        return f"it is not copied and does not run ({REMOTE_CODE}={self._commit} would let it)"


def _config(address: str, commit: str, name: str, task: HubTask, granted: Mapping[str, str]) -> str:
    """Return the text of a configuration."""
    is_optional = " optional: true" if len(task.inputs) > 1 and task.is_decoupled else ""
    parameters = {"task": name, "commit": commit, "MOONPOOL_EXECUTE_TIMEOUT_S": "600", **granted}
    lines = [
        f"# Made by moonpool of {address}",
        f'backend: "{_BACKEND}"',
        f'runtime: "{task.file}"',
        f"max_batch_size: {task.max_batch_size}",
        *(f"input {_TENSOR % (*each, is_optional)}" for each in task.inputs),
        *(f"output {_TENSOR % (*each, '')}" for each in task.outputs),
        *(["dynamic_batching {}"] if task.max_batch_size else []),
        *(["model_transaction_policy { decoupled: true }"] if task.is_decoupled else []),
        *(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()),
    ]
    return "\n".join(lines) + "\n"


def _texts_in(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each


def _listed(paths: list[str], most: int = 3) -> str:
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(f"{path!r:.100}" for path in sorted(paths)[:most]) + more


class HubFiles:
    """The folder of a model as `CloudCopies` copies it: the made configuration, and the files as version 1."""

    def __init__(self, store: HubStore, model: HubModel) -> None:
        self.url = model.url
        self._store, self._model = store, model
        config = model.config.encode()
        own = CloudFile("config.pbtxt", len(config), hashlib.sha256(config).hexdigest(), "")
        self._config, self._own = config, own
        files = [own, *(file._replace(path=f"1/{file.path}") for file in model.files)]
        folders = {"1", *(f"1/{file.path.rpartition('/')[0]}" for file in model.files if "/" in file.path)}
        self._listing = CloudListing(tuple(sorted(files)), tuple(sorted(folders)))

    def listing(self, name: str, stop: threading.Event) -> CloudListing:  # noqa: ARG002 - as of any store
        """Return the files. A commit does not change."""
        return self._listing

    def read(
        self, name: str, file: CloudFile, write: Callable[[bytes], object], stop: threading.Event, start: int = 0
    ) -> bool:
        """Read a file from the byte `start` on. Raises `RepositoryError`."""
        if file == self._own:
            write(self._config[start:])
            return True
        listed = file._replace(path=file.path.removeprefix("1/"))
        return self._store.read(name, listed, write, stop, start)

    def sha256(self, file: CloudFile) -> str | None:
        """Return the hash of a file's content, if it is known."""
        return self._store.sha256(file)

    def close(self) -> None:
        self._store.close()


def read_grants(said: Mapping[str, str]) -> HubGrants:
    """Return what the operator's options for a model say of its repository."""
    return HubGrants(
        said.get(TASK, "").strip(), _commits(said.get(REMOTE_CODE, "")), _commits(said.get(PICKLED_WEIGHTS, ""))
    )


def _commits(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def as_text(model: HubModel) -> str:
    """Return a line that says what is loaded."""
    count = len(model.files)
    return f"{model.address}: {model.task}, {count} files, {model.size_bytes:,} bytes"
