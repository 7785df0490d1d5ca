"""The prefix index against a model so plain that it is plainly right, on random histories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.router.core.prefix_index import Heard, PrefixIndex
from headrace.router.core.replica import EngineId

PREDICTED_S = 5.0
# A tree of prompts of six blocks that part after two, and again after four: a block's hash is its path.
CHAINS = [[path[:n] for n in range(1, 7)] for path in ("000000", "000011", "001100", "001111")]
HASHES = sorted({h for path in CHAINS for h in path})
engines = st.sampled_from([EngineId("a"), EngineId("b"), EngineId("c")])
chains = st.sampled_from(CHAINS).flatmap(lambda c: st.sampled_from([1, 3, 5, 6, 6]).map(lambda n: c[:n]))
some_hashes = st.lists(st.sampled_from(HASHES), max_size=4, unique=True)


def raw(path: str) -> bytes:
    return (int("1" + path, 2) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")


def raws(paths: list[str]) -> list[bytes]:
    return [raw(path) for path in paths]


@dataclass
class Placed:
    chain: list[str]
    news: list[str]
    until: float


@dataclass
class Life:
    epoch: int
    last: int | None = None
    trusted: bool = False
    cached: set[str] = field(default_factory=set)
    placed: list[Placed] = field(default_factory=list)
    predicted: Counter[str] = field(default_factory=Counter)

    def end(self, placed: Placed) -> None:
        self.placed.remove(placed)
        self.predicted -= Counter(placed.news)  # keeps what is above zero

    def drop_predictions(self) -> None:
        self.placed, self.predicted = [], Counter()


class IndexAgainstModel(RuleBasedStateMachine):
    """Every event an engine and its stream can bring, in any order."""

    max_blocks = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.max_blocks, PREDICTED_S)
        self.lives: dict[EngineId, Life] = {}
        self.now = 0.0
        self.epochs = 0

    @rule(engine=engines)
    def begins(self, engine: EngineId) -> None:
        self.epochs += 1
        self.index.begin(engine, self.epochs)
        self.lives[engine] = Life(self.epochs)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.lives)))
        self.index.forget(engine)
        del self.lives[engine]

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), paths=some_hashes, ahead=st.integers(0, 3))
    def sends_a_snapshot(self, data: st.DataObject, paths: list[str], ahead: int) -> None:
        engine, life = self._one(data)
        life.last = (life.last or 0) + ahead
        self.index.snapshot(engine, life.epoch, raws(paths), life.last)
        life.cached, life.trusted = set(paths), True
        life.drop_predictions()

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), chain=chains, ahead=st.sampled_from([1, 1, 1, 1, 1, 0, -1, 2]))
    def stores(self, data: st.DataObject, chain: list[str], ahead: int) -> None:
        engine, life = self._one(data)
        sequence = (life.last or 0) + ahead
        heard = self.index.stored(engine, life.epoch, raws(chain), sequence)
        if self._hears(life, sequence, heard):
            life.cached |= set(chain)
            for path in chain:
                del life.predicted[path]

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), paths=some_hashes, ahead=st.sampled_from([1, 1, 1, 1, 1, 0, -1, 2]))
    def evicts(self, data: st.DataObject, paths: list[str], ahead: int) -> None:
        engine, life = self._one(data)
        sequence = (life.last or 0) + ahead
        heard = self.index.removed(engine, life.epoch, raws(paths), sequence)
        if self._hears(life, sequence, heard):
            life.cached -= set(paths)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def flushes(self, data: st.DataObject, ahead: int) -> None:
        engine, life = self._one(data)
        sequence = (life.last or 0) + ahead
        heard = self.index.cleared(engine, life.epoch, sequence)
        if self._hears(life, sequence, heard):
            life.cached = set()
            life.drop_predictions()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def loses_its_stream(self, data: st.DataObject) -> None:
        engine, life = self._one(data)
        self.index.suspend(engine, life.epoch)
        life.trusted = False

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), chain=chains)
    def gets_a_placement(self, data: st.DataObject, chain: list[str]) -> None:
        engine, life = self._one(data)
        self.index.predict(engine, life.epoch, raws(chain), self.now)
        if life.trusted:
            news = chain[self._prefix(chain, {h for h in life.cached if self._indexed(engine, h)}) :]
            if news:
                life.placed.append(Placed(chain, news, self.now + PREDICTED_S))
                life.predicted.update(news)

    @precondition(lambda self: any(life.placed for life in self.lives.values()))
    @rule(data=st.data())
    def an_attempt_fails(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(e for e, life in self.lives.items() if life.placed)))
        life = self.lives[engine]
        placed = data.draw(st.sampled_from(life.placed))
        self.index.withdraw(engine, life.epoch, raws(placed.chain))
        life.end(next(p for p in life.placed if p.chain == placed.chain))

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.index.tidy(self.now)
        for life in self.lives.values():
            for placed in [p for p in life.placed if p.until <= self.now]:
                life.end(placed)

    @rule(engine=engines, chain=chains, back=st.integers(1, 3), sequence=st.integers(0, 9))
    def an_old_life_speaks(self, engine: EngineId, chain: list[str], back: int, sequence: int) -> None:
        epoch = self.lives[engine].epoch - back if engine in self.lives else self.epochs
        assert self.index.stored(engine, epoch, raws(chain), sequence) is Heard.LATE
        assert self.index.removed(engine, epoch, raws(chain), sequence) is Heard.LATE
        assert self.index.cleared(engine, epoch, sequence) is Heard.LATE
        assert self.index.snapshot(engine, epoch, raws(chain), sequence) is Heard.LATE
        self.index.predict(engine, epoch, raws(chain), self.now)

    @rule(chain=st.sampled_from(CHAINS))
    def is_asked(self, chain: list[str]) -> None:
        overlaps = dict(self.index.overlap(raws(chain), self.now))
        for engine, life in self.lives.items():
            self._compare(chain, engine, life, overlaps.pop(engine, None))
        assert overlaps == {}, "nobody else is in it"

    @invariant()
    def counts_are_exact(self) -> None:
        for engine, life in self.lives.items():
            assert self.index.in_doubt(engine) is not life.trusted
            if life.trusted:
                assert self.index.indexed_blocks(engine) == sum(self._indexed(engine, h) for h in HASHES)
        assert len(self.index) <= self.max_blocks
        assert len(self.index) == sum(map(len, self.index._table._parts))

    def _compare(self, chain: list[str], engine: EngineId, life: Life, found: object) -> None:
        blocks = self._prefix(chain, life.cached) if life.trusted else 0
        expected = self._prefix(chain, life.cached | set(life.predicted)) if life.trusted else 0
        got = (found.epoch, found.blocks, found.blocks + found.predicted_blocks) if found else (life.epoch, 0, 0)  # type: ignore[attr-defined]
        assert got == (life.epoch, blocks, expected)

    def _prefix(self, chain: list[str], has: set[str]) -> int:
        return next((n for n, path in enumerate(chain) if path not in has), len(chain))

    def _one(self, data: st.DataObject) -> tuple[EngineId, Life]:
        engine = data.draw(st.sampled_from(sorted(self.lives)))
        return engine, self.lives[engine]

    def _indexed(self, engine: EngineId, path: str) -> bool:
        slot, block_hash = self.index._lives[engine].slot, raw(path)
        return bool(self.index._table.part_of_byte[block_hash[0]].get(block_hash, 0) & self.index._table.bit(slot))

    def _hears(self, life: Life, sequence: int, heard: Heard) -> bool:
        """Update the model's numbering; whether the event changes the cache."""
        if life.last is None or sequence > life.last + 1:
            assert heard is Heard.GAP
            life.last, life.trusted = None, False
            return False
        life.trusted = life.trusted or sequence >= life.last
        assert heard is (Heard.APPLIED if sequence == life.last + 1 else Heard.REPEATED)
        life.last = max(life.last, sequence)
        return heard is Heard.APPLIED


class SmallIndexAgainstModel(IndexAgainstModel):
    """One that has to evict: it may know less than the engines have, and never more."""

    max_blocks = 9

    def _compare(self, chain: list[str], engine: EngineId, life: Life, found: object) -> None:
        blocks, expected = (found.blocks, found.blocks + found.predicted_blocks) if found else (0, 0)  # type: ignore[attr-defined]
        has = {h for h in life.cached if self._indexed(engine, h)}
        assert blocks == (self._prefix(chain, has) if life.trusted else 0)
        # The oldest predictions leave a full index, too.
        may_come = life.cached.union(*(p.news for p in life.placed))
        assert expected <= (self._prefix(chain, may_come) if life.trusted else 0)


TestExactIndex = IndexAgainstModel.TestCase
TestExactIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSmallIndex = SmallIndexAgainstModel.TestCase
TestSmallIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
