"""Structured output under drafting: masks are those of plain decoding, the text fits, and no draft decides anything."""

import random
import re

import numpy as np
import pytest
from llguidance import LLParserLimits

from qwen35.engine import grammar as grammar_module
from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.grammar import Grammar, Grammars
from qwen35.engine.request import StructuredOutputs
from qwen35.errors import InvalidArgument
from tests.drafters import OracleDrafter
from tests.engine.fakes import EOS, THINK, THINK_END, VOCAB_SIZE, Rig, request, tokenizer

REGEX = StructuredOutputs("regex", "(ab|c|d e){3,7}f*")
EXPRESSION = StructuredOutputs("grammar", 'root ::= "a" root "b" | "c" | "d" root')
IN_VOCABULARY = [REGEX, EXPRESSION, StructuredOutputs("choice", '["abcd", "abed", "a", "ponm"]')]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Vocabulary(tokenizer()), VOCAB_SIZE, frozenset({EOS}))


def allowed(grammar, drafts=()) -> list[int]:
    logits = np.zeros(VOCAB_SIZE)
    grammar.apply(logits, drafts)
    return np.flatnonzero(logits == 0.0).tolist()


def walk(grammars, wanted, seed: int) -> list[int]:
    """A random text of the grammar, one token at a time, until EOS."""
    grammar, path = grammars.grammar(wanted, start_after=None), []
    while not path or path[-1] != EOS:
        path.append(random.Random(f"{seed} {len(path)}").choice(allowed(grammar)))
        grammar.observe(path[-1])
    return path


@pytest.mark.parametrize("wanted", IN_VOCABULARY, ids=lambda wanted: wanted.kind)
def test_a_mask_behind_drafts_is_the_mask_behind_decided_tokens(grammars, wanted):
    """For every split of a text into decided tokens and drafts; and nothing of the drafts is left behind."""
    for seed in range(12):
        path = walk(grammars, wanted, seed)[:-1]
        plain = grammars.grammar(wanted, start_after=None)
        masks = []
        for token_id in [*path, None]:
            masks.append(allowed(plain))
            if token_id is not None:
                plain.observe(token_id)
        drafted = grammars.grammar(wanted, start_after=None)
        for start in range(len(path) + 1):
            for end in random.Random(seed).sample(range(start, len(path) + 1), len(path) + 1 - start):
                assert allowed(drafted, tuple(path[start:end])) == masks[end]
            if start < len(path):
                drafted.observe(path[start])
        assert masks[0] != masks[-1] and drafted.fault is None


def test_a_row_behind_a_forbidden_draft_is_left_alone_and_spoils_nothing(grammars):
    grammar = grammars.grammar(REGEX, start_after=None)
    before = allowed(grammar)
    a, b, c = (tokenizer().token_to_id(text) for text in "abc")
    assert a in before and b not in before
    for drafts in ((b,), (a, a), (a, b, EOS, c), (EOS,), (31, 30)):
        assert len(allowed(grammar, drafts)) == VOCAB_SIZE
        assert allowed(grammar) == before


AB = tokenizer().token_to_id("ab")
EXPONENTIAL = StructuredOutputs("regex", "(a[ab]{4}|b[ab]*a[ab]{8})c")  # each way behind a "b" makes new states


@pytest.fixture
def small_limit(monkeypatch, grammars):
    """Of the states that a matcher may make in all of its life. Makes a grammar under it."""

    def limited(max_states: int) -> Grammar:
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=max_states)
        monkeypatch.setattr(grammar_module, "_LIMITS", limits)
        return grammars.grammar(EXPONENTIAL, start_after=None)

    return limited


def letters(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().token_to_id(letter) for letter in text)


def faults(grammar, path, drafts_at) -> list[tuple[list[int], str | None]]:
    """Masks and faults along a text, when at each place drafts are looked at before a token is decided."""
    seen = []
    for place, token_id in enumerate(path):
        for drafts in drafts_at(place):
            for end in range(1, len(drafts) + 1):
                allowed(grammar, drafts[:end])
        seen.append((allowed(grammar), grammar.fault))
        grammar.observe(token_id)
    return seen


def test_limits_are_met_where_plain_decoding_meets_them(small_limit):
    """The library counts what a matcher has ever seen: rejected drafts must not count, accepted ones once."""
    path = letters("babbaababbabababbab")
    plain = faults(small_limit(40), path, lambda place: ())
    assert plain[0] == (list(range(2)) + [AB], None) and plain[-1][0] == [] and "too many states" in plain[-1][1]
    wrong = [letters("aaaaaaaa"), letters("bbbabaaab"), letters("abababab")]
    assert faults(small_limit(40), path, lambda place: wrong) == plain
    assert faults(small_limit(40), path, lambda place: [path[place : place + 5]]) == plain
    assert faults(small_limit(40), path, lambda place: [*wrong, path[place : place + 3]]) == plain


