"""Constrained answers in the step loop: compiled beside it, mixed with others, cut, preempted, moved and aborted."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jsonschema
import pytest

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.finish import ErrorReason, Finish, FinishReason, Problem
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan
from headrace.engine.grammar import compiler
from headrace.engine.worker.assembly import assemble
from headrace.engine.worker.config import BackendName, WorkerConfig
from headrace.engine.worker.grammar import Grammars
from headrace.engine.worker.loop import StepLoop
from headrace.engine.worker.messages import Abort, Command, LongStep, StepEvent, Submit
from headrace.text.tokenizer import Tokenizer, load_tokenizer

BLOCK_BYTES = 46_080 * 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ç"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema(value: object) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=(json.dumps(value),))


def choice(*texts: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.CHOICE, texts=texts)


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.REGEX, texts=(text,))


def plan(constraint: ConstraintSpec | None, **changes: object) -> SamplingPlan:
    values: dict[str, object] = {"max_tokens": 150, "temperature": 1.0, "constraint": constraint}
    return SamplingPlan(**(values | changes))  # type: ignore[arg-type]


def config(**changes: object) -> WorkerConfig:
    values: dict[str, object] = {
        "backend": BackendName.SIMULATED,
        "simulate_step_ms": 0.0,
        "simulate_itl_ms": 0.0,
        "simulate_prefill_tokens_per_s": 1e9,
    }
    return WorkerConfig(**(values | changes))  # type: ignore[arg-type]


class _Done(Exception):
    pass


class Desk:
    """The shell's end of a loop in this thread."""

    def __init__(self, loop: StepLoop) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.preemptions = 0
        self._loop = loop
        self._commands: list[Command] = []
        self._until: Callable[[], bool] = lambda: True

    def submit(self, sequence_id: int, prompt: Sequence[int], plan: SamplingPlan, **more: int) -> None:
        now = time.monotonic()
        command = Submit(
            sequence_id=sequence_id, token_ids=list(prompt), plan=plan, arrived_at=now, deadline_at=math.inf, **more
        )
        self._commands.append(command)
        for answer in range(sequence_id, sequence_id + command.n):
            self.tokens[answer] = []

    def abort(self, sequence_id: int) -> None:
        self._commands.append(Abort(sequence_id=sequence_id))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Let the loop work until every sequence has finished, or `until` is true."""
        self._until = until or (lambda: self.finishes.keys() == self.tokens.keys())
        with pytest.raises(_Done):
            self._loop.serve(self)

    def receive(self, wait_s: float, /) -> list[Command]:
        commands, self._commands = self._commands, []
        if not commands and self._until():
            raise _Done
        if not commands and wait_s:
            time.sleep(min(wait_s, 0.01))
        return commands

    def send(self, report: StepEvent | LongStep, /) -> None:
        if isinstance(report, LongStep):
            return
        self.preemptions += report.preemptions
        for sequence_id, token in zip(report.sequence_ids, report.token_ids, strict=True):
            self.tokens[sequence_id].append(token)
        for finish in report.finishes:
            assert finish.sequence_id not in self.finishes
            self.finishes[finish.sequence_id] = finish


def desk(**changes: object) -> Desk:
    loop, _ = assemble(config(**changes))
    return Desk(loop)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shipped_model_path())


def prompt(seed: int, length: int = 40) -> list[int]:
    return [100 + (seed * 7919 + i * 31) % 5000 for i in range(length)]


@functools.cache
def roomy() -> Desk:
    """An engine for answers that are computed alone; what an engine has said before changes nothing."""
    return desk(enable_prefix_caching=False)


def answer(sequence: Sequence[int], sampling: SamplingPlan, emitted_tokens: int = 0) -> list[int]:
    """Alone, in a roomy engine."""
    engine = roomy()
    sequence_id = len(engine.tokens) + 1
    engine.submit(sequence_id, sequence, sampling, emitted_tokens=emitted_tokens)
    engine.run()
    return engine.tokens[sequence_id]


def check_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_every_answer_parses_whatever_the_load(concurrency: int, tokenizer: Tokenizer) -> None:
    engine = desk()
    for i in range(1, concurrency + 1):
        engine.submit(i, prompt(i), plan(schema(PERSON), seed=i))
    engine.run()
    for i in range(1, concurrency + 1):
        assert engine.finishes[i].reason is FinishReason.STOP, engine.finishes[i]
        check_person(tokenizer.decode(engine.tokens[i]))


MIXED = {
    1: plan(schema(PERSON), seed=1),
    2: plan(None, seed=2, max_tokens=40),
    3: plan(regex("[a-z]{4,9}-[0-9]{3}"), seed=3),
    4: plan(choice("red", "green", "greenish"), seed=4),
    5: plan(schema(PERSON), seed=5, temperature=0.0),
    6: plan(None, seed=6, temperature=0.0, max_tokens=60),
    7: plan(schema({"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}), seed=7),
    8: plan(schema(PERSON), seed=8, max_tokens=9),
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 13 * BLOCK_BYTES},
        {"kv_cache_memory_bytes": 13 * BLOCK_BYTES, "max_num_batched_tokens": 72},
    ],
)
def test_chunks_preemption_and_neighbours_change_no_token(changes: dict[str, object]) -> None:
    engine = desk(**changes)
    for i, sampling in MIXED.items():  # compiles everything, so that afterwards all begin at once
        engine.submit(100 + i, prompt(100 + i), sampling)
    engine.run()
    engine.tokens.clear()
    engine.finishes.clear()
    engine.preemptions = 0
    for i, sampling in MIXED.items():
        engine.submit(i, prompt(i), sampling)
    engine.run()
    assert engine.tokens == {i: answer(prompt(i), sampling) for i, sampling in MIXED.items()}
    if "kv_cache_memory_bytes" in changes:
        assert engine.preemptions > 0


def test_several_answers_to_one_prompt_each_follow_the_grammar_on_their_own(tokenizer: Tokenizer) -> None:
    engine = desk()
    engine.submit(1, prompt(1), plan(schema(PERSON), seed=10), n=3)
    engine.run()
    answers = [tokenizer.decode(engine.tokens[i]) for i in (1, 2, 3)]
    assert len(set(answers)) == 3
    for i, text in enumerate(answers):
        check_person(text)
        assert engine.tokens[1 + i] == answer(prompt(1), plan(schema(PERSON), seed=10 + i))


def test_a_moved_answer_goes_on_as_if_it_had_never_been_moved() -> None:
    sampling = plan(schema(PERSON), seed=3)
    whole = answer(prompt(3), sampling)
    for emitted in range(1, len(whole)):
        rest = answer([*prompt(3), *whole[:emitted]], sampling, emitted_tokens=emitted)
        assert rest == whole[emitted:]


def test_an_answer_moved_after_its_last_token_only_ends(tokenizer: Tokenizer) -> None:
    whole = answer(prompt(3), plan(schema(PERSON), seed=3))
    engine = desk()
    engine.submit(1, [*prompt(3), *whole], plan(schema(PERSON), seed=3), emitted_tokens=len(whole))
    engine.run()
    assert tokenizer.decode(engine.tokens[1]) == ""
    assert engine.finishes[1].reason is FinishReason.STOP


def test_tokens_moved_along_that_do_not_fit_are_refused() -> None:
    engine = desk()
    engine.submit(1, [*prompt(1), 338], plan(schema(PERSON)), emitted_tokens=1)
    engine.run()
    problem = engine.finishes[1].problem
    assert problem is not None
    assert (problem.reason, problem.field) == (ErrorReason.INVALID_FIELD, "token_ids")


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_complete_answer_ends_whatever_else_was_asked(
    ignore_eos: bool, min_tokens: int, tokenizer: Tokenizer
) -> None:
    engine = desk()
    sampling = plan(choice("yes", "no"), ignore_eos=ignore_eos, min_tokens=min_tokens)
    engine.submit(1, prompt(1), sampling)
    engine.run()
    assert engine.finishes[1].reason is FinishReason.STOP
    assert tokenizer.decode(engine.tokens[1]) in ("yes", "no")


def test_the_end_is_an_answer_of_its_own_even_with_ignore_eos(tokenizer: Tokenizer) -> None:
    engine = desk()
    for i in range(8):
        engine.submit(i, prompt(i), plan(regex("[ab]+"), seed=i, ignore_eos=True))
    engine.run()
    for i in range(8):
        assert engine.finishes[i].reason is FinishReason.STOP
        assert engine.tokens[i][-1] == 2
        assert set(tokenizer.decode(engine.tokens[i])) <= {"a", "b"}


def test_an_answer_cut_by_max_tokens_is_the_beginning_of_the_longer_one() -> None:
    sampling = plan(schema(PERSON), seed=5)
    whole = answer(prompt(5), sampling)
    engine = desk()
    for most in (1, 2, len(whole) - 1, len(whole)):
        engine.submit(most, prompt(5), plan(schema(PERSON), seed=5, max_tokens=most))
    engine.run()
    for most, tokens in engine.tokens.items():
        assert tokens == whole[:most]
        ended = FinishReason.STOP if most == len(whole) else FinishReason.LENGTH
        assert engine.finishes[most].reason is ended


BAD = [
    ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=("{",)),
    schema({"type": "banana"}),
    schema({"not": {}}),
    schema({"description": "x" * (300 << 10)}),
    ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"items":' * 5000 + "1" + "}" * 5000,)),
    regex("["),
    regex("(?<!a)b"),
    choice("\ud800"),
]


def test_a_bad_constraint_is_that_requests_error_and_the_next_one_is_answered(tokenizer: Tokenizer) -> None:
    engine = desk()
    for i, constraint in enumerate(BAD):
        field = f"sampling.constraint.{constraint.kind.value}"
        first = 10 * i
        engine.submit(first, prompt(1), plan(constraint))
        engine.submit(first + 1, prompt(2), plan(constraint), n=2)
        engine.submit(first + 3, prompt(3), plan(schema(PERSON)))
        engine.run()
        for bad in (first, first + 1, first + 2):
            finish = engine.finishes[bad]
            assert finish.reason is FinishReason.ERROR
            assert finish.problem is not None
            assert finish.problem.reason is ErrorReason.INVALID_FIELD
            assert finish.problem.field == field
            assert finish.problem.message.startswith(f"{field} ")
            assert "\n" not in finish.problem.message
            assert not engine.tokens[bad]
        check_person(tokenizer.decode(engine.tokens[first + 3]))


def test_a_schema_that_explodes_while_it_is_followed_ends_only_its_own_answer() -> None:
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    engine = desk()
    engine.submit(1, prompt(1), plan(schema({"$defs": {"n": node}, "$ref": "#/$defs/n"}), max_tokens=4000))
    engine.submit(2, prompt(2), MIXED[6])
    engine.run()
    problem = engine.finishes[1].problem
    assert problem is not None
    assert (problem.reason, problem.field) == (ErrorReason.INVALID_FIELD, "sampling.constraint.json_schema")
    assert engine.tokens[2] == answer(prompt(2), MIXED[6])


def test_tokens_that_nothing_but_the_grammar_allows_are_an_error_of_the_request() -> None:
    engine = desk()
    engine.submit(1, prompt(1), plan(choice("yes"), allowed_token_ids=(338, 351)))
    engine.run()
    problem = engine.finishes[1].problem
    assert problem is not None
    assert problem.reason is ErrorReason.NO_TOKEN_ALLOWED


def test_a_token_that_the_grammar_forbids_ends_the_answer_with_an_error() -> None:
    engine = desk(fault="garbage_after_tokens=3")
    engine.submit(1, prompt(1), plan(schema(PERSON)))
    engine.run()
    assert len(engine.tokens[1]) == 3
    problem = engine.finishes[1].problem
    assert problem is not None
    assert problem.reason is ErrorReason.GRAMMAR_BROKEN


class Gate:
    """Compiling that waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: ConstraintSpec) -> None:
        self.open = threading.Event()
        self.compiled: list[ConstraintSpec] = []
        self._slow = {slow}
        real = compiler.compile_grammar

        def gated(spec: ConstraintSpec, vocabulary: object) -> object:
            self.compiled.append(spec)
            if spec in self._slow:
                assert self.open.wait(30)
            return real(spec, vocabulary)  # type: ignore[arg-type]

        monkeypatch.setattr(compiler, "compile_grammar", gated)

    def block(self, spec: ConstraintSpec) -> None:
        """This one, too."""
        self._slow.add(spec)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, choice("slow"))
    yield gate
    gate.open.set()


