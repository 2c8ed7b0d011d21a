"""The engine in one process over a complete random checkpoint: real arithmetic, real caches, every kind of prompt."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from build import native
from qwen35 import LLM, SamplingParams
from qwen35.errors import CheckpointError, InvalidArgument, StateError
from tests.drafters import OracleDrafter
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_quantised import make_tiny_quantised_checkpoint

SMALL = {"max_context_tokens": 256, "kv_cache_bytes": 4 << 20, "num_slots": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=14, ignore_eos=True, logprobs=2)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    stored = io.BytesIO()
    image.save(stored, "PNG")
    return stored.getvalue()


def question(*images, text: str = "what?") -> list[dict]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


PROMPTS = (
    "hello",
    list(range(1, 60)),
    question(text="no picture"),
    question(picture(64, 96)),
    question(picture(96, 64, 1), picture(64, 64, 2)),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llm") / "checkpoint")


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def kernels(request):
    """All of this module for each implementation of the arithmetic."""
    if request.param == "cpu":
        native.build()
    SMALL["kernels"] = request.param
    return request.param


@pytest.fixture(scope="module")
def plain(checkpoint, kernels):
    """What k = 0 says, each prompt alone."""
    llm = LLM(checkpoint, num_draft_tokens=0, **SMALL)
    return {id(s): [llm.generate([prompt], s)[0] for prompt in PROMPTS] for s in (GREEDY, SAMPLED)}


def outcome(completions) -> list[tuple]:
    """All but the counts of drafts: ids, text and, bit for bit, logprobs."""
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.cumulative_logprob) for c in completions]


@pytest.mark.parametrize(("num_draft_tokens", "sampling"), [(2, SAMPLED), (3, GREEDY)], ids=["sampled", "greedy"])
def test_speculative_equals_plain(checkpoint, plain, num_draft_tokens, sampling):
    llm = LLM(checkpoint, num_draft_tokens=num_draft_tokens, **SMALL)
    completions = llm.generate(PROMPTS, sampling)
    assert outcome(completions) == outcome(plain[id(sampling)])
    assert sum(c.num_draft_tokens for c in completions) > 0
    llm.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("num_draft_tokens", "wrong"), [(1, 0.5), (2, 0.3), (3, 0.0), (5, 0.2)])
def test_accepted_runs_of_every_length_change_nothing(checkpoint, plain, num_draft_tokens, wrong, sampling):
    llm = LLM(checkpoint, num_draft_tokens=num_draft_tokens, max_batch_tokens=17, **SMALL)
    known = {uid: completion.token_ids for uid, completion in enumerate(plain[id(sampling)])}
    llm.engine._drafter = OracleDrafter(known, wrong, seed=num_draft_tokens)
    completions = llm.generate(PROMPTS, sampling)
    assert outcome(completions) == outcome(plain[id(sampling)])
    drafted, accepted = (
        sum(getattr(c, name) for c in completions) for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert accepted == drafted if wrong == 0.0 else 0 < accepted < drafted


@pytest.mark.parametrize(
    "settings", [{"max_batch_tokens": 7, "num_slots": 2}, {"max_batch_tokens": 64, "block_tokens": 4}]
)
def test_chunks_slots_and_blocks_change_nothing(checkpoint, plain, settings):
    llm = LLM(checkpoint, num_draft_tokens=2, **SMALL | settings)
    for _ in range(2):  # slots and blocks are used again
        assert outcome(llm.generate(PROMPTS, SAMPLED)) == outcome(plain[id(SAMPLED)])


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "fp8"}, {"dtype": "float32"}, {"dtype": "float64"}])
def test_other_types_are_lossless_too(checkpoint, settings):
    runs = []
    for num_draft_tokens in (0, 3):
        llm = LLM(checkpoint, num_draft_tokens=num_draft_tokens, **SMALL, **settings)
        if num_draft_tokens:
            llm.engine._drafter = OracleDrafter({i: c.token_ids for i, c in enumerate(runs[0])}, 0.3, seed=1)
        runs.append(llm.generate(PROMPTS, SAMPLED))
    assert outcome(runs[0]) == outcome(runs[1])


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("NVFP4", {}), ("NVFP4", {"activations": "nvfp4", "kv_cache_dtype": "fp8"}), ("MIXED_PRECISION", {})],
)
def test_quantised_checkpoints_are_lossless_too(tmp_path, algorithm, settings):
    directory = make_tiny_quantised_checkpoint(tmp_path / "checkpoint", algorithm=algorithm, kv_scales=True)
    runs = []
    for num_draft_tokens in (0, 3):
        llm = LLM(directory, num_draft_tokens=num_draft_tokens, **SMALL, **settings)
        if num_draft_tokens:
            llm.engine._drafter = OracleDrafter({i: c.token_ids for i, c in enumerate(runs[0])}, 0.3, seed=1)
        runs.append(llm.generate(PROMPTS, GREEDY))
    assert outcome(runs[0]) == outcome(runs[1])


def test_every_form_of_an_image_is_the_same(checkpoint, tmp_path):
    llm = LLM(checkpoint, **SMALL)
    image = picture(64, 64, 3)
    (tmp_path / "image.png").write_bytes(png(image))
    uri = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    forms = [image, png(image), tmp_path / "image.png", str(tmp_path / "image.png"), uri]
    prompts = [question(form) for form in forms]
    prompts.append([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}},
                                                 {"type": "text", "text": "what?"}]}])  # fmt: skip
    first, *others = llm.generate(prompts, GREEDY)
    assert all(outcome([other]) == outcome([first]) for other in others)
    assert outcome(llm.generate([question(picture(64, 64, 4))], GREEDY)) != outcome([first])


def test_one_sampling_for_each_prompt_and_a_drawn_seed(checkpoint):
    llm = LLM(checkpoint, **SMALL)
    lengths = [3, 9]
    completions = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [len(c.token_ids) for c in completions] == lengths
    assert [c.finish_reason for c in completions] == ["length", "length"]
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    assert len({c.token_ids for c in llm.generate(["same"] * 3, free)}) == 3


def test_more_prompts_than_the_queue_takes(checkpoint):
    llm = LLM(checkpoint, **SMALL | {"max_queued_requests": 2})
    assert len(llm.generate([[i, 5] for i in range(12)], SamplingParams(max_tokens=2, ignore_eos=True))) == 12


REFUSED = [
    ("hello", None, "prompts: expected a list of prompts"),
    ([""], None, "text_input"),
    ([[]], None, "prompt_token_ids"),
    (["a"], [], "sampling: expected one for each of 1 prompts"),
    (["a", list(range(256))], None, "expected at most 255 tokens"),
    ([[{"role": "nobody", "content": "x"}]], None, r"messages\[0\].role"),
]


@pytest.mark.parametrize(("prompts", "sampling", "message"), REFUSED)
def test_refused_and_the_next_call_works(checkpoint, plain, prompts, sampling, message):
    llm = LLM(checkpoint, **SMALL)
    with pytest.raises(InvalidArgument, match=message):
        llm.generate(prompts, sampling)
    assert not llm.engine.has_work
    assert outcome(llm.generate(PROMPTS[:1], GREEDY)) == outcome(plain[id(GREEDY)][:1])
    llm.close()


def test_a_checkpoint_without_a_draft(tmp_path):
    directory = make_tiny_checkpoint(tmp_path / "checkpoint", mtp_layout=None)
    with pytest.raises(CheckpointError, match="mtp"):
        LLM(directory, **SMALL)
    assert LLM(directory, num_draft_tokens=0, **SMALL).generate(["a"], GREEDY)[0].num_draft_tokens == 0


def test_samples_come_prompt_by_prompt(checkpoint):
    llm = LLM(checkpoint, num_draft_tokens=2, **SMALL)
    completions = llm.generate(["hello", "you"], [replace(SAMPLED, n=3), SAMPLED])
    single = LLM(checkpoint, num_draft_tokens=0, **SMALL).generate(["hello", "you"], SAMPLED)
    assert len(completions) == 4
    assert [completions[0].token_ids, completions[3].token_ids] == [c.token_ids for c in single]
    assert completions[0].logprobs == single[0].logprobs
    assert len({c.token_ids for c in completions[:3]}) == 3
    llm.close()


def test_logprobs_of_prompts_with_pictures_do_not_depend_on_chunks_or_drafts(checkpoint):
    sampling = replace(GREEDY, prompt_logprobs=1)
    plain = LLM(checkpoint, num_draft_tokens=0, **SMALL).generate(PROMPTS, sampling)
    drafted = LLM(checkpoint, num_draft_tokens=3, max_batch_tokens=7, **SMALL).generate(PROMPTS, sampling)
    assert [c.prompt_logprobs for c in drafted] == [c.prompt_logprobs for c in plain]
    assert [len(c.prompt_logprobs) for c in plain] == [c.num_input_tokens - 1 for c in plain]


@pytest.mark.parametrize("sampling", [GREEDY, replace(SAMPLED, frequency_penalty=0.5)], ids=["greedy", "sampled"])
def test_a_session_goes_on_in_another_instance(checkpoint, tmp_path, sampling):
    saving, other = (LLM(checkpoint, num_draft_tokens=2, **SMALL) for _ in range(2))
    for number, prompt in enumerate(PROMPTS):
        [whole] = saving.generate([prompt], sampling)
        saving.save(saving.pause(prompt, sampling, num_tokens=1 + 3 * number), tmp_path / "session")
        session = other.load(tmp_path / "session")
        rest = other.resume(session)
        told = session.progress.token_ids
        assert len(told) > 3 * number and told + rest.token_ids == whole.token_ids
        assert whole.text.endswith(rest.text) and rest.logprobs == whole.logprobs[len(told) :]
        assert (rest.cumulative_logprob, rest.num_draft_tokens) == (whole.cumulative_logprob, whole.num_draft_tokens)
        longer = other.resume(saving.pause(prompt, sampling, num_tokens=99), max_new_tokens=4)
        [fourteen_and_four] = saving.generate([prompt], replace(sampling, max_tokens=18))
        assert longer.token_ids == fourteen_and_four.token_ids[14:]
    with pytest.raises(StateError, match="fingerprint: expected "):
        LLM(make_tiny_checkpoint(tmp_path / "other"), num_draft_tokens=2, **SMALL).load(tmp_path / "session")
    saving.close()
    other.close()
