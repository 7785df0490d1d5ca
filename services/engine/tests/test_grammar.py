"""Grammars against the real sampler: whatever the logits say, what comes out has the shape that was asked for."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from headrace.bundle.shipped import shipped_model_path
from headrace.engine.core.sampling_plan import ConstraintKind, ConstraintSpec, SamplingPlan
from headrace.engine.core.step import SequenceSlice
from headrace.engine.grammar.compiler import compile_grammar
from headrace.engine.grammar.matcher import Matcher
from headrace.engine.grammar.verdict import Refused, Verdict
from headrace.engine.grammar.vocabulary import Vocabulary, load_vocabulary
from headrace.engine.layers.sampler import Sampler
from headrace.text.tokenizer import Tokenizer, load_tokenizer

EOS = frozenset({2})
PLAN = SamplingPlan(max_tokens=1, temperature=1.0)


def closed(required: Sequence[str] | None = None, **properties: object) -> dict[str, object]:
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 12}
SCHEMAS = {
    "nested": closed(a=closed(b=closed(c={"type": "integer"}, d={"type": "null"})), e={"type": "boolean"}),
    "arrays": closed(a={"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4}),
    "tuple": {"type": "array", "prefixItems": [SHORT, {"type": "integer"}], "items": False, "minItems": 2},
    "enum": {"enum": ["red", "gr\u00fcn", 3, None, {"x": [1]}, 'quo"te\n']},
    "numbers": closed(
        i={"type": "integer", "minimum": -5, "maximum": 120},
        n={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        m={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    ),
    "strings": closed(s=SHORT, e={"type": "string", "minLength": 3, "maxLength": 9}),
    "pattern": closed(zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}),
    "formats": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "optional": closed(["b"], a=SHORT, b={"type": "integer"}, c={"type": "boolean"}),
    "anyOf": {"anyOf": [{"type": "integer"}, closed(x=SHORT), {"type": "array", "items": SHORT, "maxItems": 2}]},
    "allOf": {"allOf": [closed(a=SHORT, b=SHORT), {"required": ["a"]}]},
    "ref": {
        "$defs": {"node": closed(v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
        "$ref": "#/$defs/node",
    },
    "tagged union": {
        "$defs": {"Cat": closed(kind={"const": "cat"}, lives={"type": "integer"})},
        "oneOf": [{"$ref": "#/$defs/Cat"}, closed(kind={"enum": ["dog", "wolf"]}, name=SHORT)],
    },
    "open object": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "const": {"const": {"a": [1, 2, "\u00fc\n\u2028😀"]}},
    "anything": {},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(shipped_model_path())


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return load_vocabulary(shipped_model_path(), tokenizer.vocab_size, EOS)


def schema(value: object) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=(json.dumps(value),))


def regex(text: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.REGEX, texts=(text,))


def choice(*texts: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.CHOICE, texts=texts)


class Chatter:
    """Random logits, the same for the same seed; single characters are likely, those that end something most."""

    def __init__(self, tokenizer: Tokenizer, size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._sampler = Sampler(EOS)
        lengths = np.array([len(tokenizer.token_bytes[i]) for i in range(size)])
        self._liking = np.where(lengths <= 1, 9.0, 0.0)
        self._liking[[2, *(i for i in range(size) if tokenizer.token_bytes[i] in (b'"', b"]", b"}"))]] = 13.0

    def token(self, matcher: Matcher, known: Sequence[int]) -> int:
        logits = (self._random.normal(size=len(self._liking)) * 2 + self._liking).astype(np.float32)
        piece = SequenceSlice(
            sequence_id=1, token_ids=[5], start=len(known), block_table=[0], samples=True, plan=PLAN,
            known_token_ids=[5, *known], prompt_length=1,
        )  # fmt: skip
        (result,) = self._sampler.sample(torch.from_numpy(logits)[None], [piece], {1: matcher.mask})
        assert result.token_id is not None
        return result.token_id

    def finish(self, matcher: Matcher, most: int = 400) -> list[int]:
        """Tokens until nothing may follow."""
        tokens: list[int] = []
        verdict = Verdict.OPEN
        while verdict is Verdict.OPEN and len(tokens) < most:
            tokens.append(self.token(matcher, tokens))
            verdict = matcher.accept(tokens[-1])
        assert verdict is Verdict.COMPLETE, len(tokens)
        return tokens


def check(text: str, wanted: object) -> None:
    value = json.loads(text)
    jsonschema.validate(value, wanted, cls=jsonschema.Draft202012Validator)
    assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), "white space between tokens"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_sampled_answer_parses_and_validates(name: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    start = compile_grammar(schema(SCHEMAS[name]), vocabulary)
    for seed in range(6):
        tokens = Chatter(tokenizer, vocabulary.size, seed).finish(start.copy())
        check(tokenizer.decode(tokens), SCHEMAS[name])


@pytest.mark.parametrize(
    "text",
    [
        "[0-9]{3}-[a-z]{4}",
        r"(\d{1,3}\.){3}\d{1,3}",
        "(yes|no|perhaps)!?",
        "^anchored$",
        "(?i)hello",
        "[äöü]{2,5}/",
        "a\nb",
    ],
)
def test_every_sampled_answer_matches_the_regular_expression(
    text: str, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    start = compile_grammar(regex(text), vocabulary)
    for seed in range(6):
        assert re.fullmatch(text, tokenizer.decode(Chatter(tokenizer, vocabulary.size, seed).finish(start.copy())))


@pytest.mark.parametrize(
    "texts",
    [
        ("yes", "no"),
        ("foo", "foobar", "foob"),
        (" lead", "trail "),
        ('a\nb"c\\d/é😀', "\x00\x7f"),
        ("/a/", "${x}", "a|b", ".*"),
    ],
)
def test_every_sampled_answer_is_one_of_the_choices(
    texts: tuple[str, ...], tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    start = compile_grammar(choice(*texts), vocabulary)
    seen = {tokenizer.decode(Chatter(tokenizer, vocabulary.size, seed).finish(start.copy())) for seed in range(30)}
    assert seen <= set(texts)
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["nested", "strings", "numbers", "tagged union"])
def test_a_truncated_answer_is_the_beginning_of_a_valid_one(
    name: str, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    start = compile_grammar(schema(SCHEMAS[name]), vocabulary)
    tokens = Chatter(tokenizer, vocabulary.size, 1).finish(start.copy())
    for cut in range(len(tokens)):
        matcher = start.copy()
        assert matcher.replay(tokens[:cut])
        rest = Chatter(tokenizer, vocabulary.size, 100 + cut).finish(matcher)
        check(tokenizer.decode([*tokens[:cut], *rest]), SCHEMAS[name])


@pytest.mark.parametrize("spec", [schema(SCHEMAS["ref"]), schema(SCHEMAS["strings"]), regex("[a-f]+(-[0-9]+)*!")])
def test_the_state_is_a_function_of_the_tokens(
    spec: ConstraintSpec, tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    start = compile_grammar(spec, vocabulary)
    tokens = Chatter(tokenizer, vocabulary.size, 3).finish(start.copy())
    stepped = start.copy()
    for done, token in enumerate(tokens):
        replayed = start.copy()
        assert replayed.replay(tokens[:done])
        assert (replayed.mask == stepped.mask).all()
        copied = stepped.copy()
        stepped.accept(token)
        assert (copied.mask == replayed.mask).all(), "an answer moved its copy"
    assert (stepped.mask == vocabulary.eos).all()


def test_a_taken_mask_does_not_change(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    matcher = compile_grammar(schema(SCHEMAS["strings"]), vocabulary).copy()
    taken = matcher.mask
    before = taken.copy()
    Chatter(tokenizer, vocabulary.size, 0).finish(matcher)
    assert (taken == before).all()


def test_an_answer_that_may_go_on_may_also_end(vocabulary: Vocabulary) -> None:
    matcher = compile_grammar(regex("a+"), vocabulary).copy()
    assert not matcher.mask[0] >> 2 & 1, "nothing is no answer"
    (letter,) = np.flatnonzero([vocabulary.trie.decode_str([i]) == "a" for i in range(100)])
    assert matcher.accept(int(letter)) is Verdict.OPEN
    assert matcher.mask[0] >> 2 & 1
    assert matcher.accept(2) is Verdict.COMPLETE


def test_tokens_that_do_not_fit_are_rejected(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    start = compile_grammar(schema(SCHEMAS["nested"]), vocabulary)
    (no,) = tokenizer.encode(" no")
    for token in (no, 2, 0, -1, vocabulary.size, 1 << 40):
        assert start.copy().accept(token) is Verdict.REJECTED
        assert not start.copy().replay([token])


def test_special_and_unknown_ids_are_never_allowed(tokenizer: Tokenizer) -> None:
    padded = load_vocabulary(shipped_model_path(), tokenizer.vocab_size + 64, frozenset({0, 2}))
    start = compile_grammar(regex(r"(.|\n)*"), padded)
    allowed = np.unpackbits(start.mask.view(np.uint8), bitorder="little").nonzero()[0]
    assert {i for i in allowed.tolist() if not tokenizer.token_bytes[i]} == {0, 2}
    assert len(allowed) > 40_000


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=("{",)), "is not JSON"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"minimum": NaN}',)), "is not JSON"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=("9" * 5000,)), "is not JSON"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"items":' * 9000 + "1" + "}" * 9000,)), "100 levels"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"items":' * 120 + "1" + "}" * 120,)), "100 levels"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"enum": ["\\ud800"]}',)), ""),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, texts=('{"enum": ["\ud800"]}',)), "is not valid Unicode"),
        (schema([1]), "must be a JSON object"),
        (schema(False), "must be a JSON object"),
        (schema({"type": "banana"}), "banana"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema({"oneOf": [closed(k={"const": "a"}), closed(k={"enum": ["a", "b"]})]}), "oneOf"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"$ref": "http://example.com/schema.json"}), "example.com"),
        (schema({"$ref": "#"}), "no answer fits it"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (schema({"type": "string", "pattern": "^(?=a)b$"}), "look-around"),
        (schema({"allOf": [{"anyOf": [closed(**{f"a{i}_{j}": {}}) for j in range(3)]} for i in range(30)]}), ""),
        (schema({"type": "integer", "multipleOf": 10**9 + 7}), "fuel"),
        (regex("["), "unclosed character class"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("a$b"), ""),
        (regex("\ud800"), "is not valid Unicode"),
    ],
)  # fmt: skip
def test_a_constraint_that_cannot_be_had_is_refused_in_one_line(
    spec: ConstraintSpec, why: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(Refused) as refused:
        compile_grammar(spec, vocabulary)
    reason = str(refused.value)
    assert why in reason
    assert "\n" not in reason
    assert 0 < len(reason.encode()) <= 1200


@pytest.mark.parametrize(
    "text", ["(a*)*b", "(a|aa)+", "(x+x+)+y", "((a{1,1000}){1,1000}){1,1000}", "(.*a.*b.*c.*d){20}", "([ab]*a[ab]{40})"]
)
def test_a_catastrophic_regular_expression_costs_no_more_than_another(text: str, vocabulary: Vocabulary) -> None:
    matcher = compile_grammar(regex(text), vocabulary).copy()
    # The test's time limit is the assertion: a backtracking matcher would never return. Giving up is no harm.
    with contextlib.suppress(Refused):
        for _ in range(50):
            allowed = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little").nonzero()[0]
            if matcher.accept(int(allowed[-1])) is not Verdict.OPEN:
                break


def test_a_schema_that_explodes_later_is_refused_then(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    endless = {"$defs": {"n": closed(next={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}
    matcher = compile_grammar(schema(endless), vocabulary).copy()
    with pytest.raises(Refused, match=r"[Tt]oo many|no answer"):
        Chatter(tokenizer, vocabulary.size, 0).finish(matcher, most=10_000)


def test_options_of_the_library_inside_a_schema_change_nothing(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    wanted = SCHEMAS["arrays"] | {
        "x-guidance": {
            "whitespace_flexible": True,
            "whitespace_pattern": r"\s+",
            "item_separator": " ; ",
            "lenient": True,
        }
    }
    start = compile_grammar(schema(wanted), vocabulary)
    check(tokenizer.decode(Chatter(tokenizer, vocabulary.size, 0).finish(start.copy())), wanted)
    with pytest.raises(Refused, match="not"):
        compile_grammar(schema({"not": {}, "x-guidance": {"lenient": True}}), vocabulary)


def test_a_forced_text_is_written_in_the_models_own_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    text = "The quick brown fox jumps over 12 lazy dogs."
    tokens = Chatter(tokenizer, vocabulary.size, 0).finish(compile_grammar(choice(text), vocabulary).copy())
    assert tokens == tokenizer.encode(text)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A tokenizer of the other family: "▁" for a space, one in front of every text, bytes for what it does not know."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *map(chr, range(0x21, 0x7F)),
        '{"',
        '":',
    ]
    backend = Backend(
        BPE({p: i for i, p in enumerate(pieces)}, [("{", '"'), ('"', ":")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return tmp_path


def test_a_tokenizer_that_puts_a_space_in_front_of_texts_is_no_hindrance(sentencepiece: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece)
    vocabulary = load_vocabulary(sentencepiece, tokenizer.vocab_size, EOS)
    wanted = closed(name=SHORT, word={"enum": ["two words", "ünï"]})
    start = compile_grammar(schema(wanted), vocabulary)
    for seed in range(6):
        check(tokenizer.decode(Chatter(tokenizer, vocabulary.size, seed).finish(start.copy())), wanted)