def test_a_slow_compilation_holds_up_nobody_else(gate: Gate, tokenizer: Tokenizer) -> None:
    engine = desk()
    engine.submit(1, prompt(1), plan(choice("slow")))
    engine.submit(2, prompt(2), plan(None, max_tokens=60))
    engine.submit(3, prompt(3), plan(schema(PERSON)))
    engine.run(until=lambda: engine.finishes.keys() >= {2, 3})
    assert len(engine.tokens[2]) == 60
    check_person(tokenizer.decode(engine.tokens[3]))
    assert not engine.tokens[1]
    gate.open.set()
    engine.run()
    assert tokenizer.decode(engine.tokens[1]) == "slow"


def test_a_request_aborted_while_its_grammar_is_compiled_is_gone(gate: Gate) -> None:
    engine = desk()
    engine.submit(1, prompt(1), plan(choice("slow")))
    engine.run(until=lambda: bool(gate.compiled))
    engine.abort(1)
    engine.run()
    assert engine.finishes[1].reason is FinishReason.CANCELLED
    gate.open.set()
    engine.submit(2, prompt(2), plan(choice("slow")))
    engine.run()
    assert engine.finishes[2].reason is FinishReason.STOP


def test_what_only_an_aborted_request_wanted_is_not_compiled(gate: Gate) -> None:
    engine = desk()
    engine.submit(1, prompt(1), plan(choice("slow")))
    engine.submit(2, prompt(2), plan(choice("slow")))
    engine.run(until=lambda: bool(gate.compiled))
    gate.block(choice("slow too"))
    engine.submit(3, prompt(3), plan(choice("slow too")))
    engine.run(until=lambda: len(gate.compiled) == 2)  # both threads are taken
    engine.submit(4, prompt(4), plan(choice("unwanted")))
    engine.submit(5, prompt(5), plan(choice("wanted")))
    engine.submit(6, prompt(6), plan(choice("wanted")))
    engine.run(until=lambda: True)
    engine.abort(4)
    engine.abort(5)
    engine.run(until=lambda: engine.finishes.keys() == {4, 5})
    gate.open.set()
    engine.run()
    assert gate.compiled == [choice("slow"), choice("slow too"), choice("wanted")]
    assert engine.finishes[6].reason is FinishReason.STOP


