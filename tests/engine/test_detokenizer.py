"""Text of tokens: equal to the library's, the same for every split, no broken characters, stop strings anywhere."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from qwen35.engine.detokenizer import TextStream, Vocabulary
from qwen35.engine.request import SamplingParams
from qwen35.errors import CheckpointError, InvalidArgument
from tests.engine.fakes import EOS, PIECES, VOCAB_SIZE, Rig, request, tokenizer

TOKENIZER = tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
ID = {piece: i for i, piece in enumerate(PIECES)}
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
# Split "é" and "€" often.
RICH = st.lists(
    st.sampled_from([ID[p] for p in ("a", "b", "ab", "Ã", "©", "âĤ", "¬", "ÿ", "Ġthe")] + [EOS]), max_size=30
)


def stream(token_ids, take_after=frozenset(), **sampling) -> tuple[list[str], int, bool]:
    """Texts taken (after the given tokens and at the end), tokens used, stopped or not."""
    text = TextStream(VOCABULARY, SamplingParams(**sampling))
    taken, num_used, is_stopped = [], 0, False
    for num_used, token_id in enumerate(token_ids, start=1):
        is_stopped = text.push(token_id)
        if num_used in take_after:
            taken.append(text.take(is_final=is_stopped))
        if is_stopped:
            break
    return [*taken, text.take(is_final=True)], num_used, is_stopped


def whole(token_ids, skip_special_tokens=True) -> str:
    """The library's text; a character that is incomplete at the very end is left out."""
    text = TOKENIZER.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    kept = [t for t in token_ids if not (skip_special_tokens and t in VOCABULARY.special_ids)]
    tail = b"".join(VOCABULARY.token_bytes(t) for t in kept)
    for length in (1, 2, 3):
        end = tail[-length:]
        if (
            len(end) == length
            and 0xC0 <= end[0] < 0xF8
            and length < (2 if end[0] < 0xE0 else 3 if end[0] < 0xF0 else 4)
        ):
            return text[:-1] if end[0] < 0xF5 and end[0] > 0xC1 else text
    return text


@settings(max_examples=300, deadline=None)
@given(st.one_of(TOKENS, RICH), st.sets(st.integers(0, 40)), st.booleans())
def test_any_split_concatenates_to_the_library_text(token_ids, take_after, skip_special_tokens):
    taken, _, _ = stream(token_ids, take_after, skip_special_tokens=skip_special_tokens)
    assert "".join(taken) == whole(token_ids, skip_special_tokens)


@settings(max_examples=300, deadline=None)
@given(RICH, st.sets(st.integers(0, 30)), st.lists(st.text("abé€ the", min_size=1, max_size=5), min_size=1, max_size=3),
       st.booleans())  # fmt: skip
def test_stop_strings_by_definition(token_ids, take_after, stops, include):
    """The reference reads character by character and stops at the first place where any stop string ends."""
    taken, num_used, is_stopped = stream(token_ids, take_after, stop=tuple(stops), include_stop_str_in_output=include)
    text = whole(token_ids)
    ends = [(end, end - len(s)) for s in stops for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    assert is_stopped == bool(ends)
    end, start = min(ends, default=(len(text), 0))
    assert "".join(taken) == (text if not ends else text[:end] if include else text[:start])
    if ends:  # the token that completes the stop string is the last one used
        assert len(whole(token_ids[: num_used - 1])) < end <= len(whole(token_ids[:num_used]))


@settings(max_examples=200, deadline=None)
@given(RICH, st.lists(st.text("abé€ the", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_held_longer_than_it_can_matter(token_ids, stops):
    text = TextStream(VOCABULARY, SamplingParams(stop=tuple(stops)))
    sent = ""
    for i, token_id in enumerate(token_ids):
        if text.push(token_id):
            break
        sent += text.take(is_final=False)
        decoded = whole(token_ids[: i + 1])
        held = decoded[len(sent) :]
        assert decoded.startswith(sent)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


TABLE = [
    # tokens, options, text, tokens used
    (["Ã", "©"], {}, "é", 2),
    (["a", "Ã"], {}, "a", 2),  # incomplete at the end: left out
    (["Ã", "a"], {}, "�a", 2),  # broken for good: as the library
    (["âĤ", "¬", "b"], {"stop": ("€",)}, "", 2),
    (["a", "b", "c"], {"stop": ("bc", "ab")}, "", 2),
    (["ab", "cd"], {"stop": ("abcd", "bc")}, "a", 2),  # the one that ends first, whatever the tokens are
    (["ab", "cd"], {"stop": ("d", "bcd")}, "a", 2),  # same end: the longest
    (["ab", "cd"], {"stop": ("bc",), "include_stop_str_in_output": True}, "abc", 2),
    (["a", "b"], {"stop": ("bc",)}, "ab", 2),  # held, then given out at the end
]


@pytest.mark.parametrize(("pieces", "options", "expected", "num_used"), TABLE)
def test_table(pieces, options, expected, num_used):
    taken, used, _ = stream([ID[piece] for piece in pieces], {1, 2, 3}, **options)
    assert ("".join(taken), used) == (expected, num_used)


def test_stop_strings_wait_for_min_tokens():
    text = TextStream(VOCABULARY, SamplingParams(stop=("ab",)))
    assert not text.push(ID["ab"], may_stop=False)
    assert not text.push(ID["a"])
    assert text.push(ID["b"])
    assert text.take(is_final=True) == "ab"


def test_a_long_stop_string_costs_no_memory():
    """Its prefixes are not spelt out: all of these would be 128 MiB."""
    tracemalloc.start()
    try:
        text, _, is_stopped = stream([0] * 4, stop=("a" * 16384,))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert "".join(text) == whole([0] * 4) and not is_stopped


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_much_text_to_compare_with_is_refused(name):
    with pytest.raises(InvalidArgument, match=f"{name}: expected at most 16384 characters in all, got 16386"):
        SamplingParams(**{name: ("ab",) * 8193})


def test_special_tokens_and_unknown_ids():
    assert stream([ID["a"], EOS, ID["b"]])[0] == ["ab"]
    assert stream([ID["a"], EOS, ID["b"]], skip_special_tokens=False)[0] == ["a<eos>b"]
    assert VOCABULARY.token_bytes(VOCAB_SIZE) == b""
    assert VOCABULARY.token_text(ID["Ã"]) == "�"


def test_another_decoder_is_refused():
    other = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    other.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="expected ByteLevel"):
        Vocabulary(other)


def test_bad_words_are_spelt_with_and_without_a_space():
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 2, "Ġa": 3}, merges=[("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    spell = Vocabulary(made).bad_word_token_ids
    assert spell(("a",)) == ((0,), (3,))
    assert spell((" ab",)) == ((0, 1), (3, 1))
    assert spell(("b",)) == ((1,),)  # " b" takes two tokens


@pytest.mark.parametrize("end", [("Ã",), ("a", "âĤ"), ("Ġthe",), ("ab", "ÿ")])
def test_nothing_of_a_prompt_gets_into_the_text(end):
    """Not even the first half of a character, nor the beginning of a stop string."""
    prompt = [ID[piece] for piece in end]
    rig = Rig()
    rig.run([request(prompt, uid=uid, seed=uid, temperature=1.5, max_tokens=12, ignore_eos=True, stop=("abcabc",))
             for uid in range(8)])  # fmt: skip
    for uid in range(8):
        assert rig.text(uid) == whole(rig.token_ids(uid), skip_special_tokens=True)
