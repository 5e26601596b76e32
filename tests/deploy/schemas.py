"""Schemas of Kubernetes' own objects, of KServe's and of KEDA's, as one JSON schema.

They come from packages, which `bash .ci/run schemas` downloads into a folder. These are read and not installed: they
have thousands of files, or need a hundred megabytes of others.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

FOLDER = Path(__file__).parents[2] / ".venv-schemas"
Schema = dict[str, Any]
_PLAIN = {
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "object": {},
}
# KServe's names of quantities, which Kubernetes' schemas have by another one.
_QUANTITIES = ("ResourceQuantity", "V1beta1MetricQuantity")
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_REQUIRED = re.compile(r"Invalid value for `(\w+)`, must not be `None`")
_PRINT_KEDA = """
import json
from cloudcoil.models.keda.v1alpha1 import ScaledObject
print(json.dumps(ScaledObject.model_json_schema()))
"""


def wheel(name: str) -> Path:
    """Return the package that was downloaded. Raises FileNotFoundError."""
    found = sorted(FOLDER.glob(f"{name}-[0-9]*.whl"))
    if not found:
        raise FileNotFoundError(f"there is no {name} in {FOLDER.name}: bash .ci/run schemas")
    return found[-1]


def all_schemas() -> Schema:
    """Return the definitions of all objects, by the names that `name_of` gives. Raises FileNotFoundError."""
    return {"$defs": {**(core := _kubernetes()), **_kserve(core), **_keda()}}


def name_of(manifest: Mapping[str, Any]) -> str:
    """Return the name of a manifest's definition."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind: str = manifest["kind"]
    if group == "serving.kserve.io":
        return f"{version.capitalize()}{kind}"
    if group == "keda.sh":
        return kind
    return f"io.k8s.api.{group or 'core'}.{version}.{kind}"


def _kubernetes() -> Schema:
    """Return the definitions of the newest version, which allow no fields beside those that are named."""
    with ZipFile(wheel("kubernetes_validate")) as archive:
        found = [name for name in archive.namelist() if name.endswith("-strict/_definitions.json")]
        newest = max(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
        definitions: Schema = json.loads(archive.read(newest))["$defs"]
    return definitions


def _kserve(core: Schema) -> Schema:
    """Return the definitions of KServe's generated models, from the tables of their fields."""
    names = dict(_kubernetes_names(core))
    with ZipFile(wheel("kserve")) as archive:
        files = [name for name in archive.namelist() if re.fullmatch(r"kserve/models/v\d.*", name)]
        models = dict(_model(archive.read(name).decode()) for name in files)
    names |= {name: name for name in models}
    return {
        name: {
            "type": "object",
            "additionalProperties": False,
            "required": [keys[field] for field in required],
            "properties": {keys[field]: _typed(kind, names) for field, kind in types.items()},
        }
        for name, (types, keys, required) in models.items()
    }


def _kubernetes_names(core: Schema) -> Iterator[tuple[str, str]]:
    """Give KServe's names of Kubernetes' definitions, with their own names."""
    for name in core:
        *_, group, version, kind = name.split(".")
        if group in ("core", "meta"):
            yield f"{version.capitalize()}{kind}", name
        yield f"K8sIoApi{group.capitalize()}{version.capitalize()}{kind}", name
    yield from ((name, _QUANTITY) for name in _QUANTITIES)


Model = tuple[str, tuple[dict[str, str], dict[str, str], list[str]]]


def _model(source: str) -> Model:
    """Return the name of the class in a file, the types of its fields, their keys, and those that are required."""
    (made,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in made.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    required = sorted(set(_REQUIRED.findall(source)))
    return made.name, (tables["openapi_types"], tables["attribute_map"], required)


def _typed(kind: str, names: Mapping[str, str]) -> Schema:
    if found := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _typed(found[1], names)}
    if found := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {"type": "object", "additionalProperties": _typed(found[1], names)}
    # A name that is not known fails where a manifest has such a field.
    return _PLAIN.get(kind) or {"$ref": f"#/$defs/{names.get(kind, kind)}"}


def _keda() -> Schema:
    """Return the definitions that a scaled object needs, from models of pydantic."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cloudcoil", "cloudcoil_models_keda"):
            with ZipFile(wheel(name)) as archive:
                archive.extractall(folder)
        ended = subprocess.run(
            [sys.executable, "-c", _PRINT_KEDA],
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            check=True,
        )
    whole = _closed(json.loads(ended.stdout))
    return {**whole.pop("$defs"), "ScaledObject": whole}


def _closed(schema: Any) -> Any:
    """Allow no fields beside those that are named. The models ignore others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if "properties" in found and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found
