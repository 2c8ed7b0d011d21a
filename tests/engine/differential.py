"""Random schedules over a small real model, and what each of their requests says alone.

A schedule draws everything that must not matter: which requests meet, when they come and go, chunk sizes, draft
lengths, how good the drafts are, priorities, blocks and slots. Every request that survives must give the tokens, the
text and, bit for bit, the logprobs of its solo run without drafts; a cancelled one a prefix of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen35.config import ModelConfig
from qwen35.devices import select_dtype
from qwen35.engine.engine import Engine
from qwen35.engine.request import Emission, Request, SamplingParams
from qwen35.errors import Cancelled
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.settings import Settings
from qwen35.state.geometry import Geometry
from qwen35.state.local import LocalState
from qwen35.weights.loader import load_language
from tests.drafters import OracleDrafter, ScriptedLengths
from tests.tiny_checkpoint import HIDDEN, TOKEN_ID, make_tiny_checkpoint

KINDS = {
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "float64": {"dtype": "float64", "kv_cache_dtype": "float64"},
}
IMAGE = TOKEN_ID["<|image_pad|>"]
NUM_REQUESTS = 24
MAX_CONTEXT_TOKENS = 64
_SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 6, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5,
     "logit_bias": ((65, 6.0), (66, 6.0), (67, 6.0)), "min_tokens": 3},
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One gated delta net, one full attention, one draft layer."""

    config: ModelConfig
    target: LanguageModel
    draft: DraftModel
    tokenizer: Tokenizer


@functools.cache
def _checkpoint() -> tempfile.TemporaryDirectory:
    directory = tempfile.TemporaryDirectory(prefix="differential-")
    make_tiny_checkpoint(Path(directory.name) / "checkpoint", with_vision=False)
    return directory


@functools.cache
def model(dtype: str) -> Model:
    path = Path(_checkpoint().name) / "checkpoint"
    whole = ModelConfig.from_directory(path)
    weights, draft, _ = load_language(path, whole, with_draft=True, dtype=select_dtype(dtype))
    text = dataclasses.replace(whole.text, num_hidden_layers=2, layer_types=whole.text.layer_types[2:4])
    ops = ReferenceOps()
    return Model(
        dataclasses.replace(whole, text=text),
        LanguageModel(text, dataclasses.replace(weights, layers=weights.layers[2:4]), ops),
        DraftModel(text, draft, ops),
        Tokenizer.from_directory(path),
    )


@functools.cache
def catalogue() -> tuple[Request, ...]:
    """Prompts of 1 to 45 tokens, one in four with an image; every way to sample."""
    draw = random.Random(5)
    return tuple(_request(draw, index) for index in range(NUM_REQUESTS))


