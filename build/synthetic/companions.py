"""The files beside the weights: configurations, and the demo's tokenizer and chat template stretched to the vocabulary.

The special tokens stand where the published tokenizer has them, 276 before the end of the vocabulary (from 248044 of
248320 on); words that no text contains fill the gap, so that every id below has a text of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from build.demo.config import CHECKPOINT_DIR, NUM_BPE_TOKENS, TOKEN_ID

NUM_SPECIAL_IDS = 276
_TOKEN_IDS = {  # key of config.json: token
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_COPIED = ("chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json")


def write_companions(
    directory: Path, config: dict[str, Any], inside: dict[str, Any] | None, beside: dict[str, Any] | None
) -> None:
    """`config` without token ids; `inside` is its quantisation, `beside` the content of hf_quant_config.json."""
    text = config["text_config"]
    shift = id_shift(text["vocab_size"])
    ids = {key: TOKEN_ID[token] + shift for key, token in _TOKEN_IDS.items()}
    text = {**text, "eos_token_id": TOKEN_ID["<|endoftext|>"] + shift}
    whole = {**config, **ids, "text_config": text}
    write_json(directory / "config.json", whole if inside is None else {**whole, "quantization_config": inside})
    if beside is not None:
        write_json(directory / "hf_quant_config.json", beside)
    write_json(directory / "generation_config.json", _generation_config(shift))
    for name in _COPIED:
        shutil.copyfile(CHECKPOINT_DIR / name, directory / name)
    _write_tokenizer(directory, shift, text["max_position_embeddings"])


def id_shift(vocab_size: int) -> int:
    """From the demo's special tokens to those of a vocabulary of this size."""
    return vocab_size - NUM_SPECIAL_IDS - NUM_BPE_TOKENS


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _generation_config(shift: int) -> dict[str, Any]:
    end, text_end = TOKEN_ID["<|im_end|>"] + shift, TOKEN_ID["<|endoftext|>"] + shift
    return {"bos_token_id": text_end, "do_sample": False, "eos_token_id": [end, text_end], "pad_token_id": text_end}


def _write_tokenizer(directory: Path, shift: int, max_tokens: int) -> None:
    tokenizer = json.loads((CHECKPOINT_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    words = range(NUM_BPE_TOKENS, NUM_BPE_TOKENS + shift)
    tokenizer["model"]["vocab"] |= {f"Ġ{token_id}": token_id for token_id in words}
    for token in tokenizer["added_tokens"]:
        token["id"] += shift
    write_json(directory / "tokenizer.json", tokenizer)
    settings = json.loads((CHECKPOINT_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = settings["added_tokens_decoder"]
    settings["added_tokens_decoder"] = {str(int(token_id) + shift): token for token_id, token in added.items()}
    write_json(directory / "tokenizer_config.json", {**settings, "model_max_length": max_tokens})
