"""Configurations: those in files, and what a model makes of one."""

from __future__ import annotations

from moonpool.runtime.config import ConfigError, ModelConfig
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.pbtxt import parse
from moonpool.runtime.python_backend import _object
from moonpool.runtime.start import completed as completed_config

_CONFIG = ModelConfig.from_dict({"name": "m", "backend": "python"}, partial=True)


def pbtxt(data: bytes) -> None:
    """The text of a `config.pbtxt`, all the way to the options of the model."""
    try:
        raw, source = parse(data.decode("utf-8", "replace"), "config.pbtxt")
        ModelOptions.from_parameters(ModelConfig.from_dict(raw, source=source))
    except ConfigError as error:
        str(error)


def completed(data: bytes) -> None:
    """The configuration that a stub says that its model completed."""
    try:
        config = completed_config(_CONFIG, _object(data.decode("utf-8", "replace"), "m"))
        ModelOptions.from_parameters(config)
    except (ConfigError, LoadFailed) as error:
        str(error)