def _request(draw: random.Random, index: int) -> Request:
    num_tokens = draw.choice((1, 2, 3, draw.randint(4, 20), draw.randint(15, 45)))
    token_ids = [draw.randrange(256) for _ in range(num_tokens)]
    positions = torch.arange(num_tokens).repeat(3, 1)
    embeds = torch.empty(0, HIDDEN)
    if index % 4 == 3:  # six placeholders, two rows of three
        row, column = torch.arange(6) // 3, torch.arange(6) % 3
        image = torch.stack([torch.zeros_like(row), row, column]) + num_tokens
        token_ids += [IMAGE] * 6 + [10]
        positions = torch.cat([positions, image, torch.full((3, 1), num_tokens + 3)], dim=1)
        embeds = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(index))
    sampling = SamplingParams(max_tokens=draw.randint(3, 16), logprobs=1, **_SAMPLINGS[index // 2 % len(_SAMPLINGS)])
    return Request(index, "", tuple(token_ids), positions, embeds, sampling, seed=index, deadline=math.inf)


def make_engine(kind: str, num_blocks: int, *, num_draft_tokens: int, **settings: object) -> tuple[Engine, LocalState]:
    made = model(KINDS[kind]["dtype"])
    resolved = Settings(
        num_draft_tokens=num_draft_tokens,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        num_checkpoints=0,
        **{**KINDS[kind], **settings},
    )
    state = LocalState(dataclasses.replace(Geometry.derive(made.config, resolved), num_blocks=num_blocks))
    draft = made.draft if num_draft_tokens else None
    engine = Engine(made.target, draft, state.pool, state.cache, made.tokenizer, made.config, resolved)
    return engine, state


def outcome(news: list[Emission]) -> tuple:
    """Ids, text, reason and logprobs: all that a schedule must not change."""
    return (
        tuple(token_id for emission in news for token_id in emission.token_ids),
        "".join(emission.text for emission in news),
        news[-1].finish_reason,
        tuple(entry for emission in news for entry in emission.logprobs),
        news[-1].cumulative_logprob,
    )


@functools.cache
def solo(kind: str, index: int) -> tuple:
    """The outcome of one request of the catalogue alone, without drafts, in one chunk."""
    engine, _ = make_engine(kind, 16, num_draft_tokens=0, num_slots=1)
    engine.submit(catalogue()[index])
    news: list[Emission] = []
    while engine.has_work:
        news += engine.step()
    assert news[-1].error is None
    return outcome(news)


@dataclass(frozen=True)
class Visit:
    """One request of the catalogue in a schedule."""

    uid: int
    index: int  # in the catalogue
    arrives: int  # step
    cancelled: int | None  # step
    priority: int
    num_draft_tokens: int | None


@dataclass(frozen=True)
class Schedule:
    seed: int
    kind: str
    visits: tuple[Visit, ...]
    num_blocks: int
    num_draft_tokens: int
    wrong: float | None  # how often an oracle's draft is wrong; None: the draft head's own
    is_fickle: bool  # the draft length changes at every step, pauses included
    settings: dict[str, int]


def schedule(seed: int) -> Schedule:
    """Half of the seeds in the served types, half in float64."""
    draw = random.Random(seed)
    visits = tuple(_visit(draw, uid) for uid in range(draw.randint(2, 7)))
    num_draft_tokens = draw.choice((0, 1, 2, 3, 3, 4, 5))
    block_tokens = draw.choice((2, 4, 8))
    needs = [
        min(len(request.token_ids) + request.sampling.max_tokens, MAX_CONTEXT_TOKENS)
        for request in (catalogue()[visit.index] for visit in visits)
    ]
    spare = draw.choice((0.0, 0.3, 1.0, 3.0))
    return Schedule(
        seed=seed,
        kind=("bfloat16", "float64", "fp8", "float64")[seed % 4],
        visits=visits,
        num_blocks=-(-max(needs) // block_tokens) + int(spare * max(needs) / block_tokens),
        num_draft_tokens=num_draft_tokens,
        wrong=draw.choice((None, 0.0, 0.3, 0.6)) if num_draft_tokens else None,
        is_fickle=draw.random() < 0.5,
        settings={
            "block_tokens": block_tokens,
            "num_slots": draw.randint(1, 4),
            "max_batch_tokens": draw.choice((3, 6, 11, 18, 64)),
            "max_undrafted_tokens": draw.choice((1, 4, 64)),
            "swap_bytes": draw.choice((0, 15_000, 1 << 20)),  # copies of nobody, of somebody, of all
        },
    )


def _visit(draw: random.Random, uid: int) -> Visit:
    arrives = draw.choice((0, draw.randint(0, 12)))
    return Visit(
        uid=uid,
        index=draw.randrange(NUM_REQUESTS),
        arrives=arrives,
        cancelled=arrives + draw.randint(0, 9) if draw.random() < 0.15 else None,
        priority=draw.choice((0, 0, 0, 1)),
        num_draft_tokens=draw.choice((None, None, None, 0, 1)),
    )


class HeadAndOracle(OracleDrafter):
    """The draft head runs and fills its cache; what is proposed is mostly what plain decoding is known to say."""

    def __init__(self, head: object, known: dict[int, tuple[int, ...]], wrong: float, seed: int) -> None:
        super().__init__(known, wrong, seed)
        self._head = head

    def propose(self, pieces, hidden) -> None:
        self._head.propose(pieces, hidden)
        super().propose(pieces, hidden)


def play(made: Schedule) -> Engine:
    """Runs a schedule. Raises AssertionError where a request differs from its solo run or the pool is not whole."""
    engine, state = make_engine(made.kind, made.num_blocks, num_draft_tokens=made.num_draft_tokens, **made.settings)
    if made.is_fickle and engine._drafter is not None:
        draw = random.Random(made.seed)
        engine._drafter._lengths = ScriptedLengths(lambda _: draw.choice((0, 0, 0, 1, 3, 5)))
    if made.wrong is not None:
        known = {visit.uid: solo(made.kind, visit.index)[0] for visit in made.visits}
        engine._drafter = HeadAndOracle(engine._drafter, known, made.wrong, made.seed)
    news: dict[int, list[Emission]] = {visit.uid: [] for visit in made.visits}
    step = 0
    while engine.has_work or any(visit.arrives >= step for visit in made.visits):
        for visit in made.visits:
            if visit.arrives == step:
                engine.submit(_arriving(visit))
            if visit.cancelled == step:
                engine.abort(visit.uid)
        for emission in engine.step():
            news[emission.uid].append(emission)
        state.pool.check_integrity()
        step += 1
        assert step < 3000, f"seed {made.seed}: unfinished after {step} steps"
    for visit in made.visits:
        _check(made, visit, news[visit.uid])
    assert (state.pool.num_free_blocks, state.pool.num_free_slots) == (made.num_blocks, made.settings["num_slots"])
    state.close()
    return engine


def _arriving(visit: Visit) -> Request:
    request = catalogue()[visit.index]
    sampling = dataclasses.replace(request.sampling, num_draft_tokens=visit.num_draft_tokens)
    return dataclasses.replace(
        request, uid=visit.uid, sampling=sampling, priority=visit.priority, arrival=float(visit.arrives)
    )


def _check(made: Schedule, visit: Visit, news: list[Emission]) -> None:
    expected = solo(made.kind, visit.index)
    where = f"seed {made.seed}, uid {visit.uid} (request {visit.index})"
    assert [emission.is_final for emission in news].count(True) == 1 and news[-1].is_final, where
    if news[-1].error is None:
        assert outcome(news) == expected, where
        return
    assert visit.cancelled is not None and isinstance(news[-1].error, Cancelled), f"{where}: {news[-1].error}"
    token_ids, _, _, logprobs, _ = outcome(news)
    assert token_ids == expected[0][: len(token_ids)], where
    assert logprobs == expected[3][: len(logprobs)], where
