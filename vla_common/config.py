"""Configuration: YAML and ``--set a.b=c`` into frozen dataclasses.

A key that the dataclass does not have is an error that names the nearest valid one, so that a mistyped limit is never
silently the default. Names carry their units (``max_age_s``, ``rate_hz``).
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that is refused; the message holds the path of the value and what would be valid."""


def load_config(cls: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Build a dataclass from a YAML file and overrides.

    Args:
        cls: a dataclass; nested dataclasses, list, tuple, dict, Optional, Literal, Enum and Path are followed.
        path: YAML file; None for the defaults alone.
        overrides: ``key.sub=value`` strings, later ones win; the value is YAML (``3``, ``true``, ``[a, b]``).

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, missing value, malformed override.
    """
    data: Any = {}
    source = "defaults"
    if path is not None:
        source = str(path)
        data = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(data, override)
    try:
        return from_mapping(cls, data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}: check the path given with --config") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, expected keys and values")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    node = data
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {key!r} holds a value, not keys")
    node[keys[-1]] = value


def from_mapping(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build a dataclass from nested mappings.

    Raises:
        ConfigError: see :func:`load_config`.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'top level'}: expected keys and values, got {_show(data)}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(fields)}"
            raise ConfigError(f"unknown key {_join(path, str(key))!r}; {hint}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing value {_join(path, name)!r}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:  # raised by the dataclass's own __post_init__ checks
        raise ConfigError(f"{path or cls.__name__}: {error}") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Value as the type that ``hint`` names."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is typing.Literal:
        if value is False and "off" in args:  # YAML 1.1 reads an unquoted off as false
            value = "off"
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
            raise ConfigError(
                f"{path}: {value!r} is none of {', '.join(map(repr, args))}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        return value
    if origin in (list, tuple, Sequence):
        return _convert_sequence(origin, args, value, path)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected keys and values, got {_show(value)}")
        return {
            _convert(args[0], key, f"{path} key"): _convert(args[1], item, _join(path, str(key)))
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_mapping(hint, {} if value is None else value, path)
    return _convert_scalar(hint, value, path)


def _convert_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    errors = []
    for arg in args:
        if arg is type(None):
            continue
        try:
            return _convert(arg, value, path)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0] if len(errors) == 1 else " or ".join(errors))


def _convert_sequence(origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path}: expected a list, got {_show(value)}")
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise ConfigError(f"{path}: expected {len(args)} values, got {len(value)}")
        return tuple(_convert(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    item_hint = args[0] if args else Any
    items = [_convert(item_hint, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return items if origin is list else tuple(items)


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        names = [member.name.lower() for member in hint]
        if isinstance(value, str) and value.lower() in names:
            return next(member for member in hint if member.name.lower() == value.lower())
        raise ConfigError(f"{path}: {value!r} is none of {', '.join(names)}")
    expected = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{path}: expected {expected}, got {_show(value)}")


def _show(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
