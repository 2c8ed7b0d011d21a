"""Several samples of one prompt: each is what it would be alone, drafted or not; they end together only by an error."""

import pytest

from qwen35.engine.noise import row_keys
from qwen35.errors import Cancelled, Unavailable
from tests.engine.fakes import Rig, request

SAMPLED = {"temperature": 0.9, "max_tokens": 12, "logprobs": 1}


def outcome(rig: Rig, uid: int = 0) -> dict[int, tuple]:
    found: dict[int, tuple] = {}
    for index in sorted({emission.sample_index for emission in rig.emissions[uid]}):
        own = [emission for emission in rig.emissions[uid] if emission.sample_index == index]
        assert [emission.is_final for emission in own] == [False] * (len(own) - 1) + [True]
        token_ids = tuple(token_id for emission in own for token_id in emission.token_ids)
        logprobs = [entry for emission in own for entry in emission.logprobs]
        found[index] = (token_ids, "".join(e.text for e in own), own[-1].finish_reason, logprobs)
        assert own[-1].usage.num_output_tokens == len(token_ids)
    return found


def run(num_draft_tokens: int, n: int, num_slots: int = 4, others: int = 0) -> Rig:
    rig = Rig(num_draft_tokens=num_draft_tokens, num_slots=num_slots)
    company = [request((3, uid), uid=uid, seed=9, **SAMPLED) for uid in range(1, others + 1)]
    rig.run([request(seed=5, n=n, **SAMPLED), *company])
    return rig


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_samples_depend_on_neither_drafts_nor_company_nor_their_number(num_draft_tokens, num_slots):
    plain = outcome(run(0, n=5))
    assert sorted(plain) == list(range(5))
    assert len({token_ids for token_ids, *_ in plain.values()}) == 5
    assert outcome(run(num_draft_tokens, n=5, num_slots=num_slots, others=2)) == plain
    fewer = outcome(run(num_draft_tokens, n=2))
    assert fewer == {index: plain[index] for index in range(2)}
    assert outcome(run(num_draft_tokens, n=1))[0] == plain[0]


def test_noise_is_keyed_by_the_sample():
    assert len(set(row_keys([1] * 4, [0, 1, 2, 3], [7] * 4).tolist())) == 4


def test_one_abort_ends_all_samples():
    rig = Rig(num_slots=2)
    rig.engine.submit(request(n=4, max_tokens=100, ignore_eos=True))
    rig.step()
    rig.engine.abort(0)
    rig.run()
    finals = [emission for emission in rig.emissions[0] if emission.is_final]
    assert sorted(emission.sample_index for emission in finals) == [0, 1, 2, 3]
    assert all(isinstance(emission.error, Cancelled) for emission in finals)


def test_an_error_of_one_sample_ends_the_others():
    rig = Rig(num_slots=4)
    rig.engine.submit(request(n=3, max_tokens=100, ignore_eos=True))
    rig.engine.submit(request(uid=1))
    rig.step()
    rig.engine._live[0][1].error = Unavailable("cache: a test")
    rig.run()
    finals = [emission for emission in rig.emissions[0] if emission.is_final]
    assert sorted(emission.sample_index for emission in finals) == [0, 1, 2]
    assert {str(emission.error) for emission in finals} == {"UNAVAILABLE: cache: a test"}
    assert rig.final(1).error is None


def test_samples_count_for_the_queue():
    rig = Rig(max_queued_requests=3)
    with pytest.raises(Unavailable, match="at most 3 waiting samples, got 0 and 4 of this request"):
        rig.engine.submit(request(n=4))
    rig.run([request(uid=1, n=3)])
    assert len(outcome(rig, 1)) == 3
