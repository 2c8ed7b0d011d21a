"""The llm's only thread (beside the pool's) that waits for the manager: it claims and closes leases, and brings
checkpoints to the prefix cache. Pure: the calls go through ``state.source.RemoteManager``, what is cached is read from
the arena.

Whatever was handed in before a claim and belongs to the cache is done before it: who has its final response and comes
back with the next turn finds what the first one left. A lease is closed when all that was published in its name has
been answered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from qwen35.engine.prefix import Answer, Query
from qwen35.engine.request import Request
from qwen35.errors import Cancelled, InvalidArgument, Qwen35Error, Unavailable
from qwen35.serving.ticket import Stage, Ticket
from qwen35.state.extents import HolderRef
from qwen35.state.leases import CANCELLED, CLAIMED, Lease
from qwen35.state.prefix import EntryRef, Hit, PrefixHasher, PrefixReader, Publication, Published

RETRY_SECONDS = 0.05  # after a call that got no answer: the manager is being reloaded, say

Start: TypeAlias = Callable[[Ticket, "Hit | None"], None]
Fail: TypeAlias = Callable[[Ticket, Qwen35Error], None]


class Manager(Protocol):
    """All operations can be repeated: a lost answer does no harm."""

    def claim(
        self, holder: HolderRef, leases: Sequence[Lease], candidates: Sequence[Sequence[EntryRef] | None]
    ) -> tuple[list[str], list[EntryRef | None]]: ...

    def close(self, holder: HolderRef, leases: Sequence[Lease]) -> int: ...

    def publish(self, holder: HolderRef, lease: Lease, publication: Publication) -> Published: ...

    def unpin(self, holder: HolderRef, lease: Lease, entries: Sequence[EntryRef]) -> int: ...


class Holder(Protocol):
    ref: HolderRef

    def cancelled(self, leases: list[Lease]) -> list[bool]: ...


class Engine(Protocol):
    """What is needed of ``engine.Engine``, from any thread."""

    def query(self, request: Request) -> Query | None: ...

    def notify(self) -> None: ...


@dataclass(frozen=True)
class _Publish:
    lease: Lease
    publication: Publication


@dataclass(frozen=True)
class _Unpin:
    lease: Lease
    entry: EntryRef


class LeaseKeeper:
    """``run`` begins; then each claimed ticket goes to ``start``, with the prefix that is pinned for it, and each
    refused one to ``fail``. To the engine it is a ``PrefixStore``."""

    def __init__(
        self,
        manager: Manager,
        holder: Holder,
        reader: PrefixReader,
        on_fault: Callable[[str, BaseException], None],
    ) -> None:
        self._manager = manager
        self._holder = holder
        self._reader = reader
        self._on_fault = on_fault
        self._inbox: deque[Ticket | Lease | _Publish | _Unpin] = deque()  # in the order in which it came
        self._updates: deque[_Publish | _Unpin] = deque()  # this and the next two: not answered yet, the thread's own
        self._claims: list[Ticket] = []
        self._closes: list[Lease] = []
        self._answers: deque[Answer] = deque()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def claim_soon(self, ticket: Ticket) -> None:
        self._put(ticket)

    def close_soon(self, lease: Lease) -> None:
        """The engine does nothing more in the name of this lease."""
        self._put(lease)

    def publish(self, lease: Lease, publication: Publication) -> None:
        self._put(_Publish(lease, publication))

    def unpin(self, lease: Lease, entry: EntryRef) -> None:
        self._put(_Unpin(lease, entry))

    def answers(self) -> list[Answer]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def contains(self, hasher: PrefixHasher, num_tokens: int, has_draft: bool) -> bool:
        return self._reader.contains(hasher, num_tokens, has_draft)

    def cancelled(self, leases: list[Lease]) -> list[bool]:
        return self._holder.cancelled(leases)

    def run(self, engine: Engine, start: Start, fail: Fail) -> None:
        self._thread = threading.Thread(target=self._run, args=(engine, start, fail), name="llm-leasing", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Leases that are still ours go when the holder closes. False when a call did not return in time."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _put(self, item: Ticket | Lease | _Publish | _Unpin) -> None:
        self._inbox.append(item)
        self._wake.set()

    def _run(self, engine: Engine, start: Start, fail: Fail) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            self._take_in()
            has_updated = self._guarded(lambda: self._update(engine))
            has_claimed = self._guarded(lambda: self._claim(engine, start, fail))
            if not (has_updated and has_claimed and self._guarded(self._close)):
                self._stopping.wait(RETRY_SECONDS)
                self._wake.set()

    def _guarded(self, body: Callable[[], None]) -> bool:
        """Whatever a call raises, the next one may succeed; `Service` watches the time."""
        try:
            body()
        except Exception as error:
            self._on_fault("state manager", error)
            return False
        return True

    def _take_in(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Ticket):
                self._claims.append(item)
            elif isinstance(item, Lease):
                self._closes.append(item)
            else:
                self._updates.append(item)

    def _update(self, engine: Engine) -> None:
        while self._updates:
            item = self._updates[0]
            if isinstance(item, _Unpin):
                self._manager.unpin(self._holder.ref, item.lease, [item.entry])
            else:
                published = self._manager.publish(self._holder.ref, item.lease, item.publication)
                listed = () if published.entry is None else self._reader.hit(published.entry).block_ids
                self._answers.append(Answer(published, listed))
                engine.notify()
            self._updates.popleft()

    def _claim(self, engine: Engine, start: Start, fail: Fail) -> None:
        self._claims = tickets = [ticket for ticket in self._claims if ticket.stage is Stage.WAITING]
        if not tickets:
            return
        wanted = [self._candidates(engine, ticket) for ticket in tickets]
        claims, entries = self._manager.claim(self._holder.ref, [ticket.lease for ticket in tickets], wanted)
        self._claims = []
        for ticket, claim, entry in zip(tickets, claims, entries, strict=True):
            if claim == CLAIMED:
                start(ticket, None if entry is None else self._reader.hit(entry))
            else:
                fail(ticket, Cancelled() if claim == CANCELLED else _expired(ticket.lease))

    def _candidates(self, engine: Engine, ticket: Ticket) -> list[EntryRef] | None:
        """None: nothing is looked for. What is wrong with a request is said when it is submitted."""
        try:
            query = None if ticket.session is not None else engine.query(ticket.request)
        except InvalidArgument:
            return None
        return None if query is None else self._reader.candidates(query.hasher, query.max_tokens, query.needs_draft)

    def _close(self) -> None:
        if self._closes:
            self._manager.close(self._holder.ref, self._closes)
            self._closes = []


def _expired(lease: Lease) -> Unavailable:
    return Unavailable(f"lease: expected a live one, got row {lease.row} that has expired; send the request again")
