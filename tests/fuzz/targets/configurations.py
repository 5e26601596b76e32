"""Configurations: those in files, and what a model makes of one."""

from __future__ import annotations

from pathlib import Path

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.hosting.python_backend import _object
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ConfigError, ModelConfig
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.config.pbtxt import parse
from moonpool.runtime.model.config.source import all_mistakes
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.stubs.start_message import completed as completed_config

_MODEL = Model(
    ModelConfig.from_dict({"name": "m", "backend": "python"}, partial=True),
    ModelOptions(),
    1,
    ModelSource("triton", Path("model.py"), None, Path(), Path()),
)


def pbtxt(data: bytes) -> None:
    """Read the text of a `config.pbtxt`, up to the options of the model.

    The first of all mistakes is the one that a load shows.
    """
    text, first = data.decode("utf-8", "replace"), ""
    try:
        _read(text)
    except ConfigError as error:
        first = str(error)
    with all_mistakes() as mistakes:
        _read(text)
    if first != next(map(str, mistakes), ""):
        raise ValueError(f"a load shows {first!r}, and of all mistakes the first is another one")


def _read(text: str) -> None:
    raw, source = parse(text, "config.pbtxt")
    ModelOptions.from_parameters(ModelConfig.from_dict(raw, source=source))


def completed(data: bytes) -> None:
    """Complete a configuration by what a stub sends."""
    try:
        config = completed_config(_MODEL, _object(data.decode("utf-8", "replace"), "m"))
        ModelOptions.from_parameters(config)
    except (ConfigError, LoadFailed) as error:
        str(error)
