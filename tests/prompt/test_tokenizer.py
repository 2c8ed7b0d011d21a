import json

import pytest
import tokenizers

from qwen35.errors import CheckpointError
from qwen35.prompt.tokenizer import Tokenizer

TEXTS = [
    "", " ", "Hello world", "a\n\n  b\t c", "naïve 東京 🙂 12345", "<think>\nx\n</think>", "<|im_end|>", "<|im_end",
    "<|im_start|>user\nhi<|im_end|>\n",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_transformers(processor, reference_tokenizer, text):
    tokenizer = processor.tokenizer
    assert tokenizer.encode(text) == reference_tokenizer.encode(text, add_special_tokens=False)
    plain = reference_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.encode_plain(text) == plain
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_plain_text_holds_no_special_id(processor):
    tokenizer = processor.tokenizer
    everything = " ".join(tokenizer.special_tokens)
    assert not set(tokenizer.encode_plain(everything)) & tokenizer.special_ids
    assert len(tokenizer.special_ids & set(tokenizer.encode(everything))) == len(tokenizer.special_tokens) == 14


def test_decode_skips_special_tokens(processor):
    tokenizer = processor.tokenizer
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><think>b")) == "a<think>b"
    assert tokenizer.token_text(tokenizer.special_tokens["<|im_end|>"]) == "<|im_end|>"


def _write(directory, special: dict, config: dict) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_tokens([tokenizers.AddedToken("<|x|>", special=True, **special)])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokens_of_the_config_file_are_added(tmp_path):
    _write(tmp_path, {"normalized": False}, {"added_tokens_decoder": {"3": {"content": "<|y|>", "special": True}}})
    assert Tokenizer.from_directory(tmp_path).encode("a<|y|>b<|x|>") == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("special", "config", "message"),
    [
        ({"lstrip": True}, {}, "'<|x|>': expected lstrip"),
        ({}, {"added_tokens_decoder": {"9": {"content": "<|y|>"}}}, "'<|y|>': expected id 9 .* got 3"),
        ({}, {"added_tokens_decoder": {"1": {"content": "<|x|>"}}}, "'<|x|>': expected id 1 .* got 2"),
    ],
)
def test_refused_tokenizers(tmp_path, special, config, message):
    _write(tmp_path, {"normalized": False, **special}, config)
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        Tokenizer.from_directory(tmp_path)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
