"""Holds the model configuration while `auto_complete_config` completes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# The JSON form of a ModelConfig message.
Json = dict[str, Any]

_INPUT_KEYS = ("name", "data_type", "dims", "optional")
_OUTPUT_KEYS = ("name", "data_type", "dims")


class ModelConfig:
    """Is the argument and the result of `auto_complete_config`.

    Values from the configuration file stay, missing ones are added. A contradiction raises ValueError.
    """

    def __init__(self, model_config: str) -> None:
        self._model_config: Json = json.loads(model_config)
        self._model_config.setdefault("name", "")
        self._model_config.setdefault("max_batch_size", 0)
        self._model_config.setdefault("input", [])
        self._model_config.setdefault("output", [])

    def as_dict(self) -> Json:
        """Return the configuration itself. Changes to this dict are kept."""
        return self._model_config

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._model_config["max_batch_size"]
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in "
                f"auto-complete-config function for model '{self._name}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Choose dynamic batching. Raises ValueError if the configuration names another scheduler."""
        for chosen in ("sequence_batching", "ensemble_scheduling"):
            if chosen in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{chosen}', but "
                    f"auto-complete-config function for model '{self._name}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, object]) -> None:  # noqa: A002 - Triton's name
        """Add an input, or complete the one of that name."""
        self._add("input", input, _INPUT_KEYS, "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Mapping[str, object]) -> None:
        """Add an output, or complete the one of that name."""
        self._add("output", output, _OUTPUT_KEYS, "'name', 'data_type' and 'dims'")

    def _add(self, kind: str, given: Mapping[str, object], allowed: Iterable[str], listed: str) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if any(key not in allowed for key in given):
            raise ValueError(f"{kind} '{given['name']}' {where} contains property other than {listed}.")
        if "name" not in given:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in given:
                raise ValueError(f"{kind} '{given['name']}' {where} is missing '{key}' property.")
        for present in self._model_config[kind]:
            if present["name"] == given["name"]:
                self._complete(kind, present, given)
                return
        self._model_config[kind].append(given)

    def _complete(self, kind: str, present: Json, given: Mapping[str, object]) -> None:
        tensor = f"model '{self._name}', tensor '{given['name']}'"
        data_type = present.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{data_type} for {kind} '{given['name']}', model provides {given['data_type']}"
            )
        # The configuration may leave out the dims, which are empty then.
        if present.get("dims") and present["dims"] != given["dims"]:
            raise ValueError(
                f"{tensor}: the model expects dims {given['dims']} but the model configuration "
                f"specifies dims {present['dims']}"
            )
        if present.get("optional", given.get("optional")) != given.get("optional", present.get("optional")):
            raise ValueError(
                f"{tensor}: the model expects optional {given['optional']} but the model "
                f"configuration specifies optional {present['optional']}"
            )
        present.update(given)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, object]) -> None:
        """Set whether the model is decoupled."""
        if transaction_policy_dict.keys() - {"decoupled"}:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled
