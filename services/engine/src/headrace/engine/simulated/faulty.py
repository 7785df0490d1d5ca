"""A backend that goes wrong on purpose after a number of tokens."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence

from headrace.engine.core.step import Computed, SequenceSlice
from headrace.engine.simulated.fault import Faults
from headrace.engine.worker.backend import Backend, TokenMask


class FaultyBackend:
    """`inner` until `faults` strike; everything else is inner's."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._emitted = 0
        self._frozen_before = False
        self.vocab_size = inner.vocab_size
        self.eos_ids = inner.eos_ids
        self.max_model_len = inner.max_model_len
        self.num_blocks = inner.num_blocks

    def warm_up(self) -> None:
        """Inner's."""
        self._inner.warm_up()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Inner's."""
        self._inner.copy_blocks(pairs)

    def execute(self, slices: Sequence[SequenceSlice], masks: Mapping[int, TokenMask]) -> list[Computed]:
        """Inner's tokens, unless a fault strikes first.

        Death and frost come after the step's time, so that the shell had one step to pass on the last good tokens.
        """
        results = self._inner.execute(slices, masks)
        if _reached(self._faults.die_after_tokens, self._emitted):
            _signal_both(signal.SIGKILL)
        if _reached(self._faults.freeze_after_tokens, self._emitted) and not self._frozen_before:
            self._frozen_before = True  # SIGCONT lets the replica go on
            _signal_both(signal.SIGSTOP)
        return [
            dataclasses.replace(self._spoilt(result), more=tuple(self._spoilt(one) for one in result.more))
            for result in results
        ]

    def _spoilt(self, result: Computed) -> Computed:
        if result.token_id is None:
            return result
        self._emitted += 1
        if _reached(self._faults.garbage_after_tokens, self._emitted - 1):
            return dataclasses.replace(result, token_id=self.vocab_size + result.token_id)
        return result


def _reached(after_tokens: int | None, emitted: int) -> bool:
    return after_tokens is not None and emitted >= after_tokens


def _signal_both(which: signal.Signals) -> None:
    # The shell first: it must not report the worker's end.
    os.kill(os.getppid(), which)
    os.kill(os.getpid(), which)
