"""Settings: plain dataclasses beside their owners, read strictly from TOML run files.

A settings class declares its keys with `setting(default, help, …)`; reading checks key names, types, choices and ranges
of the whole file and reports everything that is wrong at once. A class may add `problems()` for what concerns several
keys. This module knows how to read and write such classes and nothing about what they mean.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.errors import SettingsError, nearest

REQUIRED: Any = dataclasses.MISSING


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: bool = False,
    kinds: dict[str, Any] | None = None,
) -> Any:
    """A dataclass field with what a reader of a run file needs to know about it.

    With `kinds`, the value is a table of its own whose `kind` says which settings class it is; where a kind's name is
    all there is to say, the name may stand for the table.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "least": least,
        "most": most,
        "above": above,
        "below": below,
        "path": path,
        "kinds": kinds,
    }
    return dataclasses.field(default=default, metadata=metadata, kw_only=default is REQUIRED)


def read(cls: type, values: object, place: str, problems: list[str]) -> Any:
    """An instance of the settings class `cls` from a TOML table; what is wrong is added to `problems`.

    Returns None where no instance can be made.
    """
    if not isinstance(values, dict):
        problems.append(f"[{place}] must be a table, not {values!r}")
        return None
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    before = len(problems)
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            problems.append(f"{place}.{key}: unknown key{nearest(key, fields)}")
            continue
        if kinds := fields[key].metadata.get("kinds"):
            table = {"kind": value} if isinstance(value, str) else value
            good[key] = read_kind(kinds, "kind", None, table, f"{place}.{key}", problems)
            continue
        problem, converted = check(value, hints[key], fields[key].metadata)
        if problem:
            problems.append(f"{place}.{key} = {value!r}: {problem}")
        else:
            good[key] = converted
    for name, field in fields.items():
        if name not in values and field.default is REQUIRED:
            problems.append(f"{place}.{name}: missing; {field.metadata['help']}")
    if len(problems) > before:
        return None
    instance = cls(**good)
    problems.extend(f"{place}.{key}: {problem}" for key, problem in cross_checks(instance))
    return instance


def read_kind(
    classes: dict[str, Any], key: str, default: str | None, table: Any, place: str, problems: list[str]
) -> Any:
    """Read a table whose `key` says which settings class it is."""
    if not isinstance(table, dict):
        problems.append(f"[{place}] must be a table, not {table!r}")
        return None
    kind = table.get(key, default)
    if not isinstance(kind, str) or kind not in classes:
        said = f"{place}.{key} = {kind!r}: unknown" if kind is not None else f"{place}.{key}: missing"
        problems.append(f"{said}{nearest(str(kind or ''), classes)}")
        return None
    return read(classes[kind], table, place, problems)


def cross_checks(instance: Any) -> Iterator[tuple[str, str]]:
    return instance.problems() if hasattr(instance, "problems") else iter(())


