"""Several answers to one request: their indices, their ends, their failures, each by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.base.errors import DeadlinePassed, Exhausted, InvalidRequest, StreamBroken, Unavailable

EOS = 256


def said(seed: int) -> str:
    """What any engine answers under this seed."""
    return f"Seed {seed} turns the wheel {'slowly' if seed % 2 else 'evenly and well'}."


def tokens_of(submit: Any) -> dict[int, list[int]]:
    """What the slots of a submission have yet to say."""
    sampling = submit.sampling
    return {
        submit.slot + i: [*said(sampling.seed + i).encode(), EOS][submit.emitted_tokens :][: sampling.max_tokens]
        for i in range(max(1, sampling.n))
    }


def played(*, only: dict[int, int] | None = None, then: Any = None) -> Any:
    """All answers of a submission, a token each per step; `only` limits those of its i-th, `then` ends the play."""

    async def script(engine: Any, stream: Any, submit: Any) -> None:
        rest = tokens_of(submit)
        allowed = {submit.slot + i: n for i, n in (only or {}).items()}
        sent = dict.fromkeys(rest, 0)
        while True:
            live = [s for s in rest if sent[s] < min(len(rest[s]), allowed.get(s, 10**6)) and s not in engine.cancels]
            if not live:
                break
            step = {slot: rest[slot][sent[slot]] for slot in live}
            for slot in live:
                sent[slot] += 1
            ended = [s for s in live if sent[s] == len(rest[s])]
            reason = {s: "STOP" if rest[s][-1] == EOS else "LENGTH" for s in ended}
            stream.step(step, *(stream.finish(s, reason[s]) for s in ended))
            await asyncio.sleep(0)
        if then is not None:
            then(stream, submit)

    return script


def fails(index: int, reason: str = "INTERNAL", **fields: str) -> Any:
    def end(stream: Any, submit: Any) -> None:
        stream.step({}, stream.finish(submit.slot + index, "ERROR", error_reason=reason, **fields))

    return end


def break_off(stream: Any, submit: Any) -> None:
    stream.break_off()


async def test_three_answers_have_three_indices_and_all_finish(world: Any, eventually: Any, gauges: Any) -> None:
    """vllm#16863: one index per answer, none overwritten; the prompt is placed, submitted and counted once."""
    engine = await world.engine("e-1", played())
    client = await world.gateway()

    heard = await client.generate("Say it.", n=3, seed=10, temperature=1.0, max_tokens=100)

    assert heard.texts == {i: said(10 + i) for i in range(3)}
    assert heard.ends == [(i, "STOP", len(said(10 + i)) + 1) for i in range(3)]
    assert [heard.tokens_of(i) for i in range(3)] == [[*said(10 + i).encode(), EOS] for i in range(3)]
    usage = heard.finished[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, sum(len(said(10 + i)) + 1 for i in range(3)))
    assert (len(heard.started), heard.started[0].seed, heard.finished[0].attempts) == (1, 10, 1)
    (submit,) = engine.submits
    assert (submit.sampling.n, submit.sampling.seed, submit.sampling.max_tokens) == (3, 10, 100)
    assert [(asked.max_tokens, asked.sequences) for asked in world.router.asked] == [(100, 3)]
    await eventually(lambda: gauges()["open_slots"] == gauges()["in_flight"] == 0)
    await eventually(lambda: [attempt for _, attempt in world.router.released] == [1])
    assert engine.cancels == []


async def test_answers_interleave_and_each_ends_at_its_own_length(world: Any) -> None:
    await world.engine("e-1", played())
    client = await world.gateway()

    heard = await client.generate(n=2, seed=1, temperature=1.0, max_tokens=len(said(1)) + 1)

    assert heard.ends == [(0, "STOP", len(said(1)) + 1), (1, "LENGTH", len(said(1)) + 1)]
    order = [delta.index for delta in heard.deltas]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the first answer is not over when the second begins"
    assert heard.reason == "STOP"