def test_a_limit_behind_a_rejected_draft_is_nobodys_error(small_limit):
    wanted = {"structured_outputs": EXPONENTIAL, "logit_bias": tuple((t, -60.0) for t in letters("b")), "logprobs": 1}
    drafts = letters("baaaaaaaaaaaaaaaa")
    assert [] in [allowed(small_limit(24), drafts[:end]) for end in range(5)]
    plain = Rig(num_draft_tokens=0)
    plain.run([request(max_tokens=20, **wanted)])
    rig = Rig(num_draft_tokens=5, draft="right")
    rig.engine._drafter = OracleDrafter({0: drafts[:1] + drafts}, wrong=0.0)
    rig.run([request(max_tokens=20, **wanted)])
    assert plain.text().startswith("a") and outcome(rig) == outcome(plain)
    assert rig.final().usage.num_draft_tokens > 0


@pytest.mark.parametrize("draft", ["right", "mixed", "wrong"])
@pytest.mark.parametrize("num_draft_tokens", [1, 5])
def test_a_limit_behind_decided_tokens_ends_the_request_at_the_same_place(small_limit, num_draft_tokens, draft):
    wanted = StructuredOutputs("regex", "b[ab]*a[ab]{8}c")
    small_limit(28)
    ended = []
    for k in (0, num_draft_tokens):
        rig = Rig(num_draft_tokens=k, draft=draft)
        rig.run([request(max_tokens=40, structured_outputs=wanted, temperature=1.0, logprobs=1)])
        ended.append((outcome(rig), str(rig.final().error)))
    assert ended[0] == ended[1] and len(ended[0][0][0]) > 3
    assert "structured_outputs: expected a grammar within the library's limits, got: " in ended[0][1]


