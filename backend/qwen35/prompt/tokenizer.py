"""The checkpoint's tokenizer: text to ids with special tokens parsed, ids to text. Knows no chat template.

Special tokens are those that the tokenizer marks `special`; markup such as `<think>` is an ordinary added token.
The split at special tokens is done here and not by the library, so that one tokenizer object serves threads that
parse them and threads that don't (the library's switch for it is a property of the object).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from qwen35.errors import CheckpointError


class Tokenizer:
    """Thread-safe after construction. `backend` is the library's object, for incremental decoding."""

    def __init__(self, backend: tokenizers.Tokenizer, template_variables: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # to the library, special tokens are text
        self.backend = backend
        self.template_variables = MappingProxyType(dict(template_variables or {}))  # eos_token and the like
        self.special_tokens = MappingProxyType(_special_tokens(backend))  # text -> id
        self.special_ids = frozenset(self.special_tokens.values())
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_characters = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads tokenizer.json, and tokenizer_config.json where there is one. Raises CheckpointError."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"tokenizer: expected the file tokenizer.json in {directory}, found none")
        backend = tokenizers.Tokenizer.from_file(str(path))
        config = read_tokenizer_config(directory)
        _add_missing_tokens(backend, config.get("added_tokens_decoder", {}))
        return cls(backend, {name: text for name, value in config.items() if (text := _token_text(name, value))})

    def encode(self, text: str, guard: str | None = None) -> list[int]:
        """Special tokens become their ids. A literal that holds the character `guard` is text; guards are removed."""
        ids: list[int] = []
        for piece in self._split.split(text) if self._split else (text,):
            if piece in self.special_tokens:
                ids.append(self.special_tokens[piece])
            elif piece:
                ids.extend(self.encode_plain(piece.replace(guard, "") if guard else piece))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Every special-token literal is encoded as ordinary text."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; bytes that aren't a whole character show as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = directory / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    specials = {}
    for token_id, token in backend.get_added_tokens_decoder().items():
        if not token.special:
            continue
        if token.lstrip or token.rstrip or token.single_word or token.normalized:
            raise CheckpointError(
                f"tokenizer: special token {token.content!r}: expected lstrip, rstrip, single_word and normalized "
                "false, got one of them true"
            )
        specials[token.content] = token_id
    return specials


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds tokens that only tokenizer_config.json lists. Ids follow on in ascending order, as the file says."""
    for token_id, fields in sorted((int(key), value) for key, value in added.items()):
        token = tokenizers.AddedToken(**{name: value for name, value in fields.items() if name in _ADDED_TOKEN_FIELDS})
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"tokenizer: {token.content!r}: expected id {token_id} as in tokenizer_config.json, "
                f"got {backend.token_to_id(token.content)}"
            )


def _token_text(name: str, value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if name.endswith("_token") and isinstance(text, str) else None


_ADDED_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
