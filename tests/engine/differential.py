"""Random schedules over a small real model, and what each of their requests says alone.

A schedule draws everything that must not matter: which requests meet, when they come and go, chunk sizes, draft
lengths, how good the drafts are, priorities, blocks and slots, how many prefixes are cached and where. Prompts come
back, share prefixes, go on where an answer ended, and ask for several samples or for logprobs of the prompt. Every
request that survives must give the tokens, the text and, bit for bit, the logprobs of its solo run without drafts and
without a prefix cache; a cancelled one a prefix of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen35.config import ModelConfig
from qwen35.devices import select_dtype
from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.engine import Engine
from qwen35.engine.request import Emission, ImageSpan, Request, SamplingParams, StructuredOutputs
from qwen35.errors import Cancelled
from qwen35.kernels.reference import ReferenceOps
from qwen35.nn.draft import DraftModel
from qwen35.nn.language import LanguageModel
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.settings import Settings
from qwen35.state.geometry import Geometry
from qwen35.state.leases import Lease
from qwen35.state.local import LocalState
from qwen35.weights.loader import load_language
from tests.drafters import OracleDrafter, ScriptedLengths
from tests.engine.fakes import LateStore, check_whole
from tests.tiny_checkpoint import HIDDEN, TOKEN_ID, make_tiny_checkpoint

KINDS = {
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "float64": {"dtype": "float64", "kv_cache_dtype": "float64"},
}
IMAGE, TURN_START = TOKEN_ID["<|image_pad|>"], TOKEN_ID["<|im_start|>"]
PLACEHOLDERS = (IMAGE, TOKEN_ID["<|video_pad|>"])
NUM_REQUESTS = 24
NUM_SAMPLES = 2  # of solo runs
MAX_CONTEXT_TOKENS = 72
_SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 6, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5,
     "logit_bias": ((65, 6.0), (66, 6.0), (67, 6.0)), "min_tokens": 3},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs("regex", "[a-h]{2,6}-[0-9]{2,7}")},
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
    """Prompts of 1 to 45 tokens, one in four with an image; every way to sample. Each begins like another one, for
    some of its tokens."""
    draw = random.Random(5)
    stems = [_stem(draw, kind) for kind in ("text", "chat", "text", "image", "chat", "image")]
    return tuple(_request(draw, index, stems[index % len(stems)]) for index in range(NUM_REQUESTS))


def _stem(draw: random.Random, kind: str) -> list[int]:
    """The first tokens of some prompts."""
    text = [draw.randrange(256) for _ in range(draw.randint(8, 20))]
    if kind == "chat":
        encode = Vocabulary(model("float64").tokenizer).encode
        turns = (("system\n", text[:6]), ("user\n", text[6:9]), ("as\n", text[9:12]))
        return [token_id for role, said in turns for token_id in (TURN_START, *encode(role), *said)]
    return text[:6] + [IMAGE] * 6 + text[6:] if kind == "image" else text


def _request(draw: random.Random, index: int, stem: list[int]) -> Request:
    """Its prompt ends in or with the stem, or goes on behind it."""
    num_own = draw.choice((0, 0, 1, 2, draw.randint(3, 12), draw.randint(9, 30)))
    token_ids = stem[: draw.randint(1, len(stem))] if draw.random() < 0.4 else list(stem)
    while len(token_ids) < len(stem) and token_ids[-1] == IMAGE:
        token_ids = stem[: len(token_ids) + 1]  # an image comes whole
    token_ids += [draw.randrange(256) for _ in range(num_own)]
    options = _SAMPLINGS[index // 2 % len(_SAMPLINGS)]
    sampling = SamplingParams(max_tokens=draw.randint(3, 14), logprobs=1, **options)
    # Two requests with one stem have one image in common, the others another one.
    return make_request(index, token_ids, sampling, image=index // 12)


def make_request(index: int, token_ids: Sequence[int], sampling: SamplingParams, image: int) -> Request:
    """Placeholders are six tokens in a row, two rows of three."""
    num_tokens = len(token_ids)
    positions = torch.arange(num_tokens).repeat(3, 1)
    embeds, images = torch.empty(0, HIDDEN), ()
    if IMAGE in token_ids:
        first = list(token_ids).index(IMAGE)
        row, column = torch.arange(6) // 3, torch.arange(6) % 3
        positions[:, first : first + 6] = torch.stack([torch.zeros_like(row), row, column]) + first
        positions[:, first + 6 :] -= 3
        embeds = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(image))
        images = (ImageSpan(f"{image:064x}", first, 6),)
    seed = index % 5
    return Request(
        index, "", tuple(token_ids), positions, embeds, sampling, seed=seed, deadline=math.inf, images=images
    )


@functools.cache
def request_of(kind: str, index: int, is_second_turn: bool) -> Request:
    """A request of the catalogue, or one that goes on where its answer ended."""
    first = catalogue()[index]
    if not is_second_turn:
        return first
    said = itertools.takewhile(lambda token_id: token_id not in PLACEHOLDERS, solo(kind, index, False)[0][0])
    token_ids = (*first.token_ids, *said, 10, 11 + index)[: MAX_CONTEXT_TOKENS - 8]
    return make_request(index, token_ids, first.sampling, image=index // 12)


def make_engine(
    kind: str,
    num_blocks: int,
    *,
    num_draft_tokens: int,
    num_checkpoints: int = 0,
    num_late_steps: int = 0,
    **settings: object,
) -> tuple[Engine, LocalState]:
    made = model(KINDS[kind]["dtype"])
    options = {"max_context_tokens": MAX_CONTEXT_TOKENS, "num_checkpoints": num_checkpoints, **KINDS[kind], **settings}
    resolved = Settings(num_draft_tokens=num_draft_tokens, **options)
    state = LocalState(dataclasses.replace(Geometry.derive(made.config, resolved), num_blocks=num_blocks))
    draft = made.draft if num_draft_tokens else None
    store = LateStore(state, num_late_steps) if num_checkpoints else None
    engine = Engine(made.target, draft, state.pool, state.cache, made.tokenizer, made.config, resolved, store=store)
    return engine, state


def outcome(news: list[Emission]) -> tuple:
    """Ids, text, reason and logprobs: all that a schedule must not change."""
    return (
        tuple(token_id for emission in news for token_id in emission.token_ids),
        "".join(emission.text for emission in news),
        news[-1].finish_reason,
        tuple(entry for emission in news for entry in emission.logprobs),
        news[-1].cumulative_logprob,
        tuple(entry for emission in news for entry in emission.prompt_logprobs),
    )


@functools.cache
def solo(kind: str, index: int, is_second_turn: bool) -> tuple[tuple, ...]:
    """The outcome of each sample of one request alone, without drafts and prefix cache, in one chunk."""
    engine, _ = make_engine(kind, 40, num_draft_tokens=0, num_slots=1)
    request = request_of(kind, index, is_second_turn)
    sampling = dataclasses.replace(request.sampling, n=NUM_SAMPLES, prompt_logprobs=1)
    engine.submit(dataclasses.replace(request, sampling=sampling))
    news: list[list[Emission]] = [[] for _ in range(NUM_SAMPLES)]
    while engine.has_work:
        for emission in engine.step():
            news[emission.sample_index].append(emission)
    assert all(emissions[-1].error is None for emissions in news)
    return tuple(outcome(emissions) for emissions in news)


@dataclass(frozen=True)
class Visit:
    """One request of the catalogue in a schedule."""

    uid: int
    index: int  # in the catalogue
    is_second_turn: bool
    num_samples: int
    wants_prompt_logprobs: bool
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
    interval_tokens: int  # between checkpoints
    num_late_steps: int  # until the prefix cache does what it is told
    settings: dict[str, int]


def schedule(seed: int) -> Schedule:
    """Half of the seeds in the served types, half in float64; three of four with a prefix cache."""
    draw = random.Random(seed)
    kind = ("bfloat16", "float64", "fp8", "float64")[seed % 4]
    favourites = [draw.randrange(NUM_REQUESTS) for _ in range(2)]
    visits = tuple(_visit(draw, uid, favourites) for uid in range(draw.randint(2, 8)))
    num_draft_tokens = draw.choice((0, 1, 2, 3, 3, 4, 5))
    block_tokens = draw.choice((2, 4, 8))
    needs = [min(len(r.token_ids) + r.sampling.max_tokens, MAX_CONTEXT_TOKENS)
             for r in (request_of(kind, visit.index, visit.is_second_turn) for visit in visits)]  # fmt: skip
    spare = draw.choice((0.0, 0.3, 1.0, 3.0, 6.0))
    return Schedule(
        seed=seed,
        kind=kind,
        visits=visits,
        num_blocks=-(-max(needs) // block_tokens) + int(spare * max(needs) / block_tokens),
        num_draft_tokens=num_draft_tokens,
        wrong=draw.choice((None, 0.0, 0.3, 0.6)) if num_draft_tokens else None,
        is_fickle=draw.random() < 0.5,
        interval_tokens=draw.choice((3, 5, 9, 1000)),
        num_late_steps=draw.choice((0, 0, 1, 4)),
        settings={
            "block_tokens": block_tokens,
            "num_slots": draw.randint(1, 4),
            "num_checkpoints": draw.choice((0, 1, 3, 8, 16)),
            "max_batch_tokens": draw.choice((3, 6, 11, 18, 64)),
            "max_undrafted_tokens": draw.choice((1, 4, 64)),
            "swap_bytes": draw.choice((0, 15_000, 1 << 20)),  # copies of nobody, of somebody, of all
        },
    )


def _visit(draw: random.Random, uid: int, favourites: Sequence[int]) -> Visit:
    arrives = draw.choice((0, draw.randint(0, 12), draw.randint(5, 40)))
    return Visit(
        uid=uid,
        index=draw.choice(favourites) if draw.random() < 0.6 else draw.randrange(NUM_REQUESTS),
        is_second_turn=draw.random() < 0.25,
        num_samples=draw.choice((1, 1, 1, NUM_SAMPLES)),
        wants_prompt_logprobs=draw.random() < 0.15,
        arrives=arrives,
        cancelled=arrives + draw.randint(0, 9) if draw.random() < 0.15 else None,
        priority=draw.choice((0, 0, 0, 1)),
        num_draft_tokens=draw.choice((None, None, None, 0, 1)),
    )


class HeadAndOracle(OracleDrafter):
    """The draft head runs and fills its cache; what is proposed is mostly what plain decoding is known to say."""

    def __init__(self, head: object, known: dict[tuple[int, int], tuple[int, ...]], wrong: float, seed: int) -> None:
        super().__init__(known, wrong, seed)
        self._head = head

    def propose(self, pieces, hidden) -> None:
        self._head.propose(pieces, hidden)
        super().propose(pieces, hidden)


def play(made: Schedule) -> Engine:
    """Runs a schedule. Raises AssertionError where a request differs from its solo run or the pool is not whole."""
    engine, state = make_engine(
        made.kind,
        made.num_blocks,
        num_draft_tokens=made.num_draft_tokens,
        num_late_steps=made.num_late_steps,
        **made.settings,
    )
    store = LateStore(state, 0) if engine._store is None else engine._store
    engine._checkpoints._landmarks._interval_tokens = made.interval_tokens
    _set_drafter(made, engine)
    news: dict[tuple[int, int], list[Emission]] = defaultdict(list)
    leases: dict[int, Lease] = {}
    step = 0
    while engine.has_work or any(visit.arrives >= step for visit in made.visits):
        for visit in made.visits:
            if visit.arrives == step:
                request = _arriving(made.kind, visit)
                leases[visit.uid], hit = store.open(engine.query(request))
                engine.submit(dataclasses.replace(request, lease=leases[visit.uid]), hit=hit)
            if visit.cancelled == step:
                engine.abort(visit.uid)
        for emission in engine.step():
            news[emission.uid, emission.sample_index].append(emission)
        store.tick()
        for uid in [uid for uid in leases if not engine.is_live(uid)]:
            store.close(leases.pop(uid))
        state.pool.check_integrity()
        step += 1
        assert step < 3000, f"seed {made.seed}: unfinished after {step} steps"
    for visit in made.visits:
        for sample in range(visit.num_samples):
            _check(made, visit, sample, news[visit.uid, sample])
    store.finish(engine)
    check_whole(state)
    state.close()
    return engine


def _set_drafter(made: Schedule, engine: Engine) -> None:
    if made.is_fickle and engine._drafter is not None:
        draw = random.Random(made.seed)
        engine._drafter._lengths = ScriptedLengths(lambda _: draw.choice((0, 0, 0, 1, 3, 5)))
    if made.wrong is not None:
        known = {
            (visit.uid, sample): solo(made.kind, visit.index, visit.is_second_turn)[sample][0]
            for visit in made.visits
            for sample in range(NUM_SAMPLES)
        }
        engine._drafter = HeadAndOracle(engine._drafter, known, made.wrong, made.seed)


def _arriving(kind: str, visit: Visit) -> Request:
    request = request_of(kind, visit.index, visit.is_second_turn)
    sampling = dataclasses.replace(
        request.sampling,
        n=visit.num_samples,
        num_draft_tokens=visit.num_draft_tokens,
        prompt_logprobs=1 if visit.wants_prompt_logprobs else None,
    )
    return dataclasses.replace(
        request, uid=visit.uid, sampling=sampling, priority=visit.priority, arrival=float(visit.arrives)
    )


def _check(made: Schedule, visit: Visit, sample: int, news: list[Emission]) -> None:
    *expected, prompt_logprobs = solo(made.kind, visit.index, visit.is_second_turn)[sample]
    expected.append(prompt_logprobs if visit.wants_prompt_logprobs else ())
    where = f"seed {made.seed}, uid {visit.uid} (request {visit.index}), sample {sample}"
    assert [emission.is_final for emission in news].count(True) == 1 and news[-1].is_final, where
    if news[-1].error is None:
        assert outcome(news) == tuple(expected), where
        return
    assert visit.cancelled is not None and isinstance(news[-1].error, Cancelled), f"{where}: {news[-1].error}"
    token_ids, _, _, logprobs, *_ = outcome(news)
    assert token_ids == expected[0][: len(token_ids)], where
    assert logprobs == expected[3][: len(logprobs)], where
