"""Tensors of a pass: ranges, positions, tables, pending counts, merged embeddings."""

import torch

from qwen35.engine.batch import Piece, batch_view, embed, logit_inputs
from qwen35.engine.detokenizer import TextStream, Vocabulary
from qwen35.engine.sequence import Sequence
from tests.engine.fakes import IMAGE, FakeTarget, request, tokenizer

CPU = torch.device("cpu")
VOCABULARY = Vocabulary(tokenizer())


def sequence(token_ids, *, slot=0, block_ids=(0,), generated=(), **fields) -> Sequence:
    made = request(token_ids, **fields)
    placeholders = [i for i, token_id in enumerate(token_ids) if token_id == IMAGE]
    result = Sequence(
        made,
        max_total_tokens=100,
        max_draft_tokens=3,
        end_token_ids=frozenset(),
        text=TextStream(VOCABULARY, made.sampling),
        placeholder_indices=placeholders,
    )
    result.slot, result.block_ids = slot, tuple(block_ids)
    result.token_ids += generated
    return result


def picture() -> Sequence:
    """a, image of 2 x 2 tokens at position 1, b at position 3, then two generated tokens."""
    positions = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    rows = torch.tensor([[100.0, 1.0], [200.0, 2.0], [300.0, 3.0], [400.0, 4.0]])
    return sequence((0, IMAGE, IMAGE, IMAGE, IMAGE, 1), positions=positions, image_embeds=rows, generated=(5, 6))


def test_view_of_chunks_and_verifies():
    decoding = sequence((1, 2, 3), slot=3, block_ids=(9, 4), generated=(7,))
    decoding.num_pending = 2
    pieces = [
        Piece(decoding, 3, num_decided=1, drafts=(8, 9), is_deferred=True),
        Piece(sequence(range(6), slot=1, block_ids=(5, 6, 7)), 2, num_decided=3),
    ]
    view = batch_view(pieces, CPU)
    assert view.cu_tokens.tolist() == [0, 3, 6]
    assert view.positions.tolist() == [[3, 4, 5, 2, 3, 4]] * 3
    assert view.kv_start.tolist() == [3, 2]
    assert view.first_kv.tolist() == [0, 0]
    assert view.block_table.tolist() == [[9, 4, 0], [5, 6, 7]]
    assert view.slots.tolist() == [3, 1]
    assert view.num_pending.tolist() == [2, 0]
    assert view.defer.tolist() == [True, False]
    assert [piece.token_ids for piece in pieces] == [[7, 8, 9], [2, 3, 4]]
    assert logit_inputs(pieces, torch.arange(6)).tolist() == [0, 1, 2]  # the chunk stops before its prompt's last token
    assert all(x.dtype == torch.int64 for x in (view.cu_tokens, view.positions, view.kv_start, view.block_table))


def test_last_chunk_needs_one_row_of_logits():
    pieces = [Piece(sequence(range(6)), 2, num_decided=4), Piece(sequence(range(3), generated=(9,)), 3, num_decided=1)]
    assert logit_inputs(pieces, torch.arange(5)).tolist() == [3, 4]


def test_a_piece_without_inputs_has_the_row_that_was_stored():
    whole = sequence(range(6))
    whole.boundary = torch.tensor([70])
    decode = sequence(range(3), generated=(9,))
    pieces = [Piece(decode, 3, num_decided=1), Piece(whole, 6, num_decided=0), Piece(sequence(range(4)), 0, 4)]
    assert logit_inputs(pieces, torch.arange(5)).tolist() == [0, 70, 4]


def test_draft_pass_has_the_positions_before_and_no_state():
    made = picture()
    made.num_pending = 2
    view = batch_view([Piece(made, 3, num_decided=4, is_draft_pass=True)], CPU)
    assert view.positions.tolist() == [[1, 1, 1, 3], [1, 2, 2, 3], [2, 1, 2, 3]]  # tokens 2..5 for entries 3..6
    assert (view.kv_start.tolist(), view.first_kv.tolist(), view.num_pending.tolist()) == ([3], [1], [0])
    assert view.defer.tolist() == [False]


def test_rotary_positions_go_on_behind_the_largest():
    made = picture()
    assert made.rotary_positions(4, 8).tolist() == [[1, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert made.rotary_positions(6, 8).tolist() == [[4, 5]] * 3  # not their indices: the image takes 2 positions of 4


def test_image_rows_replace_placeholders_in_any_chunk():
    whole = embed([Piece(picture(), 0, num_decided=8)], FakeTarget(), CPU)
    assert whole[:, 0].tolist() == [0, 100, 200, 300, 400, 1, 5, 6]
    assert whole[1:5, 1].tolist() == [1, 2, 3, 4]
    for start in range(8):
        for end in range(start + 1, 9):
            text = Piece(sequence((3, 4)), 0, num_decided=2)
            parts = embed([text, Piece(picture(), start, num_decided=end - start), text], FakeTarget(), CPU)
            assert parts[2:-2].tolist() == whole[start:end].tolist()
            assert parts[[0, 1, -2, -1], 0].tolist() == [3, 4, 3, 4]


def test_a_generated_placeholder_token_is_an_ordinary_token():
    made = sequence((1, 2), generated=(IMAGE,))
    assert embed([Piece(made, 2, num_decided=1)], FakeTarget(), CPU)[0].tolist() == [IMAGE, 0]
