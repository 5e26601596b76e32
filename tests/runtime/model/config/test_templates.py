"""Configurations that are templates: the places that nobody has filled in, and values for them."""

from __future__ import annotations

import pytest

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ConfigError, remarks
from moonpool.runtime.model.config.templates import read_fill

pytestmark = pytest.mark.promise(
    "Models",
    "A configuration that is a template is refused with all places that are not filled in, and "
    "`moonpool check --fill` fills them in.",
)

# The text of a field, the place as an error shows it, and the name and value that fill it in.
PLACES = [
    ("max_batch_size: MAX_BATCH", "MAX_BATCH", "MAX_BATCH", "8"),
    ("max_batch_size: ${n}", "${n}", "n", "8"),
    ("max_batch_size: $N", "$N", "N", "8"),
    ("max_batch_size: {{ n }}", "{{ n }}", "n", "8"),
    ("max_batch_size: <MAX>", "<MAX>", "MAX", "8"),
    ("max_batch_size: @max@", "@max@", "max", "8"),
    ("max_batch_size: %max%", "%max%", "max", "8"),
    ("max_batch_size: __MAX__", "__MAX__", "__MAX__", "8"),
    ("input { data_type: TYPE_#DTYPE\n}", "TYPE_#DTYPE", "DTYPE", "FP32"),
    ("input { data_type: TYPE_${dtype} }", "TYPE_${dtype}", "dtype", "FP32"),
    ("input { dims: [ -1, DIM ] }", "DIM", "DIM", "3"),
    ("model_transaction_policy { decoupled: ${d} }", "${d}", "d", "true"),
    ("sequence_batching { direct { minimum_slot_utilization: SHARE } }", "SHARE", "SHARE", "0.5"),
    ("${groups}", "${groups}", "groups", "instance_group {}"),
    ("instance_group [ ${groups} ]", "${groups}", "groups", "{ count: 2 }"),
    ('backend: "${backend}"', "${backend}", "backend", "python"),
    ("name: ${name}", "${name}", "name", '"m"'),
]


@pytest.mark.parametrize(("text", "shown", "name", "value"), PLACES)
def test_a_place_is_named_whole_and_can_be_filled_in(text: str, shown: str, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pbtxt.parse(f"\n{text}", "config.pbtxt")

    said = f"config.pbtxt:2: is a template that is not filled in: {shown} (line 2); put values there"
    assert str(caught.value).startswith(said)
    fill = read_fill([f"{name}={value}"])
    pbtxt.parse(f"\n{text}", "config.pbtxt", fill=fill)
    assert fill.unused == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_batch_size: eight", "must be an integer from"),
        ("model_transaction_policy { decoupled: YES }", "must be true or false, not YES"),
        ("instance_group { kind: GPU }", "must be one of KIND_AUTO"),
        ("# ${in_a_comment}\ninput { data_type: TYPE_FP23 }", "must be one of"),
        ('parameters { key: "${a}" value: { string_value: "${b}" } }\nfoo: 1', "no field"),
        ("max_batch_size: 8#NOTE\nfoo: 1", "no field"),
    ],
)
def test_a_wrong_value_is_no_template(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        pbtxt.parse(text, "config.pbtxt")


def test_all_places_are_in_one_list() -> None:
    text = "max_batch_size: ${n}\ninput { dims: [ DIM, ${n} ] }\noutput { data_type: TYPE_#DTYPE\n}\nfoo: 1"
    with pytest.raises(ConfigError, match=r": \$\{n\} \(lines 1, 2\), DIM \(line 2\), TYPE_#DTYPE \(line 3\);"):
        pbtxt.parse(text, "config.pbtxt")


def test_a_place_in_a_parameter_is_for_the_model_and_a_remark() -> None:
    text = 'parameters { key: "LIMIT" value: { string_value: "${limit}" } }'
    raw, _ = pbtxt.parse(text, "config.pbtxt")
    assert [(each.field, each.what.rpartition(": ")[2]) for each in remarks(raw)] == [("parameters", "LIMIT")]
    fill = read_fill(["limit=3", "other=4"])
    raw, _ = pbtxt.parse(text, "config.pbtxt", fill=fill)
    assert raw["parameters"]["LIMIT"] == {"string_value": "3"}
    assert (remarks(raw), fill.unused) == ([], ["other"])
