"""Grammars of the sequences in the loop: compiled in threads, asked once per step, forgotten with the sequence.

A sequence's state is a function of the tokens of its answer so far, so chunks, preemption and recomputation do not
touch it, and a migrated answer gets it by replaying what was emitted.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.finish import ErrorReason, Problem
from headrace.engine.core.sampling_plan import ConstraintSpec
from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.grammar.trial import Trial, needs_trial
from headrace.engine.grammar.verdict import Refused, Verdict
from headrace.engine.worker.backend import TokenMask

if TYPE_CHECKING:  # at run time on the first constrained request only: see headrace.engine.grammar
    from headrace.engine.grammar.matcher import Matcher
    from headrace.engine.grammar.vocabulary import Vocabulary

# The largest schema allowed compiles in about 0.5 s; this is for a machine ten times as busy.
COMPILE_LIMIT_S = 5.0
# While a grammar is compiled an idle loop looks for it this often.
POLL_S = 0.002
_THREADS = 2  # one slow compilation does not hold up the next one
# A compiled grammar takes up to 200 times the memory of its text: these keep them all below about 100 MB.
_MOST_KEPT = 64
_MOST_KEPT_BYTES = 512 * 1024


@dataclass(slots=True, eq=False)
class _Compilation:
    """One spec on its way to a grammar, for all the sequences that have it."""

    spec: ConstraintSpec
    outcome: Future[Matcher | Problem] = field(init=False)
    started_at: float | None = None  # None while it waits for a thread


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sequence that waits for its grammar."""

    compilation: _Compilation
    emitted_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Constrained:
    """A sequence that has it."""

    compilation: _Compilation
    matcher: Matcher


