"""Token ids to text, one token at a time, and the stop strings in that text.

Works on bytes: a byte-level token is a piece of UTF-8 that may end inside a character. The concatenation of what
comes out is the same for every way of splitting it, and equals the library's decode of all tokens at once, save that
a character that is still incomplete at the end is left out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from qwen35.engine.request import SamplingParams
from qwen35.errors import CheckpointError

THINK_START, THINK_END = "<think>", "</think>"


class Vocabulary:
    """Bytes of each token, special tokens, and encoding of plain text. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer | Any) -> None:
        """``tokenizer``: the library's object, or anything that holds one as ``backend`` or ``backend_tokenizer``."""
        backend = getattr(tokenizer, "backend", None) or getattr(tokenizer, "backend_tokenizer", None) or tokenizer
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError(f"tokenizer.json: decoder: expected ByteLevel, got {backend.decoder!r}")
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a token, maybe a part of a character; nothing for an id that the tokenizer does not have."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _to_bytes(self._backend.id_to_token(token_id) or "")
        return found

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; bytes that aren't a whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        """Of the one token that is spelt like this; None when there is none."""
        return self._backend.token_to_id(text)

    def open_think_end(self, token_ids: Sequence[int]) -> int | None:
        """The token that ends the thinking part which ``token_ids`` leave open; None when they leave none open."""
        start, end = (self._backend.token_to_id(text) for text in (THINK_START, THINK_END))
        last = next((token_id for token_id in reversed(token_ids) if token_id in (start, end)), None)
        return end if last is not None and last == start else None

    def bad_word_token_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word's spellings at the start of a text and after a space (as vLLM: the second only if it is as
        long)."""
        spellings: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.encode(word.lstrip()))
            spaced = tuple(self.encode(" " + word.lstrip()))
            spellings.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                spellings.append(spaced)
        return tuple(spellings)


class TextStream:
    """The text of one sequence: tokens in, text that may be sent out. Holds back what could be the start of a stop
    string.

    Of several stop strings in a text the one that ends first wins, and of those the longest: the result does not
    depend on how the text was split into tokens."""

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, not yet taken
        self._num_taken = 0  # characters of the whole text that have been taken
        self._num_checked = 0  # characters of the whole text in which stop strings have been sought, or must not be
        self._is_stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Append a token; True when a stop string is complete (the text is then cut). Without ``may_stop``, no stop
        string ends in this token's text."""
        if self._sampling.skip_special_tokens and token_id in self._vocabulary.special_ids:
            return False
        self._held += self._characters.decode(self._vocabulary.token_bytes(token_id))
        if may_stop:
            self._is_stopped = self._cut_at_stop()
        self._num_checked = self._num_taken + len(self._held)
        return self._is_stopped

    def take(self, is_final: bool) -> str:
        """Text that was not taken before and can be sent; all of it at the end."""
        num_characters = len(self._held) - (0 if is_final or self._is_stopped else self._num_undecided)
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        self._num_taken += len(text)
        return text

    def _cut_at_stop(self) -> bool:
        num_old = self._num_checked - self._num_taken
        found: list[tuple[int, int]] = []  # end, start
        for stop in self._sampling.stop:
            start = self._held.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return False
        end, start = min(found)
        self._held = self._held[: end if self._sampling.include_stop_str_in_output else start]
        return True

    @property
    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for length in range(min(len(self._held), self._longest_stop - 1), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0

    @cached_property
    def _stops(self) -> frozenset[str]:
        return frozenset(self._sampling.stop)

    @cached_property
    def _longest_stop(self) -> int:
        return max(map(len, self._stops), default=0)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet (GPT-2's `bytes_to_unicode`): printable bytes stand for themselves, others for U+0100
    on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _to_bytes(token: str) -> bytes:
    """A token with a character outside the alphabet is an added token, written as it is."""
    if all(character in _BYTE_OF_CHARACTER for character in token):
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    return token.encode("utf-8")
