"""Loads a model of transformers out of a folder that strangers filled, with every argument said.

Nothing is fetched, no code of the folder runs and no pickle is read, unless the operator granted that: then the
configuration, which moonpool made, has the parameter. The sandbox contains what goes wrong in spite of this.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

# Before any of these libraries is imported.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_IMPLICIT_TOKEN="1", TOKENIZERS_PARALLELISM="false"
)
# The place of the libraries' caches, and of code that was granted. The usual one may be closed, or another model's. A
# known name in a folder for all, such as /tmp below `strict`, would let any user of the machine put code there.
_CACHES = tempfile.TemporaryDirectory(prefix="moonpool-hub-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _CACHES.name
# They take precedence over the one above.
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"):
    os.environ.pop(_name, None)

try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"models of the Hub need transformers and torch, and there is no {error.name}: install moonpool's extra 'hub'",
        name=error.name,
    ) from None

transformers.utils.logging.disable_progress_bar()
# Tokenizers without a length say 10^30.
LONGEST = 1 << 20
USUAL_LENGTH = 512


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """Remove the caches if a load fails, as the process then ends without its exit functions."""
    try:
        yield
    except BaseException:
        _CACHES.cleanup()
        raise


class Folder:
    """The folder of a model, and what the made configuration grants it."""

    def __init__(self, config: dict) -> None:
        instance, parameters = config["instance"], config["parameters"]
        self.path = os.path.join(instance["model_repository"], instance["model_version"])
        self.is_pickled = "pickled_weights" in parameters
        self.arguments = {"local_files_only": True, "trust_remote_code": "remote_code" in parameters}
        is_on_gpu = instance.get("model_instance_kind") == "GPU"
        self.device = f"cuda:{instance['model_instance_device_id']}" if is_on_gpu else "cpu"
        self.commit = parameters["commit"]["string_value"]

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self.path, name))

    def model(self, kind: type, **more: object) -> torch.nn.Module:
        """Load the weights, all of which must be in the files. Raises ValueError."""
        arguments = {
            **self.arguments,
            **more,
            "dtype": "auto",
            "output_loading_info": True,
            "use_safetensors": not self.is_pickled,
            "weights_only": True,
        }
        with cleaned():
            try:
                found, told = loaded(kind, self.path, arguments)
            except Exception as error:
                if self.is_pickled and (what := self._asked(error)):
                    raise ValueError(what) from error
                raise
        wrong = sorted(told["missing_keys"]) + sorted(str(each[0]) for each in told["mismatched_keys"])
        if wrong:
            raise ValueError(
                f"the files have no fitting weights for {len(wrong)} tensors of {type(found).__name__}, such as "
                f"{wrong[0]:.200}: the repository says another class or size than its weights are of"
            )
        return found.eval().to(self.device)

    def _asked(self, error: Exception) -> str:
        names = sorted(name for name in os.listdir(self.path) if name.endswith(".bin"))
        return next((what for name in names if (what := asked(self.path, name, error))), "")

    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """Load the tokenizer. Raises what the library raises."""
        with cleaned():
            found = transformers.AutoTokenizer.from_pretrained(self.path, **self.arguments)
        if found.pad_token is None:
            found.pad_token = found.eos_token or found.unk_token
        return found

    def batch(self, tokens: transformers.BatchEncoding) -> dict:
        return {key: value.to(self.device) for key, value in tokens.items() if isinstance(value, torch.Tensor)}


def loaded(kind: type, path: str, arguments: dict) -> tuple[torch.nn.Module, dict]:
    """Load a model with the attention of torch, or, if it has none of that, its own."""
    try:
        return kind.from_pretrained(path, attn_implementation="sdpa", **arguments)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return kind.from_pretrained(path, attn_implementation="eager", **arguments)


def asked(folder: str, file: str, error: Exception) -> str:
    """Say what a pickle names that is no part of weights, which `error` may be about; "" for nothing."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(os.path.join(folder, file))
    except Exception:  # any bytes may be in there
        names = re.findall(r"GLOBAL (\S+) was not", str(error))
    if not names:
        return ""
    shown = ", ".join(map(repr, sorted(names)[:5]))
    return f"{file} was not unpickled: it would call {shown:.300}, which no weights need; nothing of it ran"


def longest(tokenizer: transformers.PreTrainedTokenizerBase, config: transformers.PretrainedConfig) -> int:
    """Return the most tokens that a model takes."""
    if 0 < tokenizer.model_max_length <= LONGEST:
        return int(tokenizer.model_max_length)
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    # Some models lose two places to the token that pads.
    return int(found) - 2 if isinstance(found, int) and 2 < found <= LONGEST else USUAL_LENGTH


def texts_in(array: object) -> list[str]:
    """Return the texts of a tensor of bytes, row after row."""
    return [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]


def best(scores: torch.Tensor, names: dict, most: int = 5) -> tuple[list[list[bytes]], list[list[float]]]:
    """Return the labels of each row and their scores, the best ones first."""
    found = scores.topk(min(most, scores.shape[-1]))
    labels = [[str(names.get(each, each)).encode("utf-8", "replace") for each in row] for row in found.indices.tolist()]
    return labels, found.values.tolist()