def test_a_closed_loop_begins_no_more_compilations(gate: Gate) -> None:
    before = set(threading.enumerate())
    grammars = Grammars(None, vocab_size=49_152, eos_ids=frozenset({2}))
    gate.block(choice("slow too"))
    for i, text in enumerate(("slow", "slow too", "never", "at all")):
        grammars.begin(i, choice(text))
    while len(gate.compiled) < 2:
        time.sleep(0.001)
    grammars.close()
    gate.open.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(gate.compiled) == 2


def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(gate: Gate) -> None:
    engine = desk()
    for i in range(1, 6):
        engine.submit(i, prompt(i), plan(schema(PERSON), seed=i))
    engine.submit(6, prompt(6), plan(schema(PERSON)), n=3)
    engine.run()
    assert gate.compiled == [schema(PERSON)]


def test_grammars_that_nobody_asked_for_in_a_while_are_forgotten(gate: Gate) -> None:
    engine = desk()
    for i in range(1, 101):
        engine.submit(i, prompt(i), plan(choice(f"answer {i}")))
    engine.run()
    engine.submit(101, prompt(1), plan(choice("answer 1")))
    engine.submit(102, prompt(1), plan(choice("answer 100")))
    engine.run()
    assert len(gate.compiled) == 101
    assert gate.compiled[-1] == choice("answer 1")


