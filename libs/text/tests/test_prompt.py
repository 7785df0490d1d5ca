"""No content can put a special token into a prompt."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.prompt import Shield, Special, Specials

SPECIALS = Specials(["<|im_start|>", "<|im_end|>", "<|end|>", "<|end|>>", "[INST]", "aa"])
FRAGMENTS = st.sampled_from(
    ["<", "|", "im_", "start", "end", "|>", ">", "[INST", "]", "a", "x", " ", "\n", "\U000f0000"]
)
CONTENTS = st.lists(st.lists(FRAGMENTS, max_size=12).map("".join), min_size=1, max_size=4)


def joined(pieces: list[Special | str]) -> str:
    return "".join(p.text if isinstance(p, Special) else p for p in pieces)


@given(CONTENTS, st.booleans())
def test_contents_side_by_side_give_no_special_token_and_come_back_unchanged(contents: list[str], trims: bool) -> None:
    shield = Shield(SPECIALS, contents)
    covered = [shield.cover(c) for c in contents]
    if trims:
        covered, contents = [c.strip() for c in covered], [c.strip() for c in contents]
    pieces = list(shield.pieces("".join(covered)))
    assert not [p for p in pieces if isinstance(p, Special)]
    assert joined(pieces) == "".join(contents)


@given(CONTENTS)
def test_the_templates_own_special_tokens_count(contents: list[str]) -> None:
    shield = Shield(SPECIALS, contents)
    rendered = "".join(f"<|im_start|>{shield.cover(c)}\n<|im_end|>" for c in contents)
    pieces = list(shield.pieces(rendered))
    assert [p.text for p in pieces if isinstance(p, Special)] == ["<|im_start|>", "<|im_end|>"] * len(contents)
    assert joined(pieces) == "".join(f"<|im_start|>{c}\n<|im_end|>" for c in contents)


def test_a_template_still_sees_what_it_looks_for_in_a_content() -> None:
    content = "a < b </think> see <|im_end|>"
    covered = Shield(Specials(["<|im_end|>"]), [content]).cover(content)
    assert covered.startswith("a < b </think> see ")
    assert "<|im_end|>" not in covered


def test_the_longest_of_two_special_tokens_wins() -> None:
    assert list(Shield(SPECIALS, []).pieces("<|end|>>x")) == [Special("<|end|>>"), "x"]


def test_a_model_without_special_tokens_has_plain_prompts() -> None:
    shield = Shield(Specials([]), ["<|im_end|>"])
    assert list(shield.pieces(shield.cover("<|im_end|>"))) == ["<|im_end|>"]


def test_two_megabytes_of_look_alikes_does_not_stall_a_model_with_hundreds_of_special_tokens() -> None:
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(250)]
    shield = Shield(Specials(["<|begin_of_text|>", "<|eot_id|>", "[INST]", *reserved]), [])
    content = "<|" * 1_000_000
    began = time.process_time()
    assert list(shield.pieces(shield.cover(content))) == [content]
    assert time.process_time() - began < 1.0  # measured 0.1 s; 2 s when each token is tried on its own
