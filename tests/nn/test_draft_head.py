"""The head over a part of the vocabulary: the whole head's logits there, -inf elsewhere; answers do not change."""

import pytest
import torch

from qwen35.engine.request import SamplingParams
from qwen35.errors import ConfigError
from qwen35.kernels.reference import ReferenceOps
from qwen35.llm import LLM
from qwen35.nn.draft_head import DraftHead, blocks_of, read_ranking
from qwen35.nvfp4 import FP8Tensor, NVFP4Panels, quantize_weight
from tests.tiny_checkpoint import make_tiny_checkpoint

V, H = 100, 32  # the last block has 4 tokens, and 28 rows of padding follow


def heads():
    dense = torch.randn(128, H, generator=torch.Generator().manual_seed(0))
    packed = quantize_weight(dense)
    fp8 = FP8Tensor((dense * 100).to(torch.float8_e4m3fn), torch.tensor(0.01))
    return {"dense": dense, "rows": packed, "panels": NVFP4Panels.from_rows(packed), "fp8": fp8}


@pytest.mark.parametrize("kind", ["dense", "rows", "panels", "fp8"])
@pytest.mark.parametrize("blocks", [[0], [0, 1, 2], [1, 4], [2, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_logits(kind, blocks):
    head, ops, hidden = heads()[kind], ReferenceOps(), torch.randn(3, H)
    token_ids = [i for i in range(V) if i // 16 in blocks]
    whole = ops.linear(hidden, head, out_dtype=torch.float32)[:, :V]
    found = DraftHead(head, V, blocks, ops).logits(hidden)
    assert found.shape == (3, V)
    torch.testing.assert_close(found[:, token_ids], whole[:, token_ids])
    assert found.isinf().sum() == 3 * (V - len(token_ids))


@pytest.mark.parametrize(
    ("num_tokens", "ranking", "expected"),
    [
        (1, (), [0]),
        (17, (), [0, 1]),
        (1000, (), [0, 1, 2, 3, 4, 5, 6]),
        (32, (40, 99, 41, 7), [2, 6]),  # blocks of the first in the list, the last block but 4 tokens of it
        (48, (40, 41), [0, 1, 2]),  # then the lowest
    ],
)
def test_blocks(num_tokens, ranking, expected):
    assert blocks_of(num_tokens, V, ranking) == expected


@pytest.mark.parametrize("text", ["3\nfour\n", "3\n100\n", "-1"])
def test_a_file_that_ranks_no_tokens(tmp_path, text):
    path = tmp_path / "ranking"
    path.write_text("5\n3\n")
    assert read_ranking(path, V) == [5, 3]
    path.write_text(text)
    with pytest.raises(ConfigError, match="draft_vocab_file"):
        read_ranking(path, V)
    with pytest.raises(ConfigError, match="draft_vocab_file"):
        read_ranking(tmp_path / "missing", V)


def test_answers_do_not_change(tmp_path):
    make_tiny_checkpoint(tmp_path / "tiny", with_vision=False)
    ranking = tmp_path / "ranking"
    ranking.write_text("200 201 90")
    answers = []
    for settings in ({"num_draft_tokens": 0}, {"draft_vocab_size": 32, "draft_vocab_file": str(ranking)}):
        llm = LLM(tmp_path / "tiny", max_context_tokens=128, **settings)
        sampling = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.9)]
        answers.append([(c.token_ids, c.num_draft_tokens > 0) for c in llm.generate(["abc"] * 2, sampling)])
        llm.close()
    assert [ids for ids, _ in answers[0]] == [ids for ids, _ in answers[1]]
    assert [drafts for _, drafts in answers[1]] == [True, True]
