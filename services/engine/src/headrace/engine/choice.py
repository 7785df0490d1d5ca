"""One of the n answers of a Generate call: its text, its end, its times."""

from __future__ import annotations

import time

from headrace.api.common.v1 import answer_pb2
from headrace.api.common.v1.sampling_pb2 import SamplingParams
from headrace.engine.core.finish import Finish, FinishReason
from headrace.text.answer import AnswerText
from headrace.text.tokenizer import Tokenizer


class Choice:
    """Answer `index` as it grows; `stopped` once a stop text has come, of which the sequence itself knows nothing."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.index = index
        self.stopped = False
        self.finish: Finish | None = None
        self._text = AnswerText(tokenizer, sampling.stop, min_tokens=sampling.min_tokens)
        self._started_at = time.monotonic()
        self._arrived_at: list[float] = []

    @property
    def tokens(self) -> int:
        """How many it has."""
        return len(self._arrived_at)

    def push(self, token_id: int) -> str:
        """Add a token; the text it brings."""
        self._arrived_at.append(time.monotonic())
        piece = self._text.push(token_id)
        self.stopped = piece.stopped
        return piece.text

    def end(self, finish: Finish) -> str:
        """Take the sequence's end; the text held back until now."""
        self.finish = finish
        return "" if self.stopped else self._text.finish()

    def message(self) -> answer_pb2.ChoiceEnd:
        """How it ended."""
        assert self.finish is not None
        reason = FinishReason.STOP if self.stopped else self.finish.reason
        return answer_pb2.ChoiceEnd(
            index=self.index,
            finish_reason=answer_pb2.FinishReason.Value(f"FINISH_REASON_{reason.value}"),
            completion_tokens=self.tokens,
        )

    def timings(self) -> answer_pb2.Timings:
        """Where its time went."""
        assert self.finish is not None
        now = time.monotonic()
        first = self._arrived_at[0] if self._arrived_at else now
        gaps = zip(self._arrived_at, self._arrived_at[1:], strict=False)
        return answer_pb2.Timings(
            queue_ms=self.finish.queue_ms,
            prefill_ms=self.finish.prefill_ms,
            first_token_ms=(first - self._started_at) * 1000,
            inter_token_ms=[(later - earlier) * 1000 for earlier, later in gaps],
            total_ms=(now - self._started_at) * 1000,
        )