async def test_requests_with_many_answers_share_a_stream_with_others(world: Any, eventually: Any, gauges: Any) -> None:
    engine = await world.engine("e-1", played())
    client = await world.gateway()

    answers = await asyncio.gather(*(client.generate(n=1 + n % 4, seed=100 * n) for n in range(12)))

    for n, heard in enumerate(answers):
        assert heard.texts == {i: said(100 * n + i) for i in range(1 + n % 4)}
    assert engine.attached == 1
    await eventually(lambda: gauges()["open_slots"] == 0)
    assert max(s.slot + max(1, s.sampling.n) for s in engine.submits) <= 31


async def test_an_engine_lost_in_mid_answer_has_each_unfinished_answer_continued_elsewhere_exactly(world: Any) -> None:
    """The first is complete, the second has 5 tokens, the third none: two submissions follow, with their own seeds."""
    await world.engine("e-1", played(only={1: 5, 2: 0}, then=break_off))
    second = await world.engine("e-2", played())
    client = await world.gateway(retry_floor=1, retry_ratio=0.0)

    heard = await client.generate("Say it.", n=3, seed=2**64 - 1, temperature=0.5, max_tokens=90)

    seeds = [2**64 - 1, 0, 1]
    texts = {0: said(2**64 - 1), 1: said(2**64)[:5] + said(0)[5:], 2: said(1)}
    assert heard.texts == texts
    assert [heard.tokens_of(i) for i in range(3)] == [[*texts[i].encode(), EOS] for i in range(3)]
    assert heard.finished[0].usage.completion_tokens == sum(len(text) + 1 for text in texts.values())
    assert heard.finished[0].usage.prompt_tokens == 7
    assert heard.finished[0].attempts == 2
    moved = {s.sampling.seed: s for s in second.submits}
    assert set(moved) == set(seeds[1:])
    assert [s.sampling.HasField("n") for s in second.submits] == [False, False]
    assert list(moved[0].token_ids) == list(b"Say it.Seed ")
    assert (moved[0].emitted_tokens, moved[0].sampling.max_tokens) == (5, 85)
    assert (moved[1].emitted_tokens, moved[1].sampling.max_tokens) == (0, 90)
    assert [asked.attempt for asked in world.router.asked] == [1, 2, 3]
    assert [[x.engine_id for x in asked.exclusions] for asked in world.router.asked] == [[], ["e-1"], ["e-1"]]


async def test_one_answer_that_its_engine_gives_up_moves_while_the_others_stay(world: Any, eventually: Any) -> None:
    goes_on = asyncio.Event()

    async def first(engine: Any, stream: Any, submit: Any) -> None:
        rest = tokens_of(submit)
        base = submit.slot
        stream.step({base: rest[base][0], base + 1: rest[base + 1][0]})
        fails(1)(stream, submit)
        await goes_on.wait()
        for token in rest[base][1:-1]:
            stream.step({base: token})
        stream.step({base: EOS}, stream.finish(base, "STOP"))

    stays = await world.engine("e-1", first)
    other = await world.engine("e-2", played())
    client = await world.gateway()
    running = asyncio.ensure_future(client.generate(n=2, seed=4))
    await eventually(lambda: other.submits)
    goes_on.set()
    heard = await running

    assert heard.texts == {0: said(4), 1: said(5)}
    assert (other.submits[0].sampling.seed, other.submits[0].emitted_tokens) == (5, 1)
    assert heard.finished[0].engine_id == "e-1"
    assert stays.cancels == []
    await eventually(lambda: sorted(attempt for _, attempt in world.router.released) == [1, 2])


async def test_a_stop_text_ends_its_own_answer_only(world: Any, eventually: Any, gauges: Any) -> None:
    engine = await world.engine("e-1", played())
    client = await world.gateway()

    heard = await client.generate(n=3, seed=2, stop=["slowly"])

    assert heard.texts == {0: said(2), 1: "Seed 3 turns the wheel ", 2: said(4)}
    assert heard.ends == [
        (0, "STOP", len(said(2)) + 1),
        (1, "STOP", len("Seed 3 turns the wheel slowly")),
        (2, "STOP", len(said(4)) + 1),
    ]
    assert engine.cancels == [engine.submits[0].slot + 1]
    await eventually(lambda: gauges()["open_slots"] == 0)


