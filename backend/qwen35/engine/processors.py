"""What changes a row of logits before temperature and filters, in vLLM's order: grammar, thinking budget and allowed
tokens, bad words, min_tokens, logit bias, then repetition, presence and frequency penalties. Works on one row for the
tokens that stand before it, drafts included, so that a verify row sees what it would have seen without drafting.

Letters: V vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwen35.engine.grammar import Grammar
from qwen35.engine.request import SamplingParams


class Processors:
    """The per-row options of one sequence, with counts of what it has generated."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: frozenset[int],
        bad_word_token_ids: Sequence[tuple[int, ...]],
        grammar: Grammar | None = None,
        think_end: int | None = None,
    ) -> None:
        """``stop_token_ids``: what min_tokens forbids. ``bad_word_token_ids``: each word as the token ids that spell
        it. ``think_end``: the token that ends the thinking part which the prompt has opened; None: there is none."""
        self._sampling = sampling
        self._grammar = grammar
        self._think_end = think_end
        self._is_thinking = think_end is not None
        self._allowed_ids = np.array(sorted(set(sampling.allowed_token_ids or ())), dtype=np.int64)
        self._stop_ids = np.fromiter(sorted(stop_token_ids), dtype=np.int64)
        self._bad_words = tuple(bad_word_token_ids)
        self._bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        self._penalises_output = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._penalises_repetition = sampling.repetition_penalty != 1.0
        self._prompt_ids = frozenset(prompt_token_ids) if self._penalises_repetition else frozenset()
        self._generated: list[int] = []
        self._counts: Counter[int] = Counter()

    @staticmethod
    def are_needed(sampling: SamplingParams) -> bool:
        """Whether any option needs the row-by-row path."""
        return bool(
            sampling.structured_outputs
            or sampling.thinking_token_budget is not None
            or sampling.allowed_token_ids
            or sampling.bad_words
            or sampling.min_tokens
            or sampling.logit_bias
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
        )

    def observe(self, token_id: int) -> None:
        """A token was decided."""
        self._generated.append(token_id)
        self._counts[token_id] += 1
        self._is_thinking = self._is_thinking and token_id != self._think_end
        if self._grammar is not None:
            self._grammar.observe(token_id)

    @property
    def fault(self) -> str | None:
        """Why no token can be chosen after the decided ones, where the cause is the grammar."""
        return None if self._grammar is None else self._grammar.fault

    def apply(self, logits: NDArray[np.float64], drafts: Sequence[int]) -> None:
        """Changes ``logits`` [V] in place, for the position after all decided tokens and then ``drafts``."""
        if self._grammar is not None:
            self._grammar.apply(logits, drafts)
        self._forbid_all_but_some(logits, drafts)
        self._forbid(logits, drafts)
        np.add.at(logits, self._bias_ids, self._bias)
        counts = self._counts + Counter(drafts) if drafts else self._counts
        if self._penalises_repetition:
            self._penalise_repetition(logits, counts)
        if self._penalises_output and counts:
            token_ids = np.fromiter(counts.keys(), dtype=np.int64)
            occurrences = np.fromiter(counts.values(), dtype=np.float64)
            logits[token_ids] -= self._sampling.frequency_penalty * occurrences
            logits[token_ids] -= self._sampling.presence_penalty

    def _forbid_all_but_some(self, logits: NDArray[np.float64], drafts: Sequence[int]) -> None:
        budget = self._sampling.thinking_token_budget
        is_thinking = self._is_thinking and self._think_end not in drafts
        if budget is not None and is_thinking and len(self._generated) + len(drafts) >= budget:
            _keep_only(logits, np.array([self._think_end]))
        elif len(self._allowed_ids):
            _keep_only(logits, self._allowed_ids)

    def _forbid(self, logits: NDArray[np.float64], drafts: Sequence[int]) -> None:
        num_generated = len(self._generated) + len(drafts)
        for *start, last in self._bad_words:
            if len(start) <= num_generated and self._last(len(start), drafts) == start:
                logits[last] = -np.inf
        if num_generated < self._sampling.min_tokens:
            logits[self._stop_ids] = -np.inf

    def _last(self, num: int, drafts: Sequence[int]) -> list[int]:
        """The last ``num`` generated tokens, drafts included."""
        if num <= len(drafts):
            return list(drafts[len(drafts) - num :])
        return self._generated[len(self._generated) - (num - len(drafts)) :] + list(drafts)

    def _penalise_repetition(self, logits: NDArray[np.float64], counts: Counter[int]) -> None:
        seen = np.fromiter(self._prompt_ids.union(counts), dtype=np.int64)
        values = logits[seen]
        penalty = self._sampling.repetition_penalty
        logits[seen] = np.where(values > 0.0, values / penalty, values * penalty)


def _keep_only(logits: NDArray[np.float64], token_ids: NDArray[np.int64]) -> None:
    kept = logits[token_ids]
    logits[:] = -np.inf
    logits[token_ids] = kept