def test_compiling_longer_than_the_limit_is_the_requests_error(gate: Gate) -> None:
    now = [0.0]
    grammars = Grammars(None, vocab_size=49_152, eos_ids=frozenset({2}), clock=lambda: now[0])
    grammars.begin(1, choice("slow"))
    while not gate.compiled:
        time.sleep(0.001)
    now[0] = 4.9
    assert grammars.arrived() == []
    now[0] = 5.1
    ((sequence_id, problem),) = grammars.arrived()
    assert sequence_id == 1
    assert problem is not None
    assert problem.field == "sampling.constraint.choice"
    assert "5 s" in problem.message
    assert not grammars.compiling


EXPLODING = {
    "time": schema({"allOf": [{"type": "string", "pattern": f"a{i}.*z{i}"} for i in range(60)]}),
    "memory": schema(
        {"type": "object", "properties": {f"f{i}": {"type": "integer", "multipleOf": 99_000 + i} for i in range(64)}}
    ),
}


@pytest.mark.parametrize("what", EXPLODING)
def test_a_schema_that_explodes_while_it_is_compiled_costs_its_request_only(what: str, tokenizer: Tokenizer) -> None:
    grammars = Grammars(None, vocab_size=49_152, eos_ids=frozenset({2}), compile_limit_s=1.0)
    grammars.begin(1, EXPLODING[what])
    grammars.begin(2, schema({"type": "integer", "multipleOf": 3}))
    grammars.begin(3, schema(PERSON))
    arrived: dict[int, Problem | None] = {}
    while len(arrived) < 3:
        arrived |= dict(grammars.arrived())
        time.sleep(0.001)
    assert list(arrived) == [3, 1, 2], "those that need no trial wait for none"
    assert arrived[2] is None
    assert arrived[3] is None
    problem = arrived[1]
    assert problem is not None
    assert problem.field == "sampling.constraint.json_schema"
    assert "to compile" in problem.message
    grammars.close()


