"""Each processor and filter by itself, under drafts that are mostly right, mostly wrong and always wrong: the joint
distribution of three tokens is the target's, by chi-square over 8,000 seeds. Expected probabilities are written out
here from the definitions. The same test must find the processor left out, and penalties that do not see the drafts.

A choice depends on the tokens before it alone. So each row is processed once for every context, and the simulation
draws all seeds at once from these tables with the sampler and the acceptance rule of the engine."""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from qwen35.engine.accept import accept
from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.grammar import Grammars
from qwen35.engine.processors import Processors
from qwen35.engine.request import SamplingParams, StructuredOutputs
from qwen35.engine.sampler import Row, choose
from tests.engine.fakes import tokenizer

VOCAB = 5
EOS = 4
PROMPT = (1,)
NUM_SEEDS = 8000
NUM_DRAFTS = 2
NUM_TOKENS = 3
CONTEXTS = [c for n in range(NUM_TOKENS + NUM_DRAFTS) for c in itertools.product(range(VOCAB), repeat=n)]
PLACE = {context: i for i, context in enumerate(CONTEXTS)}
SPREADS = {"high": 0.2, "low": 4.0, "zero": None}  # of the draft's logits around the target's; None: never right

Logits = dict[int, float]  # of the tokens that may come
Context = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One option, and what it means: (logits, context) -> logits that are left, before the softmax."""

    options: dict
    meaning: Callable[[Logits, Context], Logits]
    bad_words: tuple[Context, ...] = ()


def penalised(logits: Logits, penalty: Callable[[int, float], float]) -> Logits:
    return {i: penalty(i, x) for i, x in logits.items()}


def without(logits: Logits, *banned: int) -> Logits:
    return {i: x for i, x in logits.items() if i not in banned}


def weights(logits: Logits) -> dict[int, float]:
    total = sum(math.exp(x) for x in logits.values())
    return {i: math.exp(x) / total for i, x in logits.items()}


def first_until(logits: Logits, order: list[int], share: float) -> Logits:
    """The first tokens in ``order`` until they hold ``share`` of the mass."""
    kept, mass = {}, 0.0
    for i in order:
        if mass < share:
            kept[i] = logits[i]
        mass += weights(logits)[i]
    return kept


def by_weight(logits: Logits) -> list[int]:
    return sorted(logits, key=lambda i: -logits[i])


def by_surprise(logits: Logits) -> list[int]:
    entropy = -sum(p * math.log(p) for p in weights(logits).values())
    return sorted(logits, key=lambda i: abs(-math.log(weights(logits)[i]) - entropy))


def repeated(logits: Logits, context: Context) -> Logits:
    seen = {*PROMPT, *context}
    return penalised(logits, lambda i, x: (x / 1.8 if x > 0 else x * 1.8) if i in seen else x)


def bad_words(logits: Logits, context: Context) -> Logits:
    return without(logits, 2, *([3] if context[-1:] == (0,) else []))


def grammar(logits: Logits, context: Context) -> Logits:
    """((a|b)c?|d)* and then, behind EOS, anything."""
    return without(logits, *([2] if EOS not in context and context[-1:] not in ((0,), (1,)) else []))


CASES = {
    "temperature": Case({"temperature": 0.5}, lambda x, c: penalised(x, lambda i, v: v / 0.5)),
    "top_k": Case({"top_k": 3}, lambda x, c: {i: x[i] for i in by_weight(x)[:3]}),
    "top_p": Case({"top_p": 0.7}, lambda x, c: first_until(x, by_weight(x), 0.7)),
    "min_p": Case({"min_p": 0.2}, lambda x, c: {i: v for i, v in x.items() if v >= max(x.values()) + math.log(0.2)}),
    "typical_p": Case({"typical_p": 0.6}, lambda x, c: first_until(x, by_surprise(x), 0.6)),
    "logit_bias": Case({"logit_bias": ((0, 1.5), (3, -2.0))},
                       lambda x, c: penalised(x, lambda i, v: v + {0: 1.5, 3: -2.0}.get(i, 0.0))),
    "bad_words": Case({"bad_words": ("c", "ad")}, bad_words, ((2,), (0, 3))),
    "min_tokens": Case({"min_tokens": 2}, lambda x, c: without(x, EOS) if len(c) < 2 else x),
    "allowed_token_ids": Case({"allowed_token_ids": (0, 2, 4)}, lambda x, c: without(x, 1, 3)),
    "structured_outputs": Case({"structured_outputs": StructuredOutputs("regex", "((a|b)c?|d)*")}, grammar),
    "repetition_penalty": Case({"repetition_penalty": 1.8}, repeated),
    "presence_penalty": Case({"presence_penalty": 1.5},
                             lambda x, c: penalised(x, lambda i, v: v - 1.5 * (i in c))),
    "frequency_penalty": Case({"frequency_penalty": 0.9},
                              lambda x, c: penalised(x, lambda i, v: v - 0.9 * c.count(i))),
}  # fmt: skip
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@functools.cache
def raw(spread: float) -> np.ndarray:
    """[contexts, VOCAB] logits of the target, or of a draft around it."""
    target = np.random.default_rng(11).normal(size=(len(CONTEXTS), VOCAB)) * 1.2
    return (target + np.random.default_rng(12).normal(size=target.shape) * spread).astype(np.float32)


def sampling_of(case: Case) -> SamplingParams:
    return SamplingParams(**case.options)


def processed(case: Case, logits: np.ndarray, num_drafts: int, *, is_blind: bool = False) -> np.ndarray:
    """[contexts, VOCAB] float64 rows behind each context, its last ``num_drafts`` tokens being drafts."""
    grammars = Grammars(Vocabulary(tokenizer()), VOCAB, frozenset({EOS}))
    sampling = sampling_of(case)
    rows = logits.astype(np.float64)
    for context, row in zip(CONTEXTS, rows, strict=True):
        num_decided = max(0, len(context) - num_drafts)
        wanted = sampling.structured_outputs
        own = None if wanted is None else grammars.grammar(wanted, start_after=None)
        processors = Processors(sampling, PROMPT, frozenset({EOS}), case.bad_words, own)
        for token_id in context[:num_decided]:
            processors.observe(token_id)
        processors.apply(row, () if is_blind else context[num_decided:])
    return rows


@functools.cache
def tables(name: str, spread: float, num_drafts: int = 0) -> np.ndarray:
    return processed(CASES[name], raw(spread), num_drafts)


@functools.cache
def row(sampling: SamplingParams, seed: int, index: int) -> Row:
    return Row(sampling, seed, index)


def draw(table: np.ndarray, sampling: SamplingParams, contexts: list[Context], seeds: list[int]) -> list[int]:
    rows = [row(sampling, seed, len(context)) for context, seed in zip(contexts, seeds, strict=True)]
    return choose(torch.from_numpy(table[[PLACE[c] for c in contexts]]), rows).token_ids.tolist()


def simulate(name: str, draft: str, verify: list[np.ndarray]) -> tuple[Counter[Context], float]:
    """Outcomes of all seeds, and the acceptance. ``verify[i]``: the target's rows behind i drafts."""
    sampling, spread = sampling_of(CASES[name]), SPREADS[draft]
    proposals = tables(name, spread or 0.0)
    outputs: dict[int, Context] = dict.fromkeys(range(NUM_SEEDS), ())
    num_drafted = num_accepted = 0
    while seeds := [seed for seed, output in outputs.items() if len(output) < NUM_TOKENS]:
        drafts: dict[int, Context] = defaultdict(tuple)
        for _ in range(NUM_DRAFTS):
            drawn = draw(proposals, sampling, [outputs[s] + drafts[s] for s in seeds], seeds)
            for s, token_id in zip(seeds, drawn, strict=True):
                drafts[s] += (token_id if spread is not None else (token_id + 1) % VOCAB,)
        chosen = [
            draw(verify[i], sampling, [outputs[s] + drafts[s][:i] for s in seeds], seeds) for i in range(NUM_DRAFTS + 1)
        ]
        for s, *choices in zip(seeds, *chosen, strict=True):
            decided = accept(drafts[s], choices)
            outputs[s] = (outputs[s] + decided)[:NUM_TOKENS]
            num_accepted += len(decided) - 1
        num_drafted += NUM_DRAFTS * len(seeds)
    return Counter(outputs.values()), num_accepted / num_drafted


