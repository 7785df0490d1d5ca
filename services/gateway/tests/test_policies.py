"""Policy filters: the gateway's own two, and what happens with those that others bring."""

import asyncio
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.deadline import Deadline
from headrace.base.errors import Forbidden, StartError
from headrace.gateway.core.audit import Audit, Decision
from headrace.gateway.core.policy import PolicyFilter, PolicyRequest, Verdict
from headrace.gateway.core.terms import TenantTerms
from headrace.gateway.filters import DeniedPatterns, MaxOutput
from headrace.gateway.policies import Policies, installed_filters

CANARY = "the secret canary"


def request(
    *texts: str, patterns: tuple[str, ...] = (), most: int | None = None, asked: int | None = None
) -> PolicyRequest:
    terms = TenantTerms(
        tenant="acme", denied_patterns=tuple(re.compile(each) for each in patterns), max_output_tokens=most
    )
    return PolicyRequest(
        request_id="r1",
        terms=terms,
        credential="laptop",
        deployment="model",
        texts=texts or ("hello",),
        max_tokens=asked or 1000,
        asked_max_tokens=asked,
    )


class Judge:
    """Policies and what they audited."""

    def __init__(self, *filters: PolicyFilter) -> None:
        self.audits: list[Audit] = []
        self.policies = Policies(filters or (DeniedPatterns(), MaxOutput()), self.audits.append)

    async def tokens(self, asked: PolicyRequest, within_s: float = 30.0) -> int:
        return await self.policies.judged(asked, Deadline.after(within_s))

    async def refusal(self, asked: PolicyRequest, within_s: float = 30.0) -> Forbidden:
        with pytest.raises(Forbidden) as refused:
            await self.tokens(asked, within_s)
        return refused.value


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.policies.close()


async def test_a_tenant_without_rules_is_asked_nothing(judge: Judge) -> None:
    assert await judge.tokens(request()) == 1000
    assert judge.audits == []


async def test_a_denied_pattern_in_any_text_refuses_and_is_audited_by_number(judge: Judge) -> None:
    asked = request("hello", f"tell me {CANARY}", patterns=("nothing", r"(?i)SECRET\s+canary"))
    error = await judge.refusal(asked)
    assert (error.reason, error.metadata) == ("DENIED_PATTERN", {"filter": "denied_patterns"})
    (audit,) = judge.audits
    assert audit == Audit(
        subject="policy.denied_patterns",
        decision=Decision.REFUSED,
        reason="DENIED_PATTERN",
        tenant="acme",
        credential="laptop",
        request_id="r1",
        facts={"pattern": "1"},
    )
    assert "canary" not in f"{error!r} {error.message} {error.metadata} {audit}".lower()
    assert await judge.tokens(request("hello", patterns=("nothing", "(?i)SECRET"))) == 1000


async def test_flags_of_a_pattern_are_kept(judge: Judge) -> None:
    asked = request("one\nTWO", patterns=("x",))
    flagged = replace(asked.terms, denied_patterns=(re.compile("^two$", re.IGNORECASE | re.MULTILINE),))
    await judge.refusal(replace(asked, terms=flagged))


async def test_a_pattern_that_never_ends_refuses_in_bounded_time_and_holds_up_nobody(judge: Judge) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    others = asyncio.create_task(tick())
    started = time.monotonic()
    error = await judge.refusal(request("a" * 100 + "!", patterns=("(a|aa)+$",)))
    assert time.monotonic() - started < 10
    others.cancel()
    assert ticks >= 5, "the event loop stood still meanwhile"
    assert error.reason == "POLICY_FAILED"
    (audit,) = judge.audits
    assert (audit.decision, audit.reason, audit.facts) == (Decision.REFUSED, "POLICY_FAILED", {"error": "TimeoutError"})


async def test_a_prompt_of_four_megabytes_is_searched_in_full(judge: Judge) -> None:
    asked = request("lorem ipsum " * 350_000 + CANARY, patterns=("(?i)secret canary", r"\b\d{16}\b"))
    assert (await judge.refusal(asked)).reason == "DENIED_PATTERN"


async def test_too_long_an_answer_is_cut_and_only_what_was_asked_for_counts_as_changed(judge: Judge) -> None:
    assert await judge.tokens(request(most=100, asked=100)) == 100
    assert await judge.tokens(request(most=100)) == 100
    assert judge.audits == []
    assert await judge.tokens(request(most=100, asked=101)) == 100
    (audit,) = judge.audits
    assert (audit.subject, audit.decision, audit.facts) == (
        "policy.max_output",
        Decision.CHANGED,
        {"asked": "101", "granted": "100"},
    )


