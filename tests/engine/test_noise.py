"""Noise: published SplitMix64 outputs, distribution, and independence of company."""

import numpy as np
import pytest
from scipy import stats

from qwen35.engine.noise import GUMBEL_MAX, GUMBEL_MIN, least_word, row_keys, words
from qwen35.engine.noise import gumbel as gumbel_of_words

# The first three outputs of SplitMix64 from state 0, as published with the algorithm.
SPLITMIX64_OF_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def gumbel(keys, token_ids):
    return gumbel_of_words(words(keys, token_ids))


def test_words_are_splitmix64():
    assert words(np.zeros(1, np.uint64), [0, 1, 2]).tolist() == [word >> 11 for word in SPLITMIX64_OF_0]
    uniform = np.array([(word >> 11) / 2.0**53 for word in SPLITMIX64_OF_0])
    assert gumbel(np.zeros(1, np.uint64), [0, 1, 2]).tolist() == (-np.log(-np.log(uniform))).tolist()


@pytest.mark.parametrize("axis", ["seed", "sample", "token_index", "token_id"])
def test_standard_gumbel_along_every_key(axis):
    count = np.arange(50_000)
    fixed = dict.fromkeys(("seed", "sample", "token_index", "token_id"), 7) | {axis: count}
    noise = gumbel(row_keys(fixed["seed"], fixed["sample"], fixed["token_index"]), fixed["token_id"])
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-4
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.02  # 4.5 standard deviations


def test_keys_do_not_collide_where_sums_would():
    keys = row_keys(*np.meshgrid(np.arange(30), np.arange(30), np.arange(30), indexing="ij"))
    assert len(np.unique(keys)) == 30**3


def test_seeds_up_to_64_bits():
    keys = row_keys([0, 2**63, 2**64 - 1], 0, 0)
    assert len(np.unique(keys)) == 3


def test_bits_do_not_depend_on_company():
    keys, token_ids = row_keys(np.arange(37), 0, 3), np.arange(1001)
    block = gumbel(keys[:, None], token_ids)
    for row in (0, 5, 36):
        for start in (0, 1, 2, 3, 5, 998):
            assert gumbel(keys[row : row + 1], token_ids[start:]).tolist() == block[row, start:].tolist()
            assert gumbel(keys[row : row + 1], token_ids[start : start + 1])[0] == block[row, start]


def test_extremes():
    assert gumbel_of_words(np.array([1, 2**53 - 1], np.uint64)).tolist() == [GUMBEL_MIN, GUMBEL_MAX]


def test_least_word_is_never_too_high_and_hardly_too_low():
    some = np.sort(words(row_keys(1, 0, 0), np.arange(100_000)))
    noise = gumbel_of_words(some)
    assert (least_word(noise) <= some).all()
    assert (least_word(noise) + np.uint64(1 << 14) >= some).all()
    assert least_word(np.array([-9.0, 50.0])).tolist() == [0, 2**53 - 2**13]
