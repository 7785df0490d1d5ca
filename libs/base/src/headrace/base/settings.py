"""Settings: one frozen dataclass per process, read once from flags and environment.

Our own hundred lines instead of pydantic-settings, because importing that costs each of the five processes
0.3 s of a start whose whole budget is 10 s on two cores.

A field becomes the flag ``--kebab-name`` and the variable ``HEADRACE_<SERVICE>_<NAME>`` (or the one given as
``env``); a flag wins over the environment, the environment over the default. Supported types: str, int, float,
bool, their optional forms, tuples of str (comma-separated), and enums by value.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from headrace.base.errors import StartError

T = TypeVar("T")


def knob(
    default: Any = dataclasses.MISSING,
    *,
    help: str,  # the field's standard word for it
    env: str | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a setting: its default (none: required), what it means, and its range."""
    meta = {"help": help, "env": env, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=meta)


def load(cls: type[T], *, service: str, argv: Sequence[str], environ: Mapping[str, str], description: str = "") -> T:
    """Build `cls` from `argv` and `environ`; StartError names the setting and what it may be."""
    hints = typing.get_type_hints(cls)
    parser = argparse.ArgumentParser(
        prog=f"python -m headrace.{service}",
        description=description or cls.__doc__,
        allow_abbrev=False,  # a shortened flag would change its meaning when a setting is added
    )
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    for f in fields:
        shown = "" if f.default in (dataclasses.MISSING, None, "") else f" (default: {_show(f.default)})"
        text = f"{f.metadata['help']}{shown} [{_env_name(service, f)}]".replace("%", "%%")
        parser.add_argument(_flag(f), dest=f.name, default=None, metavar="VALUE", help=text)
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for f in fields:
        raw = given[f.name]
        source = _flag(f)
        if raw is None and _env_name(service, f) in environ:
            raw, source = environ[_env_name(service, f)], _env_name(service, f)
        if raw is not None:
            values[f.name] = _parse(raw, hints[f.name], source, f.metadata)
        elif f.default is dataclasses.MISSING:
            raise StartError(f"{_flag(f)} (or {_env_name(service, f)}) is required: {f.metadata['help']}")
    try:
        return cls(**values)
    except ValueError as error:
        raise StartError(str(error)) from error


def _flag(f: dataclasses.Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def _env_name(service: str, f: dataclasses.Field[Any]) -> str:
    return str(f.metadata["env"] or f"HEADRACE_{service.upper()}_{f.name.upper()}")


def _show(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _parse(raw: str, hint: Any, source: str, meta: Mapping[str, Any]) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if hint is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if raw.lower() not in words:
            raise StartError(f"{source}={raw!r} is not a yes or no: use true or false")
        return words[raw.lower()]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(raw)
        except ValueError:
            raise StartError(f"{source}={raw!r}: use one of {', '.join(str(m.value) for m in hint)}") from None
    if hint in (int, float):
        return _number(raw, hint, source, meta)
    return raw


def _number(raw: str, kind: type[int] | type[float], source: str, meta: Mapping[str, Any]) -> float | int:
    try:
        value = kind(raw)
    except ValueError:
        raise StartError(f"{source}={raw!r} is not a{'n integer' if kind is int else ' number'}") from None
    least, most = meta["least"], meta["most"]
    if value != value or (least is not None and value < least) or (most is not None and value > most):
        span = (
            f"at least {least}" if most is None else f"at most {most}" if least is None else f"from {least} to {most}"
        )
        raise StartError(f"{source}={raw} is out of range: it must be {span}")
    return value
