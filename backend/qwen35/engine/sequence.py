"""One request on its way through the engine. A sequence stores little and derives the rest; it knows no model.

Invariant: 0 <= num_computed_tokens < len(token_ids) <= max_total_tokens, and the blocks hold num_held_tokens tokens;
only a sequence that starts from a checkpoint of its whole prompt has num_computed_tokens == len(token_ids).
    token_ids [0, num_prompt_tokens) prompt, [num_prompt_tokens, end) generated: all decided, none is ever taken back
    KV        [0, num_computed_tokens) valid, in the target; what lies behind is overwritten
    GDN       num_computed_tokens - num_pending inputs applied, num_pending accepted ones waiting in the slot
    draft KV  entries [1, num_drafted_tokens] valid; the hidden states of the inputs from there on, while drafting
              pauses, in undrafted, unless they have become too many
    base      the pinned checkpoint that lists all cached blocks among block_ids; it starts again from there when it has
              lost its memory
    drafts    proposals for the positions after token_ids; the last decided token ("golden") has not been run yet
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwen35.engine.detokenizer import TextStream
from qwen35.engine.prefix import Checkpoint
from qwen35.engine.processors import Processors
from qwen35.engine.request import Emission, Request, TokenLogprob, Usage
from qwen35.engine.sampler import Row
from qwen35.errors import Qwen35Error
from qwen35.state.prefix import PrefixHasher

if TYPE_CHECKING:
    from qwen35.engine.snapshot import Snapshot


@dataclass(frozen=True)
class Decision:
    """What a step decided for one sequence: nothing (a prompt chunk in the middle), tokens, or that it can't go on."""

    token_ids: tuple[int, ...] = ()  # accepted drafts, then the bonus token
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # one entry for each token, when asked for
    error: Qwen35Error | None = None


def can_draft(max_draft_tokens: int, num_prompt_tokens: int, max_total_tokens: int) -> bool:
    """Whether a draft can ever be verified: with less than three tokens to generate or k = 0 it cannot."""
    return min(max_draft_tokens, max_total_tokens - num_prompt_tokens - 2) > 0


@dataclass(frozen=True)
class Progress:
    """What a sequence has decided and told of so far."""

    token_ids: tuple[int, ...] = ()  # generated
    finish_reason: str | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    cumulative_logprob: float = 0.0
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # told with the first token


