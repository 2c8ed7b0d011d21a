"""From a request to a sequence: everything that can be wrong with a request is found here, before it waits for
anything."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qwen35.engine.detokenizer import TextStream, Vocabulary
from qwen35.engine.grammar import Grammars
from qwen35.engine.prefix import Query, hasher_of
from qwen35.engine.processors import Processors
from qwen35.engine.request import Request
from qwen35.engine.sequence import Sequence, can_draft
from qwen35.errors import InvalidArgument


class Admission:
    """Thread-safe: holds what does not change."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        placeholder_token_ids: frozenset[int],
        max_context_tokens: int,
        block_tokens: int,
        num_total_blocks: int,
        num_draft_tokens: int,
    ) -> None:
        """``num_total_blocks``: all there will ever be. ``placeholder_token_ids``: image and video tokens."""
        self._vocabulary = vocabulary
        self._grammars = Grammars(vocabulary, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._placeholder_token_ids = placeholder_token_ids
        self._max_context_tokens = max_context_tokens
        self._block_tokens = block_tokens
        self._num_total_blocks = num_total_blocks
        self._num_draft_tokens = num_draft_tokens

    def sequence(self, request: Request) -> Sequence:
        """Raises InvalidArgument for a prompt that is empty, too long, out of vocabulary or at odds with its images,
        for options that name no token, for a grammar that is none, and for a request that can never fit into the
        cache."""
        sampling = request.sampling
        max_total_tokens = self._max_total_tokens(request)
        placeholders = self._placeholder_indices(request)
        self._check_positions(request.positions, len(request.token_ids))
        self._check_token_ids("token_ids", request.token_ids)
        self._check_token_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_token_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        eos_token_ids = frozenset() if sampling.ignore_eos else self._eos_token_ids
        end_token_ids = eos_token_ids | frozenset(sampling.stop_token_ids)
        return Sequence(
            request,
            max_total_tokens=max_total_tokens,
            max_draft_tokens=self._max_draft_tokens(request),
            end_token_ids=end_token_ids,
            text=TextStream(self._vocabulary, sampling),
            processors=self._processors(request, end_token_ids),
            placeholder_indices=placeholders,
        )

    def query(self, request: Request) -> Query | None:
        """What a request would start from; None when that must be nothing."""
        hasher = hasher_of(request, self._placeholder_indices(request), self._block_tokens)
        if hasher is None or (request.sampling.prompt_logprobs is not None and request.sampling.n == 1):
            return None
        num_tokens, num_drafts = len(request.token_ids), self._max_draft_tokens(request)
        return Query(hasher, num_tokens, can_draft(num_drafts, num_tokens, self._max_total_tokens(request)))

    def _max_draft_tokens(self, request: Request) -> int:
        wanted = request.sampling.num_draft_tokens
        return self._num_draft_tokens if wanted is None else min(wanted, self._num_draft_tokens)

    def _max_total_tokens(self, request: Request) -> int:
        num_prompt_tokens, limit = len(request.token_ids), self._max_context_tokens
        if not 1 <= num_prompt_tokens < limit:
            raise InvalidArgument(
                f"prompt: expected 1 to {limit - 1} tokens (the context holds {limit}, one must be left to generate), "
                f"got {num_prompt_tokens}"
            )
        num_tokens = min(num_prompt_tokens + request.sampling.max_tokens, limit)
        num_blocks = -(-num_tokens // self._block_tokens)
        if num_blocks > self._num_total_blocks:
            raise InvalidArgument(
                f"max_tokens: expected prompt and output to fit into the KV cache of {self._num_total_blocks} blocks "
                f"({self._num_total_blocks * self._block_tokens} tokens), got {num_prompt_tokens} + "
                f"{num_tokens - num_prompt_tokens} tokens ({num_blocks} blocks); lower max_tokens or raise "
                "kv_cache_bytes"
            )
        return num_tokens

    def _placeholder_indices(self, request: Request) -> list[int]:
        wanted = self._placeholder_token_ids
        indices = [i for i, token_id in enumerate(request.token_ids) if token_id in wanted] if wanted else []
        if len(indices) != len(request.image_embeds):
            raise InvalidArgument(
                f"image: expected one embedding for each of {len(indices)} placeholder tokens of the prompt, "
                f"got {len(request.image_embeds)}"
            )
        return indices

    def _check_token_ids(self, name: str, token_ids: Any) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidArgument.field(name, f"token ids from 0 to {self._vocab_size - 1}", token_id)

    @staticmethod
    def _check_positions(positions: Tensor, num_tokens: int) -> None:
        if tuple(positions.shape) != (3, num_tokens):
            raise InvalidArgument.field("positions", f"shape [3, {num_tokens}]", tuple(positions.shape))

    def _processors(self, request: Request, end_token_ids: frozenset[int]) -> Processors | None:
        sampling = request.sampling
        if not Processors.are_needed(sampling):
            return None
        bad_words = self._vocabulary.bad_word_token_ids(sampling.bad_words)
        think_end = self._vocabulary.open_think_end(request.token_ids)
        wanted = sampling.structured_outputs
        looks_ahead = self._num_draft_tokens > 0 and sampling.num_draft_tokens != 0
        grammar = None
        if wanted is not None:
            grammar = self._grammars.grammar(wanted, start_after=think_end, looks_ahead=looks_ahead)
        return Processors(sampling, request.token_ids, end_token_ids, bad_words, grammar, think_end)
