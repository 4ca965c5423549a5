"""Made-up JSON that meets a JSON schema: arguments of tool calls, and answers that must be JSON.

Simple schemas: types with their bounds, required properties, enum, const, local references, and the first branch
of anyOf, oneOf and allOf. What a schema says beyond that (patterns, formats) is not kept.
"""

from __future__ import annotations

from hashlib import blake2b

from worker.engines.simulated.text import words

MAX_DEPTH = 16
MAX_ITEMS = 64
MAX_CHARACTERS = 4096
STRING = 24  # characters of a made-up string that may have any length


def example(schema: object, seed: bytes) -> object:
    """A value for that schema; the same one for the same seed."""
    return _value(schema, schema, seed, 0)


def _value(schema: object, root: object, seed: bytes, depth: int) -> object:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return {}
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][seed[0] % len(schema["enum"])]
    if isinstance(schema.get("$ref"), str):
        return _value(_referred(schema["$ref"], root), root, seed, depth + 1)
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(several), list) and schema[several]:
            return _value(schema[several][0], root, seed, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "string" if depth else "object"
    match kind:
        case "string":
            least, most = _bound(schema, "minLength", 0), _bound(schema, "maxLength", MAX_CHARACTERS)
            size = min(max(STRING, least), most, MAX_CHARACTERS)
            text = words(seed, size)
            return text if least >= len(text) else text.rstrip()
        case "integer" | "number":
            return _number(schema, whole=kind == "integer")
        case "boolean":
            return bool(seed[0] & 1)
        case "null":
            return None
        case "array":
            count = min(
                max(_bound(schema, "minItems", 1), 0), _bound(schema, "maxItems", MAX_ITEMS), MAX_ITEMS
            )
            items = schema.get("items", {"type": "string"})
            return [_value(items, root, _under(seed, str(at)), depth + 1) for at in range(count)]
        case _:
            properties = schema.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            required = schema.get("required")
            names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            return {
                name: _value(properties.get(name, {"type": "string"}), root, _under(seed, name), depth + 1)
                for name in names
            }


def _number(schema: dict[str, object], *, whole: bool) -> int | float:
    def bound(name: str) -> float | None:
        value = schema.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    step = 1 if whole else 0.5
    value: float = 1
    low, high = bound("minimum"), bound("maximum")
    above, below = bound("exclusiveMinimum"), bound("exclusiveMaximum")
    if low is not None:
        value = max(value, low)
    if above is not None:
        value = max(value, above + step)
    if high is not None:
        value = min(value, high)
    if below is not None:
        value = min(value, below - step)
    return int(value) if whole else value


def _bound(schema: dict[str, object], name: str, default: int) -> int:
    value = schema.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _referred(ref: str, root: object) -> object:
    """What a reference within the same schema stands for."""
    found: object = root
    for name in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, dict) and name else found
    return found


def _under(seed: bytes, name: str) -> bytes:
    return blake2b(seed + name.encode("utf-8", "replace"), digest_size=16).digest()