def check(value: Any, hint: Any, metadata: typing.Mapping[str, Any]) -> tuple[str | None, Any]:
    """(what is wrong or None, the value as its type)."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        fits, converted = fit(value, kind)
        if fits:
            return limits(converted, metadata), converted
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
    if metadata and metadata["path"] and isinstance(value, list):
        return "must be one text in quotes; a folder, or a pattern, stands for several files", None
    wanted = " or ".join(names.get(kind, "a list of texts") for kind in kinds if kind is not type(None))
    return f"must be {wanted}", None


def fit(value: Any, kind: Any) -> tuple[bool, Any]:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value) if abs(value) < 10**300 else float("inf")
    if kind in (int, float, str, bool):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), value
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value), value
    return False, value


def limits(value: Any, metadata: typing.Mapping[str, Any]) -> str | None:
    if not metadata:
        return None
    if isinstance(value, str) and (problem := text_problem(value, metadata["path"])):
        return problem
    choices = metadata["choices"]() if callable(metadata["choices"]) else metadata["choices"]
    if choices and value not in choices:
        close = nearest(str(value), choices)
        return f"must be one of {', '.join(choices)}" + (close if "did you mean" in close else "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not -float("inf") < value < float("inf"):
            return "must be a finite number"
        for name, words, holds in (
            ("least", "at least", lambda limit: value >= limit),
            ("most", "at most", lambda limit: value <= limit),
            ("above", "above", lambda limit: value > limit),
            ("below", "below", lambda limit: value < limit),
        ):
            limit = metadata[name]
            if limit is not None and not holds(limit):
                return f"must be {words} {limit if isinstance(limit, int) else format(limit, 'g')}"
    return None


def text_problem(text: str, path: bool) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "holds bytes that are not UTF-8"
    if path and "\0" in text:
        return "holds a null character, which no file's name has"
    return "must name a file" if path and not text.strip() else None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or a `SettingsError` that names file, line and column."""
    try:
        text = path.read_text("utf-8-sig")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise SettingsError([f"not UTF-8 at byte {error.start + 1}; re-save it as UTF-8"], str(path)) from None
    except ValueError as error:  # not TOML, or a number of thousands of digits
        line = re.search(r"at line (\d+)", str(error))
        there = f": {text.splitlines()[int(line[1]) - 1].strip()}" if line else ""
        ways = 'a run file holds key = value under [section], and texts stand in quotes, as in name = "words"'
        raise SettingsError([f"not TOML: {error}{there}; {ways}"], str(path)) from None
    except OSError as error:
        raise SettingsError([f"cannot be read: {error.strerror}"], str(path)) from None


def override(tables: dict[str, Any], assignment: str) -> str:
    """Put one `a.b=c` into `tables` and return `a.b`; c is read as TOML, and as plain text where it is not TOML.

    `a.b=` takes what stands there away.
    """
    key, equals, text = assignment.partition("=")
    parts = parts_of_key(key)
    if not equals or len(parts) < 2:
        raise SettingsError([f"--set {assignment!r}: not section.key=value, as in model.width=128"])
    table = tables
    for part in parts[:-1]:
        if isinstance(table.get(part), str):  # the name of a kind, which may have settings of its own
            table[part] = {"kind": table[part]}
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise SettingsError([f"--set {assignment!r}: '{part}' is a value, not a section"])
    value, before = toml_or_text(text), table.get(parts[-1])
    if not text.strip():
        table.pop(parts[-1], None)
    elif isinstance(before, dict) and isinstance(value, str):  # the name of a kind, whose settings were given first
        before["kind"] = value
    else:
        table[parts[-1]] = value
    return ".".join(parts)


def parts_of_key(key: str) -> list[str]:
    """The names in a dotted key, of which some may stand in quotes, as TOML reads them; none where it is no key."""
    try:
        table = tomllib.loads(f"{key} = 0")
    except ValueError:
        parts = [part.strip() for part in key.split(".")]
        return parts if all(parts) else []
    parts = []
    while isinstance(table, dict) and len(table) == 1:
        ((part, table),) = table.items()
        parts.append(part)
    return parts if table == 0 else []


def toml_or_text(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return found["value"] if len(found) == 1 else text  # more lines of TOML are no value


def to_table(instance: Any) -> dict[str, Any]:
    """The settings as a TOML table; keys whose value is None are left out, a kind without settings is its name."""
    table = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            value = to_table(value)
            value = value["kind"] if list(value) == ["kind"] else value
        if value is not None:
            table[field.name] = value
    return table


def to_toml(tables: dict[str, Any], prefix: str = "") -> str:
    """Write nested tables of plain values as TOML."""
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    text = "\n".join(lines) + ("\n" if lines else "")
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{prefix}{toml_key(key)}"
            has_values = any(not isinstance(item, dict) for item in value.values())
            text += (f"\n[{name}]\n" if has_values else "") + to_toml(value, f"{name}.")
    return text


def toml_key(key: str) -> str:
    """A key as TOML wants it: in quotes where there is more in it than letters, digits, _ and -."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(
            f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char
            for char in value.replace("\\", "\\\\").replace('"', '\\"')
        )
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
