"""The shape of an answer, as asked for on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.api.common.v1 import sampling_pb2
from headrace.base.errors import StartError


def constrain(
    sampling: sampling_pb2.SamplingParams, json_schema: Path | None, regex: str | None, choice: Sequence[str] | None
) -> None:
    """Put the one shape that was given into `sampling`; StartError when there are several or the file is unreadable."""
    given = [
        name for name, value in (("--json-schema", json_schema), ("--regex", regex), ("--choice", choice)) if value
    ]
    if len(given) > 1:
        raise StartError(f"{' and '.join(given)} exclude each other: an answer has one shape")
    if json_schema is not None:
        try:
            sampling.constraint.json_schema = json_schema.read_text()
        except (OSError, UnicodeError) as error:
            raise StartError(f"cannot read --json-schema {json_schema}: {error}") from None
    elif regex:
        sampling.constraint.regex = regex
    elif choice:
        sampling.constraint.choice.texts.extend(choice)
