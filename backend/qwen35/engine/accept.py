"""The one acceptance rule, for greedy and sampled requests alike: a draft stays while it equals the target's choice."""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """The decided tokens of one verify: the accepted drafts and the bonus token, 1 to k + 1 of them.

    ``drafts``: d1..dk. ``choices``: c1..c(k+1), the target's choice after the golden token, after d1, … after dk.
    Choice i + 1 was made after d1..di: it counts only while those drafts are accepted, and is then decided too.
    """
    assert len(choices) == len(drafts) + 1, f"{len(drafts)} drafts need {len(drafts) + 1} choices, got {len(choices)}"
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return tuple(choices[: num_accepted + 1])  # accepted drafts equal the choices, the last one is the bonus
