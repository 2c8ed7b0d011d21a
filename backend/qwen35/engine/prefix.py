"""Cached prefixes as the engine sees them: the store behind it, and those that its sequences stand on.

Knows neither tensors nor who keeps the store's books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from qwen35.engine.request import Request
from qwen35.state.prefix import EntryRef, Hit, PrefixHasher, Publication, Published


def hasher_of(request: Request, placeholders: Iterable[int], block_tokens: int) -> PrefixHasher | None:
    """Names the prefixes of a request whose tokens at ``placeholders`` are images; None where one of them is of no
    image that the request names."""
    named = {i for image in request.images for i in range(image.offset, image.offset + image.num_tokens)}
    if not named.issuperset(placeholders):
        return None
    spans = [(image.digest, image.offset, image.num_tokens) for image in request.images]
    return PrefixHasher(request.token_ids, spans, block_tokens=block_tokens, salt=request.cache_salt)


@dataclass(frozen=True)
class Query:
    """What to look for on behalf of a request."""

    hasher: PrefixHasher
    max_tokens: int
    needs_draft: bool  # the draft's keys and values too


@dataclass(frozen=True)
class Answer:
    """What became of a publication. ``block_ids``: as the entry lists them, equal contents shared; empty without an
    entry."""

    published: Published
    block_ids: tuple[int, ...] = ()


class PrefixStore(Protocol):
    """Where checkpoints go. Calls come from the engine's thread and never wait; a lease is whatever the request
    carries."""

    def contains(self, hasher: PrefixHasher, num_tokens: int, has_draft: bool) -> bool:
        """Whether the prefix of so many tokens is there already."""
        ...

    def publish(self, lease: Any, publication: Publication) -> None: ...

    def answers(self) -> list[Answer]:
        """Those that have come since the last call, in the order of the publications. A new entry is pinned."""
        ...

    def unpin(self, lease: Any, entry: EntryRef) -> None: ...


@dataclass(eq=False)
class Checkpoint:
    """A cached prefix that is pinned for a request, until the last of its sequences lets it go."""

    lease: Any
    entry: EntryRef
    num_tokens: int
    slot: int  # gated delta state and conv window after the last token, and that token's hidden state
    block_ids: tuple[int, ...]  # cover the tokens, the last one maybe in part
    has_draft: bool  # the draft's entries [1, num_tokens) are there
    is_hit: bool = False  # it was there before the request came
    num_users: int = 0

    @classmethod
    def of_hit(cls, lease: Any, hit: Hit) -> Checkpoint:
        return cls(lease, hit.entry, hit.num_tokens, hit.slot, hit.block_ids, hit.has_draft, is_hit=True)
