"""A sequence as a record that outlives its engine: what was asked, what was decided, what the caches hold of it.

Knows no files (``session_file``) and no engine. Text, grammar and penalties are not in it: they follow from the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen35.engine.request import Request, Usage
from qwen35.engine.sequence import Progress, Sequence
from qwen35.engine.snapshot import Snapshot
from qwen35.errors import InvalidArgument


@dataclass(frozen=True)
class Session:
    """A sequence between two steps. Whoever restores it goes on with the very bits that would have followed.

    ``request``: its uid, deadline and arrival are those of the engine that it ran in."""

    request: Request
    progress: Progress
    snapshot: Snapshot | None  # None: nothing is computed, or it was dropped and is computed again

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return self.request.token_ids + self.progress.token_ids

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.num_computed_tokens

    @property
    def usage(self) -> Usage:
        """As the last emission told it."""
        told = self.progress
        return Usage(
            len(self.request.token_ids), len(told.token_ids), told.num_draft_tokens, told.num_accepted_draft_tokens
        )

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        cached = 0 if self.snapshot is None else self.snapshot.num_bytes
        return cached + self.request.image_embeds.nbytes + self.request.positions.nbytes

    def request_on(
        self,
        *,
        uid: int,
        deadline: float,
        arrival: float,
        max_new_tokens: int | None = None,
        wants_session: bool = False,
    ) -> Request:
        """What goes on: the same request, with up to ``max_new_tokens`` more tokens than there are now, else as many in
        all as were asked for."""
        sampling = self.request.sampling
        if max_new_tokens is not None:
            sampling = replace(sampling, max_tokens=len(self.progress.token_ids) + max_new_tokens)
        return replace(
            self.request,
            uid=uid,
            deadline=deadline,
            arrival=arrival,
            sampling=sampling,
            wants_session=wants_session,
        )

    def check_open(self, sequence: Sequence) -> None:
        """Raises InvalidArgument unless there is something to generate behind it."""
        if self.progress.finish_reason == "stop":
            raise InvalidArgument("restore_session: expected a session whose text goes on, got one that was stopped")
        if len(self.token_ids) >= sequence.max_total_tokens:
            raise InvalidArgument(
                f"restore_session: expected room behind the {len(self.token_ids)} tokens of the session, got "
                f"{sequence.max_total_tokens} tokens in all; raise max_tokens or start a shorter text"
            )

    def check_prefix_of(self, sequence: Sequence) -> None:
        """Raises InvalidArgument unless the prompt of ``sequence`` begins with all that is computed here, with the same
        pictures at the same positions, and has one token more at least."""
        num_tokens, prompt = self.num_computed_tokens, sequence.request.token_ids
        if len(prompt) <= num_tokens:
            raise InvalidArgument(
                f"restore_session: expected a prompt of more than the {num_tokens} tokens of the session, got "
                f"{len(prompt)}"
            )
        for place, (saved, asked) in enumerate(zip(self.token_ids, prompt[:num_tokens], strict=False)):
            if saved != asked:
                raise InvalidArgument(
                    f"restore_session: expected a prompt that begins with the {num_tokens} tokens of the session, got "
                    f"token {asked} instead of {saved} at place {place}"
                )
        num_rows = int((sequence.placeholder_indices < num_tokens).sum())
        rows = sequence.request.image_embeds[:num_rows]
        is_alike = torch.equal(self.request.image_embeds[:num_rows].to(rows), rows)
        if not (is_alike and torch.equal(self._positions(num_tokens), sequence.rotary_positions(0, num_tokens))):
            raise InvalidArgument("restore_session: expected the images of the session, got others")

    def _positions(self, num_tokens: int) -> Tensor:
        """[3, num_tokens], as ``Sequence.rotary_positions``."""
        prompt = self.request.positions
        behind = int(prompt.max()) + 1 + torch.arange(len(self.progress.token_ids))
        return torch.cat([prompt, behind.expand(3, -1)], dim=1)[:, :num_tokens]
