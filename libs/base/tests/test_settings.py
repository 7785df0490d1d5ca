"""Settings from flags and environment."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest

from headrace.base.errors import StartError
from headrace.base.settings import knob, load


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A process's settings."""

    name: str = knob(help="its name")
    size: int = knob(3, help="its size", least=1, most=9)
    rate: float = knob(0.5, help="100 % of it", least=0.0)
    big: bool = knob(False, help="whether it is big")
    peers: tuple[str, ...] = knob((), help="others")
    color: Color = knob(Color.RED, help="its color")
    limit: int | None = knob(None, help="no limit by default", least=0)
    url: str = knob("", help="a URL", env="SHARED_URL")

    def __post_init__(self) -> None:
        if self.big and self.size < 2:
            raise ValueError("a big one has size 2 at least")


def read(*argv: str, **environ: str) -> Settings:
    return load(Settings, service="demo", argv=["--name", "n", *argv], environ=environ)


def test_defaults_hold_where_nothing_is_given() -> None:
    assert read() == Settings(name="n")


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    assert read(HEADRACE_DEMO_SIZE="5").size == 5
    assert read("--size", "7", HEADRACE_DEMO_SIZE="5").size == 7


def test_a_setting_shared_by_services_has_its_own_variable() -> None:
    assert read(SHARED_URL="redis://x").url == "redis://x"
    assert read(HEADRACE_DEMO_URL="redis://y").url == ""


def test_each_type_is_parsed() -> None:
    found = read("--rate", "2", "--peers", " a:1, b:2,,", "--color", "blue", "--limit", "8", "--big", "ON")
    assert found == Settings(name="n", rate=2.0, peers=("a:1", "b:2"), color=Color.BLUE, limit=8, big=True)
    assert read("--big", "no").big is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--size", "0"], "--size=0 is out of range: it must be from 1 to 9"),
        (["--rate", "-1"], "--rate=-1 is out of range: it must be at least 0.0"),
        (["--rate", "nan"], "--rate=nan is out of range: it must be at least 0.0"),
        (["--size", "2.5"], "--size='2.5' is not an integer"),
        (["--rate", "fast"], "--rate='fast' is not a number"),
        (["--big", "maybe"], "--big='maybe' is not a yes or no: use true or false"),
        (["--color", "green"], "--color='green': use one of red, blue"),
        (["--limit", "-1"], "--limit=-1 is out of range: it must be at least 0"),
        (["--big", "true", "--size", "1"], "a big one has size 2 at least"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_says_what_is_allowed(argv: list[str], message: str) -> None:
    with pytest.raises(StartError) as caught:
        read(*argv)
    assert str(caught.value) == message


def test_a_bad_variable_is_named_as_such() -> None:
    with pytest.raises(StartError, match="HEADRACE_DEMO_SIZE=99 is out of range"):
        read(HEADRACE_DEMO_SIZE="99")


def test_a_required_setting_says_how_to_give_it() -> None:
    with pytest.raises(StartError, match=r"--name \(or HEADRACE_DEMO_NAME\) is required: its name"):
        load(Settings, service="demo", argv=[], environ={})


def test_help_shows_each_setting_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its size (default: 3) [HEADRACE_DEMO_SIZE]" in shown
    assert "100 % of it (default: 0.5)" in shown
    assert "its color (default: red)" in shown
    assert "[SHARED_URL]" in shown


def test_unknown_and_shortened_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--sizes", "--siz"):
        with pytest.raises(SystemExit):
            read(flag, "3")
        assert f"unrecognized arguments: {flag} 3" in capsys.readouterr().err