def expected(meaning: Callable[[Logits, Context], Logits]) -> dict[Context, float]:
    joint: dict[Context, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        joint = {
            (*c, i): p * q
            for c, p in joint.items()
            for i, q in weights(meaning(dict(enumerate(map(float, raw(0.0)[PLACE[c]]))), c)).items()
        }
    return joint


def p_value(counts: Counter[Context], joint: dict[Context, float]) -> float:
    """Cells of an expectation below 10 are one cell. An outcome of probability 0 is a failure by itself."""
    if counts.keys() - joint.keys():
        return 0.0
    small = [c for c, p in joint.items() if p * NUM_SEEDS < 10]
    cells = [[c] for c in joint if joint[c] * NUM_SEEDS >= 10] + ([small] if small else [])
    assert len(cells) > 5, "too few outcomes to tell anything"
    observed = [sum(counts[c] for c in cell) for cell in cells]
    return stats.chisquare(observed, [sum(joint[c] for c in cell) * NUM_SEEDS for cell in cells]).pvalue


@pytest.mark.parametrize("draft", SPREADS)
@pytest.mark.parametrize("name", CASES)
def test_joint_distribution_of_three_tokens(name, draft):
    counts, acceptance = simulate(name, draft, [tables(name, 0.0, i) for i in range(NUM_DRAFTS + 1)])
    assert p_value(counts, expected(CASES[name].meaning)) > 1e-4
    low, high = {"high": (0.7, 1.0), "low": (0.02, 0.6), "zero": (0.0, 0.0)}[draft]
    assert low <= acceptance <= high
    assert p_value(counts, expected(lambda logits, context: logits)) < 1e-4, "the option changes nothing here"


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_same_bits_wherever_the_drafts_begin(name):
    grammar_reads = np.array([all(i in grammar({i: 0.0}, c[:n]) for n, i in enumerate(c)) for c in CONTEXTS])
    is_read = grammar_reads if name == "structured_outputs" else slice(None)
    for num_drafts in range(1, NUM_TOKENS + NUM_DRAFTS):
        assert (tables(name, 0.0, num_drafts)[is_read] == tables(name, 0.0)[is_read]).all()


@pytest.mark.parametrize("draft", ["high", "low"])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_blind_to_drafts_are_caught(name, draft):
    blind = [processed(CASES[name], raw(0.0), i, is_blind=True) for i in range(NUM_DRAFTS + 1)]
    counts, _ = simulate(name, draft, blind)
    assert p_value(counts, expected(CASES[name].meaning)) < 1e-4


def test_choices_from_processed_rows_are_those_of_the_sampler_itself():
    """What the tables stand for: rows with their processors, in one call."""
    for name, case in CASES.items():
        sampling = sampling_of(case)
        if not Processors.are_needed(sampling) or sampling.structured_outputs:
            continue
        rows, contexts = [], [c for c in CONTEXTS if len(c) == NUM_TOKENS]
        for seed, context in enumerate(contexts):
            processors = Processors(sampling, PROMPT, frozenset({EOS}), case.bad_words)
            processors.observe(context[0])
            rows.append(Row(sampling, seed, NUM_TOKENS, processors, context[1:]))
        logits = torch.from_numpy(raw(0.0)[[PLACE[c] for c in contexts]])
        assert choose(logits, rows).token_ids.tolist() == draw(
            tables(name, 0.0), sampling, contexts, list(range(len(contexts)))
        )
