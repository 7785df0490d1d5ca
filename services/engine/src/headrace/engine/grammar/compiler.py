"""Compiling a constraint: slow (a millisecond, for the largest schemas a second), so never in the step loop."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from headrace.engine.core.sampling_plan import ConstraintSpec
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.source import grammar_of
from headrace.engine.grammar.vocabulary import Vocabulary

# The library counts its work and gives up at these. A step's fuel is spent in 7 ms, the compiler's in 20; a state of
# the lexer takes 1 to 2 KB.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


def compile_grammar(spec: ConstraintSpec, vocabulary: Vocabulary) -> Matcher:
    """The matcher before the first token, of which each answer takes a copy.

    Refused with the reason in one line when `spec` is wrong, too complex or cannot be fulfilled. Releases the
    interpreter's lock while it works. Takes the first mask too: that finds grammars that nothing fits, and fills the
    tables that all matchers of this grammar share.
    """
    return Matcher(LLMatcher(vocabulary.trie, grammar_of(spec), log_level=0, limits=_LIMITS), vocabulary)
