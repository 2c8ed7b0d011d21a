"""Bad words, min_tokens, bias and penalties against definitions written out by hand; drafts count as output."""

import numpy as np
import pytest

from qwen35.engine.processors import Processors
from qwen35.engine.request import SamplingParams

VOCAB = 8


def processed(values, *, prompt=(), output=(), drafts=(), stops=(), bad_words=(), **sampling):
    processors = Processors(SamplingParams(**{"max_tokens": 99, **sampling}), prompt, frozenset(stops), bad_words)
    for token_id in output:
        processors.observe(token_id)
    logits = np.array(values, dtype=np.float64)
    processors.apply(logits, drafts)
    return logits.tolist()


ONES = [1.0] * VOCAB
MIXED = [1.0, -1.0, 2.0, -2.0, 0.0, 3.0, -3.0, 4.0]
BANNED = -float("inf")


def changed(values, **changes):
    return [changes.get(f"t{i}", v) for i, v in enumerate(values)]


TABLE = [
    ("nothing", {}, MIXED, MIXED),
    ("bias", {"logit_bias": ((2, 1.5), (2, 0.5), (7, -4.0))}, MIXED, changed(MIXED, t2=4.0, t7=0.0)),
    ("frequency", {"frequency_penalty": 0.5, "output": (2, 2, 3)}, ONES, changed(ONES, t2=0.0, t3=0.5)),
    ("presence", {"presence_penalty": 0.5, "output": (2, 2, 3)}, ONES, changed(ONES, t2=0.5, t3=0.5)),
    ("drafts count", {"frequency_penalty": 0.5, "output": (2,), "drafts": (2, 4)}, ONES, changed(ONES, t2=0.0, t4=0.5)),
    ("prompt does not", {"frequency_penalty": 0.5, "prompt": (2,)}, ONES, ONES),
    ("repetition", {"repetition_penalty": 2.0, "prompt": (0, 1), "output": (7,), "drafts": (3,)}, MIXED,
     changed(MIXED, t0=0.5, t1=-2.0, t7=2.0, t3=-4.0)),
    ("repetition is before the others", {"repetition_penalty": 2.0, "presence_penalty": 1.0, "output": (7,)}, MIXED,
     changed(MIXED, t7=1.0)),
    ("bias is before penalties", {"repetition_penalty": 2.0, "logit_bias": ((7, 2.0),), "output": (7,)}, MIXED,
     changed(MIXED, t7=3.0)),
    ("min_tokens", {"min_tokens": 3, "stops": (1, 2), "output": (5,), "drafts": (5,)}, MIXED,
     changed(MIXED, t1=BANNED, t2=BANNED)),
    ("min_tokens reached", {"min_tokens": 3, "stops": (1, 2), "output": (5, 5), "drafts": (5,)}, MIXED, MIXED),
    ("bad word of one token", {"bad_words": ((4,),)}, ONES, changed(ONES, t4=BANNED)),
    ("bad word of three", {"bad_words": ((1, 2, 3),), "output": (0, 1, 2)}, ONES, changed(ONES, t3=BANNED)),
    ("across drafts", {"bad_words": ((1, 2, 3),), "output": (0, 1), "drafts": (2,)}, ONES, changed(ONES, t3=BANNED)),
    ("all in drafts", {"bad_words": ((1, 2, 3),), "output": (0,), "drafts": (1, 2)}, ONES, changed(ONES, t3=BANNED)),
    ("not yet", {"bad_words": ((1, 2, 3),), "output": (2,)}, ONES, ONES),
    ("prompt does not begin it", {"bad_words": ((1, 2),), "prompt": (1,)}, ONES, ONES),
    ("other start", {"bad_words": ((1, 2, 3),), "output": (2, 2)}, ONES, ONES),
]  # fmt: skip


@pytest.mark.parametrize(("options", "values", "expected"), [case[1:] for case in TABLE], ids=[c[0] for c in TABLE])
def test_table(options, values, expected):
    assert processed(values, **options) == expected


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({}, False), ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.3}, False), ({"bad_words": ("x",)}, True),
     ({"min_tokens": 1}, True), ({"logit_bias": ((1, 1.0),)}, True), ({"presence_penalty": 0.1}, True),
     ({"frequency_penalty": -0.1}, True), ({"repetition_penalty": 0.9}, True)],
)  # fmt: skip
def test_row_by_row_only_where_needed(sampling, expected):
    assert Processors.are_needed(SamplingParams(**sampling)) is expected


def test_drafts_leave_no_trace():
    processors = Processors(SamplingParams(frequency_penalty=1.0), (), frozenset(), ())
    processors.observe(1)
    for drafts in ((2, 3), ()):
        logits = np.zeros(VOCAB)
        processors.apply(logits, drafts)
    assert logits.tolist() == [0.0, -1.0, *[0.0] * 6]
