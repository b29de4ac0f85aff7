"""Which JSON Schemas are taken: what cannot be kept while an answer is written is refused by name, never ignored.

The grammar library leaves some keywords out without a word and takes long over others; both are decided here, in
time linear in the schema. What only the library finds out (a regular expression it does not read) it says itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from vla_cloud.core.generate import InvalidRequest

MAX_DEPTH: Final = 64
"""JSON values within each other; a level of objects takes two (``properties`` and the name)."""
MAX_NODES: Final = 8192
MAX_PATTERN_CHARS: Final = 256
MAX_PATTERN_REPEAT: Final = 256
MAX_COUNT: Final = 1_000_000
"""Of minLength, maxItems and the like."""

_NOT_KEPT: Final = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf", "dependentRequired",
    "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "additionalItems", "$anchor", "$dynamicAnchor",
})  # fmt: skip
_ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "discriminator", "$defs", "definitions", "nullable", "contentEncoding", "contentMediaType",
})  # fmt: skip
_CONSTRAINTS: Final = frozenset({
    "type", "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "items", "prefixItems", "unevaluatedItems", "minItems",
    "maxItems", "uniqueItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format",
})  # fmt: skip
_ALONE: Final = ("$ref", "anyOf", "oneOf", "allOf")  # of these the library reads nothing else beside them
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA: Final = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_LOOK_AROUND: Final = re.compile(r"\(\?(?!:)|\\[bB]|\\[1-9]|\\[pP]\{")
_ESCAPED: Final = re.compile(r'"|\\\\|\\[xuUc]')  # what JSON writes otherwise than a pattern does
_REPEAT: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_schema(schema: Any, name: str) -> None:
    """Raise InvalidRequest, with the place, for a schema that is too large or asks for what cannot be kept."""
    _check_size(schema, name)
    waiting: list[tuple[Any, str]] = [(schema, name)]
    while waiting:
        one, place = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise InvalidRequest(f"{place} is not a schema: it must be an object")
        _check_one(one, place)
        waiting.extend(_parts(one, place))


def _check_size(value: Any, name: str) -> None:
    nodes = 0
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep: flatten it, or use $ref")
        if nodes > MAX_NODES:
            raise InvalidRequest(f"{name} has more than {MAX_NODES} values: shorten it")
        if isinstance(one, dict):
            waiting.extend((part, depth + 1) for part in one.values())
        elif isinstance(one, list):
            waiting.extend((part, depth + 1) for part in one)


def _parts(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    for key in _OF_SCHEMAS:
        if key in schema:
            if not isinstance(schema[key], dict):
                raise InvalidRequest(f"{place}.{key} must be an object of schemas")
            yield from ((part, f"{place}.{key}.{name[:40]}") for name, part in schema[key].items())
    for key in _SCHEMA:
        if isinstance(schema.get(key), list):
            raise InvalidRequest(f"{place}.{key} is a list: use prefixItems")
        if key in schema:
            yield schema[key], f"{place}.{key}"
    for key in _LISTS:
        if key in schema:
            if not isinstance(schema[key], list) or not schema[key]:
                raise InvalidRequest(f"{place}.{key} must be a list of schemas")
            yield from ((part, f"{place}.{key}[{index}]") for index, part in enumerate(schema[key]))


def _check_one(schema: Mapping[str, Any], place: str) -> None:
    for key in schema:
        if key in _NOT_KEPT:
            raise InvalidRequest(f"{place} has {key}, which is not supported: leave it out")
    if schema.get("uniqueItems"):
        raise InvalidRequest(f"{place} has uniqueItems, which is not supported: leave it out")
    given = [key for key in _ALONE if key in schema]
    beside = [key for key in schema if key in _CONSTRAINTS and key not in given[:1]]
    if given and beside:
        raise InvalidRequest(f"{place} has {given[0]} and {beside[0]} side by side, which is not supported: use one")
    if len(schema.get("allOf", ())) > 1:
        raise InvalidRequest(f"{place}.allOf has several schemas, which is not supported: join them")
    if ("enum" in schema or "const" in schema) and (beside := [
        key for key in schema if key in _CONSTRAINTS - {"enum", "const", "type"}
    ]):  # fmt: skip
        raise InvalidRequest(f"{place} has an enum or const and {beside[0]}: leave {beside[0]} out")
    if "properties" in schema and (mixed := [key for key in ("patternProperties", "propertyNames") if key in schema]):
        raise InvalidRequest(f"{place} has properties and {mixed[0]}, which is not supported: use one")
    _check_ref(schema, place)
    _check_numbers(schema, place)
    if "pattern" in schema:
        _check_pattern(schema["pattern"], place)
        if "minLength" in schema or "maxLength" in schema or "format" in schema:
            raise InvalidRequest(f"{place} has a pattern and a length or format: say all of it in the pattern")
    for pattern in schema.get("patternProperties", ()):
        _check_pattern(pattern, f"{place}.patternProperties")


def _check_ref(schema: Mapping[str, Any], place: str) -> None:
    ref = schema.get("$ref", "#")
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        # Nothing is ever fetched.
        raise InvalidRequest(f"{place}.$ref is {str(ref)[:80]!r}: only places within the schema (#/...) are read")


def _check_numbers(schema: Mapping[str, Any], place: str) -> None:
    for key in _COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise InvalidRequest(f"{place}.{key} must be a whole number from 0 to {MAX_COUNT}")


def _check_pattern(pattern: Any, place: str) -> None:
    if not isinstance(pattern, str):
        raise InvalidRequest(f"{place}.pattern must be a string")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"{place}: a pattern of {len(pattern)} characters, at most {MAX_PATTERN_CHARS} are taken")
    found = _LOOK_AROUND.search(pattern)
    if found is not None:
        raise InvalidRequest(f"{place}: {found.group()} in a pattern is not supported: write it without")
    found = _ESCAPED.search(pattern)
    if found is not None:
        raise InvalidRequest(f"{place}: {found.group()} in a pattern is not supported: JSON writes it in another way")
    product = 1
    for match in _REPEAT.finditer(pattern):
        product *= max(int(count[:9]) for count in match.groups() if count) if any(match.groups()) else 1
    if product > MAX_PATTERN_REPEAT:
        raise InvalidRequest(f"{place}: a pattern repeats up to {product} times, {MAX_PATTERN_REPEAT} are taken")
