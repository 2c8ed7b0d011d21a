"""Structured output: which tokens may come next so that the text fits a JSON schema, a regular expression, one of some
choices or a grammar. The library (llguidance) knows grammars; here it is turned into a mask of one position.

A grammar is advanced through the drafts and taken back, so that each verify row is masked as it would be without
drafting. A row behind a draft that the grammar forbids is left as it is: it is never read, because the target cannot
have chosen that draft."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray

from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.request import StructuredOutputs
from qwen35.errors import InvalidArgument

_SPECIAL_MARK = b"\xff"  # the library's: a byte that no text holds, so that no grammar of text allows a special token
_LIMITS = LLParserLimits(verbose_errors=False)  # else messages hold the whole grammar
_MAX_MESSAGE_CHARACTERS = 200


class Grammars:
    """Makes grammars over one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    def grammar(self, wanted: StructuredOutputs, *, start_after: int | None) -> Grammar:
        """``start_after``: the token (the end of a thinking part) behind which the grammar begins; None: it begins
        at once. Raises InvalidArgument for what the library can't read or refuses as too complex."""
        with self._lock:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, _definition(wanted), log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # some limits are only met here
        if matcher.is_error():
            raise _invalid(wanted.kind, matcher.get_error())
        return Grammar(matcher, self._vocab_size, self._eos_token_ids, start_after)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidArgument("structured_outputs: expected a checkpoint with an EOS token, got one without")
        eos_token_ids = sorted(self._eos_token_ids)
        wrapper = TokenizerWrapper(_Tokens(self._vocabulary, self._vocab_size, eos_token_ids[0]))
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=eos_token_ids)


class Grammar:
    """How far one sequence has come in its grammar. Ends with EOS; what follows that (ignore_eos) is free."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int], start_after: int | None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._start_after = start_after
        self._has_begun = start_after is None
        self._has_ended = False
        self.fault: str | None = None  # why there is no mask any more: the library met one of its limits

    def observe(self, token_id: int) -> None:
        """A token was decided."""
        if not self._has_begun:
            self._has_begun = token_id == self._start_after
        elif token_id in self._eos_token_ids:
            self._has_ended = True
        elif not self._has_ended and self.fault is None and not self._matcher.consume_token(token_id):
            self.fault = self._matcher.get_error()

    def apply(self, logits: NDArray[np.float64], drafts: Sequence[int]) -> None:
        """Forbids tokens in ``logits`` [V], for the position after all decided tokens and then ``drafts``."""
        within = self._within(drafts)
        if within is None:
            return
        num_fitting = self._matcher.try_consume_tokens(within) if within else 0
        if num_fitting == len(within):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            is_allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
            logits[~is_allowed] = -np.inf
        if num_fitting:
            self._matcher.rollback(num_fitting)
        if self._matcher.is_error():
            self.fault = self._matcher.get_error()
            logits[:] = -np.inf

    def _within(self, drafts: Sequence[int]) -> list[int] | None:
        """The drafts that the grammar has to take; None where it has not begun or has ended after them."""
        within = list(drafts)
        if not self._has_begun:
            if self._start_after not in within:
                return None
            within = within[within.index(self._start_after) + 1 :]
        has_ended = self._has_ended or not self._eos_token_ids.isdisjoint(within)
        return None if has_ended else within


class _Tokens:
    """The vocabulary in the form that the library reads. Ids behind the tokenizer's last are no token of any text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        special_ids = vocabulary.special_ids
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special_ids)
        self.tokens = [
            (_SPECIAL_MARK if token_id in special_ids else b"") + vocabulary.token_bytes(token_id)
            for token_id in range(vocab_size)
        ]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def _definition(wanted: StructuredOutputs) -> str:
    """The library's own form of the grammar."""
    try:
        if wanted.kind == "json":
            options = {"whitespace_flexible": wanted.any_whitespace}
            return LLMatcher.grammar_from_json_schema(wanted.text, overrides=options)
        return grammar_from(wanted.kind, wanted.text)
    except (ValueError, RecursionError) as error:
        raise _invalid(wanted.kind, str(error) or type(error).__name__) from error


def _invalid(kind: str, reason: str) -> InvalidArgument:
    reason = " ".join(reason.split())[:_MAX_MESSAGE_CHARACTERS]
    return InvalidArgument(f"structured_outputs.{kind}: expected {_EXPECTED[kind]}, got one that is refused: {reason}")


_EXPECTED = {
    "json": "a JSON schema",
    "regex": "a regular expression without look-around",
    "choice": "a list of texts",
    "grammar": "a grammar in Lark or GBNF form",
}
