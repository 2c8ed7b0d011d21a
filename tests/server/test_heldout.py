"""A fixed part of the held-out sets through three live servers; the whole of them: `python -m perf.heldout`."""

import pytest

from perf import heldout

ITEMS_PER_SET = 16
MIN_ACCEPTANCE = 0.45  # accepted over drafted tokens, k = 3, greedy
MAX_DROP = 0.03  # of accuracy, bf16 to NVFP4


@pytest.fixture(scope="module")
def results() -> heldout.Results:
    results = heldout.run(heldout.items_of_all_sets(ITEMS_PER_SET))
    print(heldout.table(results))
    return results


def test_drafts_change_no_token(results: heldout.Results) -> None:
    assert results.different == []


def test_drafts_are_accepted(results: heldout.Results) -> None:
    assert results.acceptance >= MIN_ACCEPTANCE


def test_quantisation_costs_little(results: heldout.Results) -> None:
    assert results.drop <= MAX_DROP
