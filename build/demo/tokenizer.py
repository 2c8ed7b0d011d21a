"""Byte-level BPE of the demo checkpoint: Qwen's special tokens and pre-tokenisation, trained on the demo's own text."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .config import CHECKPOINT_DIR, NUM_BPE_TOKENS, PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, TOKEN_ID
from .docs import training_documents

# One digit per token; letters with one leading mark or space; runs of other marks; line breaks; spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A tokenizer of NUM_BPE_TOKENS entries, then the special tokens with the ids of `config.TOKEN_ID`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token in SPECIAL_TOKENS, normalized=False)])
        if tokenizer.token_to_id(token) != TOKEN_ID[token]:
            raise ValueError(f"{token}: expected id {TOKEN_ID[token]}, got {tokenizer.token_to_id(token)}")
    return tokenizer


def tokenizer_config() -> dict:
    """tokenizer_config.json with the published field names."""
    added = {
        str(TOKEN_ID[token]): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + PLAIN_ADDED_TOKENS
    }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def training_texts(seed: int = 0, chats_per_task: int = 400) -> list[str]:
    """Documentation plus the generated chats, several times, so that the chats' words become single tokens."""
    from . import tasks

    rng = random.Random(seed)
    documents = training_documents()
    texts = list(documents)
    for task in tasks.TASKS:
        for _ in range(chats_per_task):
            chat = task(rng, documents)
            texts.extend(chat.texts())
    texts.extend(["system", "user", "assistant"] * 2000)
    return texts


def write_tokenizer(directory: Path) -> None:
    """Train and write tokenizer.json and tokenizer_config.json."""
    train_tokenizer(training_texts()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")


def load_tokenizer(directory: Path = CHECKPOINT_DIR):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