def test_a_large_harmless_schema_passes_its_trial(tokenizer: Tokenizer) -> None:
    formats = {f"f{i}": {"type": "string", "format": "date"} for i in range(12)}
    wanted = {"type": "object", "properties": formats, "required": list(formats), "additionalProperties": False}
    loop, _ = assemble(config())
    engine = Desk(loop)
    engine.submit(1, prompt(1), plan(schema(wanted), max_tokens=1000))
    engine.run()
    loop.close()
    jsonschema.validate(json.loads(tokenizer.decode(engine.tokens[1])), wanted)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt("panic")])
def test_a_compiler_that_breaks_breaks_one_request(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler.compile_grammar

    def broken(spec: ConstraintSpec, vocabulary: object) -> object:
        if spec == choice("broken"):
            raise error
        return real(spec, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "compile_grammar", broken)
    engine = desk()
    engine.submit(1, prompt(1), plan(choice("broken")))
    engine.submit(2, prompt(2), plan(choice("fine")))
    engine.run()
    assert engine.finishes[2].reason is FinishReason.STOP
    problem = engine.finishes[1].problem
    assert problem is not None
    assert problem.reason is ErrorReason.GRAMMAR_BROKEN


def test_an_engine_without_a_tokenizer_serves_everything_but_constraints() -> None:
    engine = desk(model="/nonexistent/model.gguf")
    engine.submit(1, prompt(1), plan(schema(PERSON)))
    engine.submit(2, prompt(2), MIXED[2])
    engine.run()
    problem = engine.finishes[1].problem
    assert problem is not None
    assert problem.reason is ErrorReason.GRAMMAR_BROKEN
    assert "/nonexistent/model.gguf" in problem.message
    assert engine.finishes[2].reason is FinishReason.LENGTH
