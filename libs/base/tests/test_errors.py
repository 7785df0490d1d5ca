"""The error tree."""

from __future__ import annotations

import pytest

from headrace.base import errors
from headrace.base.errors import Code, HeadraceError, InvalidRequest, StartError, StreamBroken, Unavailable

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, HeadraceError)]


def test_each_code_has_exactly_one_error_and_each_reason_is_upper_snake() -> None:
    assert sorted(k.code.value for k in KINDS if HeadraceError in k.__bases__) == sorted(c.value for c in Code)
    assert all(kind.default_reason.replace("_", "").isupper() for kind in KINDS)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for kind in KINDS[1:]:
        line = next(line for line in str(errors.__doc__).splitlines() if f"── {kind.__name__} " in line)
        assert f" {kind.code.value} " in line + " "
        assert f" {kind.default_reason} " in line + " "


def test_an_invalid_request_names_its_field_and_the_way_to_mend_it() -> None:
    error = InvalidRequest("sampling.top_p", "must be in (0, 1]")
    assert str(error) == error.message == "sampling.top_p: must be in (0, 1]"
    assert (error.field, error.why, error.reason) == ("sampling.top_p", "must be in (0, 1]", "INVALID_FIELD")


def test_facts_travel_beside_the_message() -> None:
    error = Unavailable("all stale", reason="STALE", retry_after_s=0.5, metadata={"engine": "e1"})
    assert (error.reason, error.retry_after_s, error.metadata) == ("STALE", 0.5, {"engine": "e1"})
    assert StreamBroken("gone", tokens_emitted=7).metadata == {"tokens_emitted": "7"}
    assert HeadraceError("x").metadata is not HeadraceError("y").metadata


def test_a_start_error_has_no_code() -> None:
    with pytest.raises(StartError) as caught:
        raise StartError("the port is taken")
    assert not isinstance(caught.value, HeadraceError)
