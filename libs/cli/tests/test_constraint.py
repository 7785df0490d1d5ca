"""The shape of an answer, as asked for on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.base.errors import StartError
from headrace.cli.constraint import constrain


def test_each_shape_goes_where_it_belongs(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    free, by_schema, by_regex, by_choice = (SamplingParams() for _ in range(4))
    constrain(free, None, None, None)
    constrain(by_schema, schema, None, None)
    constrain(by_regex, None, "[0-9]+", None)
    constrain(by_choice, None, None, ["yes", "no"])
    assert not free.HasField("constraint")
    assert by_schema.constraint.json_schema == '{"type": "integer"}'
    assert by_regex.constraint.regex == "[0-9]+"
    assert list(by_choice.constraint.choice.texts) == ["yes", "no"]


def test_two_shapes_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--regex and --choice exclude each other"):
        constrain(SamplingParams(), None, "a", ["b"])
    with pytest.raises(StartError, match=r"cannot read --json-schema .*nowhere"):
        constrain(SamplingParams(), tmp_path / "nowhere", None, None)