class Grammars:
    """Where each constrained sequence stands. Sequences without a constraint are never heard of here.

    Only the loop's thread calls it. `model` is the path that has the tokenizer, None for the model that ships; it is
    first read for the first constraint. `vocab_size` and `eos_ids` are the backend's.
    """

    def __init__(
        self,
        model: Path | None,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        self._source = _Source(model, vocab_size, eos_ids, compile_limit_s)
        self._clock = clock
        self._compile_limit_s = compile_limit_s
        # Those that could explode have a thread of their own: others never wait for them.
        self._threads: ThreadPoolExecutor | None = None
        self._trials: ThreadPoolExecutor | None = None
        self._pending: dict[int, _Pending] = {}
        self._constrained: dict[int, _Constrained] = {}
        self._kept: OrderedDict[ConstraintSpec, _Compilation] = OrderedDict()
        self._kept_bytes = 0

    def begin(self, sequence_id: int, spec: ConstraintSpec, emitted_ids: Iterable[int] = ()) -> None:
        """Start compiling for a new sequence whose answer begins with `emitted_ids`; returns at once.

        The sequence must not sample before `arrived` has named it.
        """
        compilation = self._kept.get(spec) or self._compile(spec)
        self._kept.move_to_end(spec)  # the first of them is the one that was not asked for the longest
        self._pending[sequence_id] = _Pending(compilation, tuple(emitted_ids))

    def arrived(self) -> list[tuple[int, Problem | None]]:
        """The sequences whose grammar has become ready since the last call, or cannot be had, and then why."""
        arrived: list[tuple[int, Problem | None]] = []
        for sequence_id, pending in list(self._pending.items()):
            matcher = self._matcher(pending)
            if matcher is None:
                continue
            del self._pending[sequence_id]
            if isinstance(matcher, Problem):
                arrived.append((sequence_id, matcher))
            else:
                self._constrained[sequence_id] = _Constrained(pending.compilation, matcher)
                arrived.append((sequence_id, None))
        return arrived

    @property
    def compiling(self) -> bool:
        """Whether any sequence still waits for its grammar."""
        return bool(self._pending)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence, whatever its state, and a compilation that was not begun and that only it wanted."""
        self._constrained.pop(sequence_id, None)
        pending = self._pending.pop(sequence_id, None)
        if pending is None or any(other.compilation is pending.compilation for other in self._pending.values()):
            return
        if pending.compilation.outcome.cancel():
            self._forget(pending.compilation)

    def masks(self, slices: Sequence[SequenceSlice]) -> dict[int, TokenMask]:
        """What may come next, for the constrained sequences among the slices that sample."""
        known = self._constrained
        if not known:
            return {}
        asked = (s.sequence_id for s in slices if s.samples and s.sequence_id in known)
        return {sequence_id: known[sequence_id].matcher.mask for sequence_id in asked}

    def settle(self, slices: Sequence[SequenceSlice], computed: Sequence[Computed]) -> Sequence[Computed]:
        """Advance each constrained sequence by what it sampled, and mark in the results who ends by that.

        A grammar that nothing can follow is complete: the sequence ends, ignore_eos or not, and never comes to the
        point where its mask holds the end alone and min_tokens forbids it. One after the other: 32 of them take
        0.4 ms, and with the library's threads 0.8.
        """
        if not self._constrained:
            return computed
        return [self._settled(piece, result) for piece, result in zip(slices, computed, strict=True)]

    def close(self) -> None:
        """Give up the compilations that were not begun, or the process's end would wait for them all."""
        for threads in (self._threads, self._trials):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._source.close()

    def _matcher(self, pending: _Pending) -> Matcher | Problem | None:
        """For a sequence whose grammar is compiled or cannot be had; None while that is open."""
        compilation = pending.compilation
        if not compilation.outcome.done():
            return self._overdue(compilation)
        error = compilation.outcome.exception()
        if error is not None:  # a fault of ours or the library's, and this request's alone: the loop goes on
            self._forget(compilation)
            text = f"compiling failed: {type(error).__name__}: {error}"
            return Problem(reason=ErrorReason.GRAMMAR_BROKEN, message=text)
        start = compilation.outcome.result()
        if isinstance(start, Problem):
            return start
        matcher = start.copy()
        try:
            if matcher.replay(pending.emitted_ids):
                return matcher
        except Refused as refused:
            return self._exhausted(compilation, refused)
        message = "the tokens already emitted do not fit the constraint"
        return Problem(reason=ErrorReason.INVALID_FIELD, message=message, field="token_ids")

    def _settled(self, piece: SequenceSlice, result: Computed) -> Computed:
        constrained = self._constrained.get(piece.sequence_id)
        token_id = result.token_id
        if constrained is None or token_id is None:
            return result
        try:
            verdict = constrained.matcher.accept(token_id)
        except Refused as refused:
            return Computed(problem=self._exhausted(constrained.compilation, refused))
        if verdict is Verdict.REJECTED:
            message = f"token {token_id} does not fit the constraint"
            return Computed(problem=Problem(reason=ErrorReason.GRAMMAR_BROKEN, message=message))
        return dataclasses.replace(result, complete=True) if verdict is Verdict.COMPLETE else result

    def _compile(self, spec: ConstraintSpec) -> _Compilation:
        compilation = _Compilation(spec)
        compilation.outcome = self._threads_for(spec).submit(self._run, compilation)
        self._kept[spec] = compilation
        self._kept_bytes += _size(spec)
        while len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES:
            self._forget(next(iter(self._kept.values())))
        return compilation

    def _threads_for(self, spec: ConstraintSpec) -> ThreadPoolExecutor:
        if needs_trial(spec):
            self._trials = self._trials or ThreadPoolExecutor(1, thread_name_prefix="grammar-trial")
            return self._trials
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        return self._threads

    def _run(self, compilation: _Compilation) -> Matcher | Problem:
        """In a thread of the pool."""
        from headrace.engine.grammar.compiler import compile_grammar

        try:
            vocabulary = self._source.vocabulary()
            if needs_trial(compilation.spec):
                self._source.trial().check(compilation.spec)
            compilation.started_at = self._clock()
            return compile_grammar(compilation.spec, vocabulary)
        except Refused as refused:
            return _refusal(compilation.spec, str(refused))

    def _overdue(self, compilation: _Compilation) -> Problem | None:
        started_at = compilation.started_at
        if started_at is None or self._clock() - started_at <= self._compile_limit_s:
            return None
        return _refusal(compilation.spec, f"takes more than {self._compile_limit_s:g} s to compile")

    def _exhausted(self, compilation: _Compilation, refused: Refused) -> Problem:
        """The end of an answer whose grammar's tables are full. All its answers share them: the next has new ones."""
        self._forget(compilation)
        return _refusal(compilation.spec, f"is too complex to go on: {refused}")

    def _forget(self, compilation: _Compilation) -> None:
        if self._kept.get(compilation.spec) is compilation:
            del self._kept[compilation.spec]
            self._kept_bytes -= _size(compilation.spec)


class _Source:
    """What compiling needs, made when it is first asked for, by whichever thread asks first."""

    def __init__(self, model: Path | None, size: int, eos_ids: frozenset[int], compile_limit_s: float) -> None:
        self._model, self._size, self._eos_ids = model, size, eos_ids
        self._compile_limit_s = compile_limit_s
        self._lock = Lock()
        self._vocabulary: Vocabulary | None = None
        self._trial: Trial | None = None

    def vocabulary(self) -> Vocabulary:
        from headrace.engine.grammar.vocabulary import load_vocabulary

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._model or shipped_model_path(), self._size, self._eos_ids)
            return self._vocabulary

    def close(self) -> None:
        if self._trial is not None:
            self._trial.kill()

    def trial(self) -> Trial:
        """For the one thread of those that need it."""
        if self._trial is None:
            model = self._model or shipped_model_path()
            self._trial = Trial(model, self._size, self._eos_ids, limit_s=self._compile_limit_s)
        return self._trial


def _refusal(spec: ConstraintSpec, why: str) -> Problem:
    name = f"sampling.constraint.{spec.kind.value}"
    return Problem(reason=ErrorReason.INVALID_FIELD, message=f"{name} {why}", field=name)


def _size(spec: ConstraintSpec) -> int:
    return sum(map(len, spec.texts))
