"""Structured output: which tokens may come next so that the text fits a JSON schema, a regular expression, one of some
choices or a grammar. The library (llguidance) knows grammars; here it is turned into a mask of one position.

Each verify row is masked as it would be without drafting. The library's limits depend on all that a matcher has ever
looked at, so there are two: one follows the decided tokens and does just what plain decoding does, mask by mask; the
other goes ahead through the drafts. Where that one meets a limit, its row counts as not verified; the faults of the
first alone end a request. A row behind a draft that the grammar forbids is left as it is: it is never read, because
the target cannot have chosen that draft."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

    def grammar(self, wanted: StructuredOutputs, *, start_after: int | None, looks_ahead: bool = True) -> Grammar:
        """``start_after``: the token (the end of a thinking part) behind which the grammar begins; None: it begins
        at once. ``looks_ahead``: drafts may come, what that takes is made ready. Raises InvalidArgument for what the
        library can't read or refuses as too complex."""
        with self._lock:
            tokenizer = self._tokenizer
        definition = _definition(wanted)

        def new_matcher() -> LLMatcher:
            return LLMatcher(tokenizer, definition, log_level=0, limits=_LIMITS)

        grammar = Grammar(new_matcher, self._vocab_size, self._eos_token_ids, start_after)
        if grammar.fault is not None:
            raise _invalid(wanted.kind, grammar.fault)
        if looks_ahead:
            grammar.look_ahead()
        return grammar

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
        self,
        new_matcher: Callable[[], LLMatcher],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        start_after: int | None,
    ) -> None:
        self._new_matcher = new_matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._start_after = start_after
        self._has_begun = start_after is None
        self._has_ended = False
        self._text: list[int] = []  # decided tokens of the grammar
        self._place = _Place(new_matcher())  # behind them
        self._ahead: dict[tuple[int, ...], _Place] = {}  # behind them and then these drafts, by the other matcher

    @property
    def fault(self) -> str | None:
        """Why there is no mask behind the decided tokens, when the library has met one of its limits."""
        return None if self._has_ended else self._place.fault

    def look_ahead(self) -> None:
        """Makes the matcher that goes through drafts, where there is none or it has met a limit: a new one has seen the
        decided tokens alone."""
        if not self._ahead:
            self._ahead = {(): _Place(self._new_matcher())}
            self._ahead[()].matcher.consume_tokens(self._text)

    def observe(self, token_id: int) -> None:
        """A token was decided."""
        if not self._has_begun:
            self._has_begun = token_id == self._start_after
        elif token_id in self._eos_token_ids:
            self._has_ended, self._ahead = True, {}
        elif not self._has_ended:
            self._text.append(token_id)
            self._place = self._place.advanced(token_id)
            self._ahead = self._ahead_of(token_id)

    def _ahead_of(self, token_id: int) -> dict[tuple[int, ...], _Place]:
        """What of the places behind drafts is left when ``token_id`` is decided."""
        if any(place.matcher.is_error() for place in self._ahead.values()):
            return {}
        if self._ahead and (token_id,) not in self._ahead:
            self._ahead[()].matcher.consume_token(token_id)
            return {(): _Place(self._ahead[()].matcher)}
        return {path[1:]: place for path, place in self._ahead.items() if path[:1] == (token_id,)}

    def apply(self, logits: NDArray[np.float64], drafts: Sequence[int]) -> None:
        """Forbids tokens in ``logits`` [V], for the position after all decided tokens and then ``drafts``: all of them
        where the library has met one of its limits."""
        within = self._within(drafts)
        place = None if within is None else self._place_behind(tuple(within))
        if place is None:
            return
        if place.fault is not None:
            logits[:] = -np.inf
            return
        bits = np.frombuffer(place.mask, dtype=np.uint8)
        is_allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        logits[~is_allowed] = -np.inf

    def _place_behind(self, drafts: tuple[int, ...]) -> _Place | None:
        """None where the grammar forbids one of them."""
        if not drafts:
            return self._place
        before = self._place_behind(drafts[:-1])
        if before is None or not before.allows(drafts[-1]):
            return None
        self.look_ahead()
        if drafts not in self._ahead:
            self._ahead[drafts] = _Place(self._ahead[drafts[:-1]].matcher.deep_copy())
            self._ahead[drafts].matcher.consume_token(drafts[-1])
        return self._ahead[drafts]

    def _within(self, drafts: Sequence[int]) -> list[int] | None:
        """The drafts that the grammar has to take; None where it has not begun or has ended after them."""
        within = list(drafts)
        if not self._has_begun:
            if self._start_after not in within:
                return None
            within = within[within.index(self._start_after) + 1 :]
        has_ended = self._has_ended or not self._eos_token_ids.isdisjoint(within)
        return None if has_ended else within


class _Place:
    """A matcher at one place of a text. Its mask is computed once, and before the matcher goes on."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @cached_property
    def mask(self) -> bytes:
        """A bit for each token, the lowest of a byte first."""
        return self.matcher.compute_bitmask()

    @cached_property
    def fault(self) -> str | None:
        """The limit that the library has met on the way to this mask."""
        _ = self.mask
        return self.matcher.get_error() if self.matcher.is_error() else None

    def allows(self, token_id: int) -> bool:
        return self.fault is None and bool(self.mask[token_id // 8] >> token_id % 8 & 1)

    def advanced(self, token_id: int) -> _Place:
        """Behind one more token; this place is of no use any more. A token that is not allowed is a fault there."""
        _ = self.mask
        self.matcher.consume_token(token_id)
        return _Place(self.matcher)


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
