"""The acceptance rule as a table."""

import pytest

from qwen35.engine.accept import accept

TABLE = [
    # drafts, choices, decided
    ((), (5,), (5,)),
    ((1,), (1, 2), (1, 2)),
    ((1,), (3, 2), (3,)),
    ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)),
    ((1, 2, 3), (1, 2, 9, 4), (1, 2, 9)),
    ((1, 2, 3), (1, 9, 3, 4), (1, 9)),  # a later match after a rejection counts for nothing
    ((1, 2, 3), (9, 2, 3, 4), (9,)),
    ((7, 7), (7, 7, 7), (7, 7, 7)),
]


@pytest.mark.parametrize(("drafts", "choices", "decided"), TABLE)
def test_table(drafts, choices, decided):
    assert accept(drafts, choices) == decided
