"""The prefix cache of an engine whose manager lives in the same process: every call is answered at once."""

from __future__ import annotations

import math
from typing import Protocol

from qwen35.engine.prefix import Answer, Query
from qwen35.errors import Cancelled
from qwen35.state.extents import HolderRef
from qwen35.state.leases import CLAIMED, Lease
from qwen35.state.manager import Manager
from qwen35.state.prefix import EntryRef, Hit, PrefixHasher, PrefixReader, Publication


class Holder(Protocol):
    ref: HolderRef


class LocalStore:
    """A ``PrefixStore``, and the two ends of a lease that frame each request."""

    def __init__(self, manager: Manager, reader: PrefixReader, holder: Holder) -> None:
        self._manager = manager
        self._reader = reader
        self._holder = holder
        self._answers: list[Answer] = []

    def open(self, query: Query | None) -> tuple[Lease, Hit | None]:
        """A lease for one request, and the longest prefix that was found for it, pinned."""
        lease = self._manager.open("", deadline=math.inf)
        wanted = None
        if query is not None:
            wanted = self._reader.candidates(query.hasher, query.max_tokens, query.needs_draft)
        [claim], [entry] = self._manager.claim(self._holder.ref, [lease], [wanted])
        if claim != CLAIMED:
            raise Cancelled()
        return lease, None if entry is None else self._reader.hit(entry)

    def close(self, lease: Lease) -> None:
        """The request has ended, and the engine has forgotten it."""
        self._manager.close(self._holder.ref, [lease])

    def contains(self, hasher: PrefixHasher, num_tokens: int, has_draft: bool) -> bool:
        return self._reader.contains(hasher, num_tokens, has_draft)

    def publish(self, lease: Lease, publication: Publication) -> None:
        published = self._manager.publish(self._holder.ref, lease, publication)
        block_ids = () if published.entry is None else self._reader.hit(published.entry).block_ids
        self._answers.append(Answer(published, block_ids))

    def answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def unpin(self, lease: Lease, entry: EntryRef) -> None:
        self._manager.unpin(self._holder.ref, lease, [entry])