async def test_a_client_that_leaves_cancels_every_answer(world: Any, eventually: Any, gauges: Any) -> None:
    engine = await world.engine("e-1", played(only=dict.fromkeys(range(4), 3)))
    client = await world.gateway()

    async with client.stream(n=4) as events:
        while not (await anext(events)).HasField("delta"):
            pass
    base = engine.submits[0].slot
    await eventually(lambda: sorted(engine.cancels) == [base, base + 1, base + 2, base + 3], within_s=0.5)
    await eventually(lambda: gauges()["in_flight"] == gauges()["open_slots"] == 0)
    await eventually(lambda: len(world.router.released) == 1)


async def test_a_replica_that_cannot_be_attached_costs_one_retry_for_all_answers(world: Any) -> None:
    gone = await world.engine("e-1")
    await gone.stop()
    await world.engine("e-2", played())
    client = await world.gateway(retry_floor=1, retry_ratio=0.0)

    heard = await client.generate(n=3, seed=7)

    assert heard.texts == {i: said(7 + i) for i in range(3)}


async def test_when_one_answer_cannot_go_on_the_request_fails_and_the_others_are_cancelled(
    world: Any, eventually: Any, gauges: Any
) -> None:
    engine = await world.engine("e-1", played(only={0: 3, 1: 3}, then=fails(1)))
    client = await world.gateway()

    with pytest.raises(StreamBroken) as broken:
        await client.generate(n=2)

    assert broken.value.metadata["tokens_emitted"] == "6"
    await eventually(lambda: engine.cancels == [engine.submits[0].slot])
    await eventually(lambda: gauges()["in_flight"] == gauges()["open_slots"] == 0)


async def test_full_queues_refuse_all_answers_of_a_request_as_one(world: Any) -> None:
    def full(stream: Any, submit: Any) -> None:
        slots = range(submit.slot, submit.slot + submit.sampling.n)
        stream.step({}, *(stream.finish(slot, "ERROR", error_reason="QUEUE_FULL") for slot in slots))

    await world.engine("e-1", played(only=dict.fromkeys(range(3), 0), then=full))
    client = await world.gateway()

    with pytest.raises(Exhausted):
        await client.generate(n=3)


async def test_without_a_replica_a_request_for_many_answers_is_unavailable(world: Any) -> None:
    client = await world.gateway(place_wait_s=0.0)

    with pytest.raises(Unavailable) as refused:
        await client.generate(n=3)

    assert refused.value.reason == "NO_REPLICA"


async def test_a_deadline_that_passes_ends_all_answers(world: Any, eventually: Any) -> None:
    engine = await world.engine("e-1", played(only=dict.fromkeys(range(3), 0)))
    client = await world.gateway()

    with pytest.raises(DeadlinePassed):
        await client.generate(n=3, within_s=0.3)

    await eventually(lambda: len(engine.cancels) == 3)


async def test_an_answer_that_may_sample_nothing_is_the_requests_own_fault(world: Any) -> None:
    end = fails(0, "NO_TOKEN_ALLOWED", error_field="sampling", error_message="nothing is left")
    await world.engine("e-1", played(only={0: 0}, then=end))
    client = await world.gateway()

    with pytest.raises(InvalidRequest) as refused:
        await client.generate()

    assert (refused.value.field, refused.value.reason) == ("sampling", "NO_TOKEN_ALLOWED")
    assert len(world.router.asked) == 1


async def test_what_a_slow_client_has_not_read_is_merged_by_answer(world: Any, eventually: Any) -> None:
    total = 9000

    async def fast(engine: Any, stream: Any, submit: Any) -> None:
        slots = range(submit.slot, submit.slot + 3)
        for n in range(total):
            ends = [stream.finish(slot, "LENGTH") for slot in slots] if n == total - 1 else []
            stream.step({slot: 97 + (slot - submit.slot) for slot in slots}, *ends)
            if n % 50 == 0:
                await asyncio.sleep(0)

    await world.engine("e-1", fast)
    client = await world.gateway()

    messages = []
    async with client.stream(max_tokens=total, n=3) as events:
        messages.append(await anext(events))
        await eventually(lambda: world.app._pool.open_slots == 0)  # the engine was never held up
        async for event in events:
            messages.append(event)

    for index, letter in enumerate("abc"):
        text = "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)
        assert text == letter * total
    assert len(messages) < 3 * total / 2