@pytest.mark.parametrize("wanted", IN_VOCABULARY, ids=lambda wanted: wanted.kind)
def test_eos_only_where_the_text_is_complete_and_free_after_it(grammars, wanted):
    path = walk(grammars, wanted, seed=1)
    grammar = grammars.grammar(wanted, start_after=None)
    assert EOS not in allowed(grammar)
    for token_id in path:
        grammar.observe(token_id)
    assert len(allowed(grammar)) == len(allowed(grammar, (1, EOS, 2))) == VOCAB_SIZE


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_it_begins_behind_the_thinking_part_wherever_that_ends(grammars, num_before):
    """The end of thinking among decided tokens, as the last draft, or inside a run of drafts."""
    first = allowed(grammars.grammar(REGEX, start_after=None))
    second = allowed(grammars.grammar(REGEX, start_after=None), (first[0],))
    grammar = grammars.grammar(REGEX, start_after=THINK_END)
    thoughts = (17, EOS, 9)[:num_before]
    assert len(allowed(grammar, thoughts)) == VOCAB_SIZE
    assert allowed(grammar, (*thoughts, THINK_END)) == first
    assert allowed(grammar, (*thoughts, THINK_END, first[0])) == second
    for token_id in (*thoughts, THINK_END):
        grammar.observe(token_id)
    assert allowed(grammar) == first
    assert allowed(grammar, first[:1]) == second


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (StructuredOutputs("json", '{"type": "nonsense"}'), r"structured_outputs\.json: .*nonsense"),
        (StructuredOutputs("json", "{"), r"structured_outputs\.json: expected a JSON schema"),
        (StructuredOutputs("regex", "("), r"structured_outputs\.regex: expected a regular expression .*unclosed"),
        (StructuredOutputs("regex", "a(?!b)"), r"structured_outputs\.regex: .*look-a"),
        (StructuredOutputs("grammar", "root ::= foo"), r"structured_outputs\.grammar: expected a grammar .*foo"),
        (StructuredOutputs("grammar", ""), r"structured_outputs\.grammar: expected a grammar"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_at_admission(wanted, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        Rig().engine.submit(request(structured_outputs=wanted))
    assert len(str(caught.value)) < 350


def outcome(rig: Rig, uid: int = 0) -> tuple:
    logprobs = [entry for emission in rig.emissions[uid] for entry in emission.logprobs]
    return rig.token_ids(uid), rig.text(uid), rig.final(uid).finish_reason, logprobs


def run(num_draft_tokens: int, draft="mixed", prompt=(0, 1, 2), **sampling) -> Rig:
    rig = Rig(num_draft_tokens=num_draft_tokens, draft=draft, num_slots=8)
    options = {"temperature": 1.0, "max_tokens": 40, "logprobs": 2, **sampling}
    rig.run([request(prompt, uid=uid, seed=uid, structured_outputs=wanted, **options)
             for uid, wanted in enumerate([*IN_VOCABULARY, REGEX, EXPRESSION, None])])  # fmt: skip
    return rig


@pytest.mark.parametrize("draft", ["right", "mixed", "wrong"])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculative_equals_plain_and_fits(num_draft_tokens, draft, temperature):
    plain = run(0, temperature=temperature)
    rig = run(num_draft_tokens, draft, temperature=temperature)
    assert [outcome(rig, uid) for uid in range(6)] == [outcome(plain, uid) for uid in range(6)]
    for uid, wanted in enumerate([*IN_VOCABULARY, REGEX, EXPRESSION]):
        text, reason = rig.text(uid), rig.final(uid).finish_reason
        if reason == "stop":
            fits = {"regex": lambda t: re.fullmatch(REGEX.text, t), "grammar": lambda t: re.fullmatch("[ad]*cb*", t),
                    "choice": lambda t: t in ("abcd", "abed", "a", "ponm")}  # fmt: skip
            assert fits[wanted.kind](text), text
    assert [plain.final(uid).finish_reason for uid in range(6)].count("stop") >= 4
    metrics = rig.engine.metrics
    assert metrics.num_accepted_draft_tokens > 0 or draft == "wrong"


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_drafts_that_the_grammar_forbids(num_draft_tokens):
    """A drafter that knows no grammar and is mostly wrong: its drafts are rejected, the answer stays."""
    plain = run(0)
    rig = Rig(num_draft_tokens=num_draft_tokens, draft="right", num_slots=8)
    rig.engine._drafter = OracleDrafter({0: plain.token_ids(0) + (0,) * 8}, wrong=0.5)
    rig.run([request(seed=0, temperature=1.0, max_tokens=40, logprobs=2, structured_outputs=IN_VOCABULARY[0])])
    assert outcome(rig) == outcome(plain, 0)
    usage = rig.final().usage
    assert 0 < usage.num_accepted_draft_tokens < usage.num_draft_tokens


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 7])
def test_thinking_budget_and_then_the_grammar(num_draft_tokens, budget):
    """The forced end falls on every place of an accepted run."""
    options = {"prompt": (0, THINK), "thinking_token_budget": budget, "bad_words": (), "ignore_eos": False}
    plain = run(0, "right", **options)
    rig = run(num_draft_tokens, "right", **options)
    for uid in range(5):
        assert outcome(rig, uid) == outcome(plain, uid)
        token_ids = rig.token_ids(uid)
        if THINK_END in token_ids:
            assert token_ids.index(THINK_END) <= budget
        else:
            assert token_ids[-1] == EOS and len(token_ids) <= budget
    ended = [rig.token_ids(uid) for uid in range(5) if THINK_END in rig.token_ids(uid)]
    assert any(token_ids.index(THINK_END) == budget for token_ids in ended)
    for uid in (0, 3):
        text = rig.text(uid)
        if "</think>" in text and rig.final(uid).finish_reason == "stop":
            assert re.fullmatch(REGEX.text, text.split("</think>", 1)[1])


def test_without_an_open_thinking_part_the_budget_does_nothing():
    free = run(3)
    assert outcome(run(3, thinking_token_budget=0)) == outcome(free)
    assert outcome(run(3, prompt=(THINK, 1, THINK_END), thinking_token_budget=0))[0][0] != THINK_END


def test_options_that_leave_no_token_are_an_error_of_the_request_alone():
    rig = Rig()
    other = request(uid=1)
    rig.run([request(structured_outputs=StructuredOutputs("choice", '["a"]'), min_tokens=5), other])
    assert "sampling: expected options that leave a token" in str(rig.final(0).error)
    assert rig.final(1).error is None


def test_a_vocabulary_of_full_size():
    grammars = Grammars(Vocabulary(tokenizer()), 248_320, frozenset({EOS}))
    logits = np.zeros(248_320)
    grammars.grammar(REGEX, start_after=None).apply(logits, ())
    texts = {tokenizer().id_to_token(int(token_id)) for token_id in np.flatnonzero(logits == 0.0)}
    assert texts == {"a", "ab", "c", "cd", "d"}
