"""Made-up JSON of the simulated engine meets its schema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.simulated.schema import example

SEED = bytes(range(16))

simple: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": n + 3}, st.integers(0, 90)),
    st.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n + 2}, st.integers(-50, 50)),
    st.builds(lambda n: {"type": "number", "exclusiveMinimum": n}, st.integers(-50, 50)),
    st.builds(lambda n: {"type": "integer", "exclusiveMaximum": n}, st.integers(-50, 50)),
    st.builds(lambda words: {"enum": words}, st.lists(st.text(), min_size=1)),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": {"a": 1}}, {"type": ["null", "string"]}]
    ),
)
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda item, n: {"type": "array", "items": item, "minItems": n}, inner, st.integers(0, 3)),
        st.builds(
            lambda fields, extra: {
                "type": "object",
                "properties": fields | {"not needed": extra},
                "required": list(fields),
            },
            st.dictionaries(st.text(max_size=5), inner, max_size=3),
            inner,
        ),
        st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner),
    ),
    max_leaves=8,
)


def meets(value: object, schema: dict[str, Any]) -> bool:
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(meets(value, each) for each in schema["anyOf"])
    match schema["type"]:
        case "string" | ["null", "string"]:
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get(
                "maxLength", 999
            )
        case "integer" | "number":
            assert isinstance(value, int if schema["type"] == "integer" else int | float)
            low, high = schema.get("minimum", -999), schema.get("maximum", 999)
            inside = schema.get("exclusiveMinimum", -999) < value < schema.get("exclusiveMaximum", 999)
            return bool(low <= value <= high and inside)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            assert isinstance(value, list)
            return len(value) >= schema["minItems"] and all(meets(each, schema["items"]) for each in value)
        case _:
            assert isinstance(value, dict)
            return list(value) == schema["required"] and all(
                meets(value[name], schema["properties"][name]) for name in value
            )


@given(schemas, st.binary(min_size=16, max_size=16))
def test_an_example_meets_its_schema_and_is_repeated(schema: dict[str, Any], seed: bytes) -> None:
    value = example(schema, seed)
    assert meets(value, schema)
    assert example(schema, seed) == value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, {}),
        (None, {}),
        ({"type": "object"}, {}),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"a": 1}),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 4}}}, 4),
        ({"$ref": "#"}, {}),
        ({"$ref": "#/nowhere/at/all"}, {}),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, []),
        ({"type": "object", "properties": 5, "required": [5]}, {}),
    ],
)
def test_odd_schemas_have_an_example(schema: object, value: object) -> None:
    assert example(schema, SEED) == value


def test_large_bounds_are_not_kept() -> None:
    assert len(str(example({"type": "string", "minLength": 10**9}, SEED))) <= 4096
    many = example({"type": "array", "items": {"type": "null"}, "minItems": 10**9}, SEED)
    assert isinstance(many, list) and len(many) == 64
