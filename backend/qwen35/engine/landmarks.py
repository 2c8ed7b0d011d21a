"""Where checkpoints are worth their bytes: the places at which later requests branch, and every so many tokens.

    <|im_start|>system … <|im_end|>\\n          end of the system prompt
    <|im_start|>user … <|im_end|>\\n            end of the last message
    <|im_start|>assistant\\n                    a template that drops earlier thinking parts branches here
    <think>\\n                                  end of the prompt
    …                                          the last token of the answer that was fed

Chunks of a prompt end there, which changes no bit of what they compute. Where the last few tokens hold several such
places, they run as one piece whose inputs stay pending, and the state is brought to one place after the other."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from qwen35.engine.copies import interval_tokens
from qwen35.engine.detokenizer import Vocabulary
from qwen35.engine.sequence import Sequence
from qwen35.views import CacheView

TURN_START = "<|im_start|>"
SYSTEM = "system"


class Landmarks:
    """``interval_tokens`` between checkpoints of long texts; ``max_deferred_tokens`` can stay pending in a slot."""

    def __init__(self, vocabulary: Vocabulary, *, interval_tokens: int, max_deferred_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._turn_start = vocabulary.token_id(TURN_START)
        self._system = vocabulary.encode(SYSTEM)
        self._interval_tokens = interval_tokens
        self._max_deferred_tokens = max_deferred_tokens

    @classmethod
    def over(cls, cache: CacheView, vocabulary: Vocabulary) -> Landmarks:
        """Checkpoints so far apart that each takes fewer bytes than the keys and values between them."""
        num_deferred = cache.gated_delta[0].pending_inputs.shape[1]
        return cls(vocabulary, interval_tokens=interval_tokens(cache), max_deferred_tokens=num_deferred)

    def of_prompt(self, token_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Numbers of leading tokens, ascending; the whole prompt is the last."""
        turns = [index for index, token_id in enumerate(token_ids) if token_id == self._turn_start]
        found = {len(token_ids)}
        if turns:
            system = token_ids[turns[0] + 1 : turns[0] + 1 + len(self._system)]
            found |= {turns[1]} if len(turns) > 1 and list(system) == self._system else set()
            lines = (i + 1 for i in range(turns[-1], len(token_ids)) if self._ends_line(token_ids[i]))
            found |= {turns[-1], next(lines, len(token_ids))}
        return tuple(sorted(found - {0}))

    def between(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Places behind token ``start``, up to ``end``."""
        every = self._interval_tokens
        found = {place for place in sequence.landmarks if start < place <= end}
        return sorted(found.union(range(start // every * every + every, end + 1, every)))

    def end_of_piece(self, start: int, end: int, wanted: SequenceOf[int]) -> int:
        """Where a piece of a prompt from ``start`` ends that must not pass any of the places ``wanted``, all within
        ``end``: at the first of them, or at the last that can be reached with all inputs pending."""
        near = [place for place in wanted if place - start <= self._max_deferred_tokens]
        return near[-1] if near else min([end, *wanted])

    def _ends_line(self, token_id: int) -> bool:
        return self._vocabulary.token_bytes(token_id).endswith(b"\n")
