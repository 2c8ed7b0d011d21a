"""Counters of the engine. Written by the engine's thread alone, read by anyone: each is one integer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineMetrics:
    """Totals since the start, and what is there now."""

    num_steps: int = 0
    num_target_tokens: int = 0  # inputs that the target has run: prompt, golden tokens and drafts
    num_prompt_tokens: int = 0  # of finished prefills
    num_cached_tokens: int = 0  # of prompts, that were not run, because a checkpoint had them
    num_checkpoints: int = 0  # that the cache has taken
    num_skipped_checkpoints: int = 0  # for want of a slot
    num_output_tokens: int = 0  # delivered
    num_draft_tokens: int = 0  # verified
    num_accepted_draft_tokens: int = 0  # accepted and delivered
    num_lost_drafts: int = 0  # sequences that draft no more, because a pause grew too long to catch up
    num_preemptions: int = 0  # sequences that gave up their memory before their end
    num_dropped_tokens: int = 0  # computed ones that preemption dropped: they are run again
    num_swapped_out_tokens: int = 0  # computed ones that preemption copied to the host
    num_swapped_in_tokens: int = 0  # of those, that came back
    num_finished_requests: int = 0
    num_failed_requests: int = 0  # cancelled and expired ones included
    num_waiting_requests: int = 0  # now
    num_running_requests: int = 0  # now
    num_swapped_bytes: int = 0  # of copies on the host, now