class Sequence:
    """Owned by the engine's thread. ``block_ids``, ``num_held_tokens`` and ``slot`` are written by ``Memory`` alone,
    what belongs to checkpoints by ``Checkpoints``."""

    def __init__(
        self,
        request: Request,
        *,
        max_total_tokens: int,
        max_draft_tokens: int,
        end_token_ids: frozenset[int],
        text: TextStream,
        processors: Processors | None = None,
        placeholder_indices: SequenceOf[int] = (),
    ) -> None:
        """``max_total_tokens``: prompt and output. ``end_token_ids``: EOS and stop tokens. ``placeholder_indices``:
        ascending places in the prompt that take a row of image_embeds each."""
        self.request = request
        self.max_total_tokens = max_total_tokens
        self.end_token_ids = end_token_ids
        self.processors = processors
        self.placeholder_indices = torch.tensor(list(placeholder_indices), dtype=torch.int64)
        self.token_ids = list(request.token_ids)
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.drafts: tuple[int, ...] = ()
        self.max_draft_tokens = max_draft_tokens
        self.draft_length = max_draft_tokens  # now; 0: drafting pauses
        self.num_drafted_tokens = 0
        self.undrafted: list[Tensor] = []  # [n, H] each, in order
        self.is_draft_lost = False  # the pause grew too long: no more drafts
        self.block_ids: tuple[int, ...] = ()
        self.num_held_tokens = 0  # that the blocks have room for
        self.slot: int | None = None  # None: waiting
        self.brought: Snapshot | None = None  # of a session, until it is restored
        self.base: Checkpoint | None = None
        self.boundary: Tensor | None = None  # [1, H] hidden state of the last token of the base that it started from
        self.hasher: PrefixHasher | None = None  # None: it neither reads nor makes checkpoints
        self.landmarks: tuple[int, ...] = ()  # of the prompt: where checkpoints are wanted
        self.due: tuple[int, ...] = ()  # places of checkpoints in the step that was committed last
        self.num_starts = 0
        self.num_cached_tokens = 0  # of the prompt: they were there when the request came
        self.followers: list[Sequence] = []  # other samples, which wait for a checkpoint of the whole prompt
        self.is_held_back = False  # such another sample
        self.order: int | None = None  # of coming to the scheduler; breaks ties of rank
        self.last_step = -1  # of the scheduler, in which this sequence was run
        self.finish_reason: str | None = None
        self.error: Qwen35Error | None = None
        self.times = {"arrival": time.time_ns() - max(0, int((time.monotonic() - request.arrival) * 1e9))}
        self._text = text
        self._next_rotary_position = int(request.positions.max()) + 1
        self._num_draft_tokens = 0
        self._num_accepted_draft_tokens = 0
        self._num_emitted_tokens = 0
        self.prompt_logprobs: list[tuple[TokenLogprob, ...]] = []  # of the second token on; each once
        self._new_logprobs: list[tuple[TokenLogprob, ...]] = []
        self._cumulative_logprob = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_wanted_prompt_logprobs(self) -> int:
        """One for each prompt token but the first; for one of several samples."""
        request = self.request
        is_wanted = request.sampling.prompt_logprobs is not None and request.sample_index == 0
        return self.num_prompt_tokens - 1 if is_wanted else 0

    @property
    def is_prefilling(self) -> bool:
        """Decided tokens beside the golden one have not been run, or there is no golden token yet."""
        return self.num_generated_tokens == 0 or self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def uses_draft(self) -> bool:
        return can_draft(self.max_draft_tokens, self.num_prompt_tokens, self.max_total_tokens)

    @property
    def keeps_draft(self) -> bool:
        """Whether the draft's entries are complete, or will be with the next first pass."""
        return self.uses_draft and not self.is_draft_lost

    @property
    def lacks_draft_entries(self) -> bool:
        """Of the checkpoints that are due."""
        return len(self.due) > 0 and self.num_drafted_tokens < self.due[-1] - 1

    @property
    def num_wanted_drafts(self) -> int:
        """Drafts worth proposing after the decided tokens: the bonus token needs a place too. The draft's entry of
        the last one is not written yet, so that there may be one more than there is room for."""
        num_decided = len(self.token_ids)
        room = min(self.max_total_tokens - num_decided - 1, self.num_held_tokens - num_decided + 1)
        return 0 if self.is_draft_lost else max(0, min(self.draft_length, room))

    @property
    def num_undrafted_tokens(self) -> int:
        return sum(len(hidden) for hidden in self.undrafted)

    @property
    def num_needed_tokens(self) -> int:
        """Room that the next step cannot do without: the decided tokens, and the draft's entry of the next one."""
        return len(self.token_ids) + 1

    @property
    def num_useful_tokens(self) -> int:
        """Room for a verify of all drafts, and for those that are proposed after it."""
        return min(self.max_total_tokens, self.num_needed_tokens + 2 * self.max_draft_tokens)

    @property
    def has_room(self) -> bool:
        return self.num_held_tokens >= self.num_needed_tokens

    @property
    def progress(self) -> Progress:
        """Between two steps: everything decided has been emitted."""
        return Progress(
            tuple(self.token_ids[self.num_prompt_tokens :]),
            self.finish_reason,
            self._num_draft_tokens,
            self._num_accepted_draft_tokens,
            self._cumulative_logprob,
            tuple(self.prompt_logprobs),
        )

    def replay(self, progress: Progress) -> None:
        """For a new sequence: all that was decided and told of before, so that emissions go on behind it. Where that
        was the end of a text, the text is out whole: no stop string begins in it any more."""
        times = dict(self.times)
        for token_id in progress.token_ids:
            self._append(token_id, ())
        self._text.take(is_final=progress.finish_reason is not None)
        self.times = times
        self.prompt_logprobs = list(progress.prompt_logprobs)
        self._num_emitted_tokens = len(progress.token_ids)
        self._cumulative_logprob = progress.cumulative_logprob
        self._num_draft_tokens = progress.num_draft_tokens
        self._num_accepted_draft_tokens = progress.num_accepted_draft_tokens

    def rewind(self) -> None:
        """Nothing of it is computed any more (its memory is gone); what was decided stays."""
        self.num_computed_tokens = self.num_pending = self.num_drafted_tokens = 0
        self.drafts, self.undrafted, self.is_draft_lost = (), [], False

    def resume(self, num_tokens: int, boundary: Tensor, has_draft: bool) -> None:
        """Blocks and slot hold the first ``num_tokens`` tokens; ``boundary``: [1, H], the last one's hidden state."""
        self.num_computed_tokens, self.boundary = num_tokens, boundary
        if has_draft and self.uses_draft:
            self.num_drafted_tokens, self.undrafted = num_tokens - 1, [boundary]
        else:
            self.is_draft_lost = self.uses_draft

    def extended_hasher(self) -> PrefixHasher:
        """Names of all prefixes so far; only for a sequence with a hasher."""
        assert self.hasher is not None
        self.hasher.extend(self.token_ids[self.hasher.num_tokens :])
        return self.hasher

    def rotary_positions(self, start: int, end: int) -> Tensor:
        """[3, end - start] int64 for the tokens [start, end): the prompt's own, then one more on all axes each
        token."""
        num_prompt = self.num_prompt_tokens
        prompt = self.request.positions[:, start : min(end, num_prompt)]
        first = max(start, num_prompt)
        shift = self._next_rotary_position - num_prompt
        generated = torch.arange(first + shift, max(end, first) + shift, dtype=torch.int64).expand(3, -1)
        return torch.cat([prompt, generated], dim=1)

    def row(self, drafts: tuple[int, ...] = ()) -> Row:
        """What the sampler needs to know for the position after the decided tokens and then ``drafts``."""
        request, index = self.request, self.num_generated_tokens + len(drafts)
        return Row(request.sampling, request.seed, index, self.processors, drafts, request.sample_index)

    def commit(
        self, decision: Decision, *, start: int, num_inputs: int, drafts: tuple[int, ...], is_deferred: bool
    ) -> None:
        """A step ran ``num_inputs`` tokens from KV position ``start``, ``drafts`` the last of them. KV length, GDN
        state and conv window advance together: by the sequence's own tokens and the accepted drafts, up to where the
        text ends or the next step has to end it by an error."""
        self.drafts = ()
        self.error = decision.error
        num_before = len(self.token_ids)
        for index, token_id in enumerate(decision.token_ids):
            self._append(token_id, decision.logprobs[index] if decision.logprobs else ())
            if self.is_finished or self._is_stuck:
                break
        num_accepted_inputs = num_inputs - len(drafts) + max(0, len(self.token_ids) - num_before - 1)
        self.num_computed_tokens = start + num_accepted_inputs
        self.num_pending = num_accepted_inputs if is_deferred else 0
        self._num_draft_tokens += len(drafts)
        num_accepted_drafts = max(0, len(decision.token_ids) - 1)
        self._num_accepted_draft_tokens += min(num_accepted_drafts, len(self.token_ids) - num_before)

    def _append(self, token_id: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """One decided token; sets ``finish_reason`` where the text ends. An end token's own text is left out of the
        text."""
        sampling = self.request.sampling
        self.token_ids.append(token_id)
        self.times["last_token"] = time.time_ns()
        self.times.setdefault("first_token", self.times["last_token"])
        if self.processors is not None:
            self.processors.observe(token_id)
        if logprobs:
            self._new_logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[0].logprob
        is_end = token_id in self.end_token_ids
        may_stop = self.num_generated_tokens > sampling.min_tokens  # as in vLLM
        if not is_end or sampling.include_stop_str_in_output:
            is_end = self._text.push(token_id, may_stop) or is_end
        if is_end:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_total_tokens:
            self.finish_reason = "length"

    @property
    def _is_stuck(self) -> bool:
        """No token can be chosen any more: tokens that were decided behind this place do not count."""
        return self.processors is not None and self.processors.fault is not None

    @property
    def usage(self) -> Usage:
        return Usage(
            num_input_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_generated_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_draft_tokens=self._num_accepted_draft_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )

    def take_emission(self) -> Emission | None:
        """What is new since the last one; None when there is nothing to say."""
        first_new = self.num_prompt_tokens + self._num_emitted_tokens
        token_ids = tuple(self.token_ids[first_new:])
        if not token_ids and not self.is_finished:
            return None
        is_first = self._num_emitted_tokens == 0 and len(token_ids) > 0
        self._num_emitted_tokens += len(token_ids)
        logprobs, self._new_logprobs = tuple(self._new_logprobs), []
        return Emission(
            uid=self.request.uid,
            usage=self.usage,
            token_ids=token_ids,
            text=self._text.take(is_final=self.is_finished),
            logprobs=logprobs,
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=None if self.error else self.finish_reason,
            error=self.error,
            times=dict(self.times),
            sample_index=self.request.sample_index,
            prompt_logprobs=tuple(self.prompt_logprobs) if is_first else (),
        )
