"""Constrained answers of the model that ships, at temperature 1, where it says what it likes."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator

import jsonschema
import pytest
import torch

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.finish import Finish, FinishReason
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan
from headrace.engine.worker.assembly import assemble
from headrace.engine.worker.config import WorkerConfig
from headrace.engine.worker.loop import StepLoop
from headrace.engine.worker.messages import Command, LongStep, StepEvent, Submit
from headrace.text.tokenizer import Tokenizer, load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "grün", "blue"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "colours", "home"],
    "additionalProperties": False,
}
SCHEMA = ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=(json.dumps(PERSON),))
REGEX = ConstraintSpec(kind=ConstraintKind.REGEX, texts=(r"[A-Z][a-z]{2,8}, \d{4}",))
CHOICE = ConstraintSpec(kind=ConstraintKind.CHOICE, texts=("yes", "no", "I do not know"))


class _Done(Exception):
    pass


class Desk:
    """Submits everything at once and listens until it has finished."""

    def __init__(self, commands: list[Command]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self._commands = commands
        self._wanted = sum(c.n for c in commands if isinstance(c, Submit))

    def receive(self, wait_s: float, /) -> list[Command]:
        if len(self.finishes) == self._wanted:
            raise _Done
        commands, self._commands = self._commands, []
        if not commands:
            time.sleep(min(wait_s, 0.01))
        return commands

    def send(self, report: StepEvent | LongStep, /) -> None:
        if isinstance(report, LongStep):
            return
        for sequence_id, token in zip(report.sequence_ids, report.token_ids, strict=True):
            self.tokens.setdefault(sequence_id, []).append(token)
        self.finishes |= {finish.sequence_id: finish for finish in report.finishes}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loop() -> StepLoop:
    loop, _ = assemble(WorkerConfig(model=str(shipped_model_path()), kv_cache_memory_bytes=128 << 20))
    torch.set_num_threads(1)  # two spinning threads on busy cores make this ten times as slow
    return loop


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shipped_model_path())


def submit(sequence_id: int, text: str, tokenizer: Tokenizer, constraint: ConstraintSpec | None, n: int = 1) -> Submit:
    plan = SamplingPlan(max_tokens=90, temperature=1.0, seed=sequence_id, constraint=constraint)
    ids = tokenizer.encode(text)
    return Submit(
        sequence_id=sequence_id, token_ids=ids, plan=plan, arrived_at=time.monotonic(), deadline_at=math.inf, n=n
    )


def run(loop: StepLoop, *commands: Command) -> Desk:
    desk = Desk(list(commands))
    with pytest.raises(_Done):
        loop.serve(desk)
    return desk


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_answers_parse_and_validate_whatever_the_load(concurrency: int, loop: StepLoop, tokenizer: Tokenizer) -> None:
    asked = [submit(i, f"Person {i} as JSON:\n", tokenizer, SCHEMA) for i in range(1, concurrency + 1)]
    desk = run(loop, *asked)
    for i, tokens in desk.tokens.items():
        assert desk.finishes[i].reason is FinishReason.STOP, tokenizer.decode(tokens)
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)


def test_constrained_and_free_neighbours_do_not_change_each_other(loop: StepLoop, tokenizer: Tokenizer) -> None:
    asked = [
        submit(1, "Person 7 as JSON:\n", tokenizer, SCHEMA),
        submit(2, "The tallest mountain is", tokenizer, None),
        submit(3, "A month and a year:", tokenizer, REGEX),
        submit(4, "Is water wet? Answer:", tokenizer, CHOICE, n=3),
    ]
    together = run(loop, *asked)
    alone = [run(loop, command) for command in asked]
    assert together.tokens == {i: tokens for desk in alone for i, tokens in desk.tokens.items()}
    assert re.fullmatch(r"[A-Z][a-z]{2,8}, [0-9]{4}", tokenizer.decode(together.tokens[3]))
    assert {tokenizer.decode(together.tokens[i]) for i in (4, 5, 6)} <= set(CHOICE.texts)
