"""The two policy filters that every gateway has."""

from __future__ import annotations

import re
import time
from functools import lru_cache

import regex

from headrace.gateway.core.audit import Decision
from headrace.gateway.core.policy import PolicyRequest, Verdict

_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII

_SEARCH_S, _SEARCH_S_PER_MIB = 0.25, 1.0
"""Time for all patterns of a request, and more for each 2**20 characters of it; a plain pattern takes 1 to 10 ms."""


class DeniedPatterns:
    """Refuses a request in one of whose texts one of its tenant's patterns is found.

    A pattern may take exponential time (`(a+)+$`), so the search has a limit, and beyond it the request is refused as
    unchecked. `re` knows no limit; `regex` does, keeps to the same syntax, and lets go of the interpreter meanwhile.
    """

    name = "denied_patterns"

    def concerns(self, request: PolicyRequest) -> bool:
        """Whether the tenant has patterns."""
        return bool(request.terms.denied_patterns)

    def check(self, request: PolicyRequest) -> Verdict:
        """REFUSED with the pattern's number; TimeoutError when the time is up."""
        size = sum(map(len, request.texts))
        until = time.monotonic() + _SEARCH_S + _SEARCH_S_PER_MIB * size / (1 << 20)
        for number, pattern in enumerate(request.terms.denied_patterns):
            compiled = _compiled(pattern.pattern, int(pattern.flags & _FLAGS))
            for text in request.texts:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                if compiled.search(text, timeout=left_s, concurrent=True):
                    return Verdict(decision=Decision.REFUSED, reason="DENIED_PATTERN", facts={"pattern": str(number)})
        return Verdict()


class MaxOutput:
    """Cuts `max_tokens` to what the tenant may have; a change only if the client had asked for more."""

    name = "max_output"

    def concerns(self, request: PolicyRequest) -> bool:
        """Whether an answer could become longer than the tenant's longest."""
        most = request.terms.max_output_tokens
        return most is not None and request.max_tokens > most

    def check(self, request: PolicyRequest) -> Verdict:
        """CHANGED, or ALLOWED with fewer tokens where the client had named none."""
        most, asked = request.terms.max_output_tokens, request.asked_max_tokens
        if most is None or asked is None or asked <= most:
            return Verdict(max_tokens=most)
        return Verdict(
            decision=Decision.CHANGED,
            reason="MAX_OUTPUT_TOKENS",
            facts={"asked": str(asked), "granted": str(most)},
            max_tokens=most,
        )


@lru_cache(maxsize=4096)
def _compiled(pattern: str, flags: int) -> regex.Pattern[str]:
    return regex.compile(pattern, flags | regex.VERSION0)