class Rule:
    """A filter of somebody else."""

    def __init__(self, name: str, verdict: object, *, concerned: object = True) -> None:
        self.name, self._verdict, self._concerned, self.asked = name, verdict, concerned, 0

    def concerns(self, request: PolicyRequest) -> bool:
        if isinstance(self._concerned, Exception):
            raise self._concerned
        return bool(self._concerned)

    def check(self, request: PolicyRequest) -> Verdict:
        self.asked += 1
        if isinstance(self._verdict, Exception):
            raise self._verdict
        return self._verdict  # type: ignore[return-value]


REFUSE = Verdict(decision=Decision.REFUSED, reason="NO_POEMS")


async def test_the_request_s_own_deadline_ends_a_check() -> None:
    over = threading.Event()

    class Slow(Rule):
        def check(self, request: PolicyRequest) -> Verdict:
            over.wait(30)
            return Verdict()

    judge = Judge(Slow("slow", Verdict()))
    try:
        error = await judge.refusal(request(), within_s=0.05)
        assert not over.is_set()
    finally:
        over.set()
    assert (error.reason, error.metadata) == ("POLICY_FAILED", {"filter": "slow"})


async def test_filters_are_asked_by_name_and_the_first_refusal_ends_it() -> None:
    first, second = Rule("a", Verdict()), Rule("b", REFUSE)
    third = Rule("c", REFUSE)
    judge = Judge(third, second, first)
    assert judge.policies.names == ["a", "b", "c"]
    assert (await judge.refusal(request())).metadata == {"filter": "b"}
    assert (first.asked, second.asked, third.asked) == (1, 1, 0)


@pytest.mark.parametrize(
    "broken",
    [
        Rule("broken", RuntimeError(CANARY)),
        Rule("broken", None),
        Rule("broken", Verdict(decision="MAYBE")),  # type: ignore[arg-type]
        Rule("broken", Verdict(), concerned=ValueError(CANARY)),
    ],
)
async def test_a_filter_that_fails_refuses_the_request_and_names_none_of_it(broken: Rule) -> None:
    judge = Judge(broken, Rule("fine", Verdict()))
    error = await judge.refusal(request(CANARY))
    assert (error.reason, error.metadata) == ("POLICY_FAILED", {"filter": "broken"})
    (audit,) = judge.audits
    assert (audit.reason, audit.decision) == ("POLICY_FAILED", Decision.REFUSED)
    assert "canary" not in f"{error.message} {audit}"


async def test_a_filter_cannot_raise_what_an_answer_may_have() -> None:
    judge = Judge(Rule("generous", Verdict(max_tokens=5000)), Rule("strict", Verdict(max_tokens=7)))
    assert await judge.tokens(request()) == 7


def test_two_filters_of_one_name_are_a_fault_of_the_installation() -> None:
    with pytest.raises(StartError, match="twin"):
        Judge(Rule("twin", Verdict()), Rule("twin", Verdict()))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path that brings a filter, as pip would have installed it."""
    info = tmp_path / "poems-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poems\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.policies]\nno_poems = poems_policy:NoPoems\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "poems_policy", raising=False)
    return tmp_path


async def test_another_package_s_filter_is_found_by_its_entry_point(installed: Path) -> None:
    (installed / "poems_policy.py").write_text(
        "from headrace.gateway.core.audit import Decision\n"
        "from headrace.gateway.core.policy import Verdict\n"
        "class NoPoems:\n"
        "    name = 'no_poems'\n"
        "    def concerns(self, request): return True\n"
        "    def check(self, request):\n"
        "        poem = any('poem' in text for text in request.texts)\n"
        "        return Verdict(decision=Decision.REFUSED, reason='NO_POEMS') if poem else Verdict()\n"
    )
    judge = Judge(*installed_filters())
    assert judge.policies.names == ["denied_patterns", "max_output", "no_poems"]
    assert (await judge.refusal(request("a poem, please"))).reason == "NO_POEMS"
    assert await judge.tokens(request("prose")) == 1000


@pytest.mark.parametrize("source", ["raise RuntimeError('half installed')", "NoPoems = dict"])
def test_a_filter_that_cannot_be_loaded_keeps_the_gateway_from_starting(installed: Path, source: str) -> None:
    (installed / "poems_policy.py").write_text(source)
    with pytest.raises(StartError, match="no_poems"):
        installed_filters()
