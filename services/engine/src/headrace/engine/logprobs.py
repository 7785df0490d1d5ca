"""Log-probabilities on the wire."""

from __future__ import annotations

from headrace.api.common.v1.answer_pb2 import TokenLogprob, TokenLogprobs
from headrace.engine.core.likelihood import Likelihood, Logprobs


def logprobs_message(logprobs: Logprobs) -> TokenLogprobs:
    """One position's, as a message."""
    return TokenLogprobs(token=_one(logprobs.token), top=[_one(likelihood) for likelihood in logprobs.top])


def _one(likelihood: Likelihood) -> TokenLogprob:
    return TokenLogprob(token_id=likelihood.token_id, logprob=likelihood.logprob, rank=likelihood.rank)
