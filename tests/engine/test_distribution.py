"""The joint distribution of three consecutive tokens under drafting is the target's: chi-square over 20,000 seeds,
through acceptance, rejection and bonus. Two planted wrong rules must fail the same test, or it proves nothing.

The simulation calls the sampler and the acceptance rule that the engine uses, for all seeds at once; a test below shows
that the engine draws the same tokens. Expected probabilities are written out here from the definitions alone."""

import functools
import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from scipy import stats

from qwen35.engine.accept import accept
from qwen35.engine.request import SamplingParams
from qwen35.engine.sampler import Row, choose
from tests.engine.fakes import Rig, chain, request

VOCAB = 5
NUM_SEEDS = 20_000
NUM_DRAFTS = 2
TEMPERATURE, TOP_K, TOP_P = 0.7, 4, 0.95
SAMPLING = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)


class Tables:
    """Logits after up to three tokens, of the target and of a draft that resembles it."""

    def __init__(self, spread: float) -> None:
        random = np.random.default_rng(7)
        contexts = [c for n in range(5) for c in itertools.product(range(VOCAB), repeat=n)]
        self.place = {context: i for i, context in enumerate(contexts)}
        self.target = random.normal(size=(len(contexts), VOCAB)).astype(np.float32) * 1.2
        self.draft = self.target + random.normal(size=self.target.shape).astype(np.float32) * spread


def probabilities(logits: np.ndarray) -> list[float]:
    """Softmax of logits / T over what top-k and then top-p leave: the definitions, token by token."""
    scaled = [float(x) / TEMPERATURE for x in logits]
    ranked = sorted(range(VOCAB), key=lambda i: -scaled[i])[:TOP_K]
    weights = {i: math.exp(scaled[i]) for i in ranked}
    total = sum(weights.values())
    kept, before = [], 0.0
    for i in ranked:
        if before >= TOP_P:
            break
        kept.append(i)
        before += weights[i] / total
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(VOCAB)]


def expected_joint(tables: Tables) -> dict[tuple[int, ...], float]:
    joint = {(): 1.0}
    for _ in range(3):
        joint = {
            (*c, i): p * q
            for c, p in joint.items()
            for i, q in enumerate(probabilities(tables.target[tables.place[c]]))
            if q > 0
        }
    return joint


@functools.cache
def row(seed: int, index: int) -> Row:
    return Row(SAMPLING, seed, index)


def draw(tables: Tables, logits: np.ndarray, contexts: list, seeds: list[int], index_of) -> list[int]:
    rows = [row(seed, index_of(len(context))) for context, seed in zip(contexts, seeds, strict=True)]
    places = [tables.place[context] for context in contexts]
    return choose(torch.from_numpy(logits[places]), rows).token_ids.tolist()


def simulate(tables: Tables, rule=accept, index_of=lambda index: index) -> tuple[dict[int, tuple], Counter]:
    """Verify steps of NUM_DRAFTS drafts until each seed has three tokens; how long the runs were."""
    outputs: dict[int, tuple[int, ...]] = dict.fromkeys(range(NUM_SEEDS), ())
    runs: Counter[int] = Counter()
    while seeds := [seed for seed, output in outputs.items() if len(output) < 3]:
        drafts: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for _ in range(NUM_DRAFTS):
            contexts = [outputs[s] + drafts[s] for s in seeds]
            for s, token_id in zip(seeds, draw(tables, tables.draft, contexts, seeds, index_of), strict=True):
                drafts[s] += (token_id,)
        rows = [(s, outputs[s] + drafts[s][:i]) for s in seeds for i in range(NUM_DRAFTS + 1)]
        chosen = draw(tables, tables.target, [c for _, c in rows], [s for s, _ in rows], index_of)
        for n, s in enumerate(seeds):
            decided = rule(drafts[s], chosen[n * (NUM_DRAFTS + 1) : (n + 1) * (NUM_DRAFTS + 1)])
            runs[len(decided)] += 1
            outputs[s] = (outputs[s] + tuple(decided))[:3]
    return outputs, runs


def p_value(outputs: dict[int, tuple], expected: dict[tuple, float]) -> float:
    """Chi-square; cells of expectation below 20 are one cell. An outcome of probability 0 is a failure by itself."""
    counts = Counter(outputs.values())
    if counts.keys() - expected.keys():
        return 0.0
    small = {c for c, p in expected.items() if p * NUM_SEEDS < 20}
    cells = [[c] for c in expected if c not in small] + ([list(small)] if small else [])
    observed = [sum(counts[c] for c in cell) for cell in cells]
    wanted = [sum(expected[c] for c in cell) * len(outputs) for cell in cells]
    assert len(cells) > 20, "too few outcomes to tell anything"
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize("spread", [0.0, 0.7, 5.0], ids=["perfect draft", "usual draft", "poor draft"])
def test_joint_distribution_of_three_tokens(spread):
    tables = Tables(spread)
    outputs, runs = simulate(tables)
    assert p_value(outputs, expected_joint(tables)) > 1e-4
    assert runs[NUM_DRAFTS + 1] > 0, "no bonus token"
    if spread:
        assert runs[1] > 1000 and runs[2] > 1000, "rejections at the first and at the second draft"
    else:
        assert set(runs) == {NUM_DRAFTS + 1}


def test_reusing_noise_across_positions_is_caught():
    tables = Tables(0.7)
    outputs, _ = simulate(tables, index_of=lambda index: 0)
    assert p_value(outputs, expected_joint(tables)) < 1e-4


def test_keeping_a_rejected_draft_is_caught():
    def keep_rejected(drafts, choices):
        decided = accept(drafts, choices)
        num_accepted = len(decided) - 1
        return decided[:-1] + tuple(drafts[num_accepted : num_accepted + 1]) or decided

    tables = Tables(0.7)
    outputs, _ = simulate(tables, rule=keep_rejected)
    expected = expected_joint(tables)
    assert p_value(outputs, expected) < 1e-4
    possible = {seed: output for seed, output in outputs.items() if output in expected}
    assert p_value(possible, expected) < 1e-4, "caught by the counts too, not only by tokens outside of top-k"


def test_the_engine_draws_what_the_rule_says():
    """Choice by choice: the engine's tokens are those of plain sampling from the target's table with the same keys."""
    options = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
    rig = Rig(num_draft_tokens=NUM_DRAFTS, draft="mixed", num_slots=8)
    rig.run([request((1, 2), uid=s, seed=s, max_tokens=6, ignore_eos=True, **options) for s in range(48)])
    for seed in range(48):
        context, hashed = [], 0.0
        for token_id in (1, 2):
            hashed = chain(hashed, float(token_id))
        for index in range(6):
            logits = rig.target.table[int(hashed) % len(rig.target.table)][None]
            context += choose(logits, [Row(SAMPLING, seed, index)]).token_ids.tolist()
            hashed = chain(hashed, float(context[-1]))
        assert rig.token_ids(seed) == tuple(context)
    assert 0 < rig.engine.metrics.num_accepted_draft_tokens < rig.engine.metrics.num_draft_tokens
