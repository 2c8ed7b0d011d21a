"""Claims and closes leases in batches from a thread of its own, the only one of the llm's that waits for the manager
(beside the pool's). Pure: the calls go through ``state.source.RemoteManager``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from qwen35.errors import Cancelled, Qwen35Error, Unavailable
from qwen35.serving.ticket import Stage, Ticket
from qwen35.state.extents import HolderRef
from qwen35.state.leases import CANCELLED, CLAIMED, Lease
from qwen35.state.prefix import EntryRef

RETRY_SECONDS = 0.05  # after a call that got no answer: the manager is being reloaded, say


class Manager(Protocol):
    """Both operations can be repeated: a lost answer does no harm."""

    def claim(self, holder: HolderRef, leases: Sequence[Lease]) -> tuple[list[str], list[EntryRef | None]]: ...

    def close(self, holder: HolderRef, leases: Sequence[Lease]) -> int: ...


class Holder(Protocol):
    ref: HolderRef

    def cancelled(self, leases: list[Lease]) -> list[bool]: ...


class LeaseKeeper:
    """``run(start, fail)`` begins; then each claimed ticket goes to ``start`` and each refused one to ``fail``."""

    def __init__(self, manager: Manager, holder: Holder, on_fault: Callable[[str, BaseException], None]) -> None:
        self._manager = manager
        self._holder = holder
        self._on_fault = on_fault
        self._to_claim: deque[Ticket] = deque()
        self._to_close: deque[Lease] = deque()
        self._claims: list[Ticket] = []  # taken from the queues, not answered yet; the thread's own
        self._closes: list[Lease] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def claim_soon(self, ticket: Ticket) -> None:
        self._to_claim.append(ticket)
        self._wake.set()

    def close_soon(self, lease: Lease) -> None:
        self._to_close.append(lease)
        self._wake.set()

    def cancelled(self, leases: list[Lease]) -> list[bool]:
        return self._holder.cancelled(leases)

    def run(self, start: Callable[[Ticket], None], fail: Callable[[Ticket, Qwen35Error], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(start, fail), name="llm-leasing", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Leases that are still ours go when the holder closes. False when a call did not return in time."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, start: Callable[[Ticket], None], fail: Callable[[Ticket, Qwen35Error], None]) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self._claim(start, fail)
                self._close()
            except Exception as error:  # whatever the call raised, the next one may succeed; `Service` watches the time
                self._on_fault("state manager", error)
                self._stopping.wait(RETRY_SECONDS)
                self._wake.set()

    def _claim(self, start: Callable[[Ticket], None], fail: Callable[[Ticket, Qwen35Error], None]) -> None:
        while self._to_claim:
            self._claims.append(self._to_claim.popleft())
        self._claims = tickets = [ticket for ticket in self._claims if ticket.stage is Stage.WAITING]
        if not tickets:
            return
        answers, _ = self._manager.claim(self._holder.ref, [ticket.lease for ticket in tickets])
        self._claims = []
        for ticket, answer in zip(tickets, answers, strict=True):
            if answer == CLAIMED:
                start(ticket)
            else:
                fail(ticket, Cancelled() if answer == CANCELLED else _expired(ticket.lease))

    def _close(self) -> None:
        while self._to_close:
            self._closes.append(self._to_close.popleft())
        if self._closes:
            self._manager.close(self._holder.ref, self._closes)
            self._closes = []


def _expired(lease: Lease) -> Unavailable:
    return Unavailable(f"lease: expected a live one, got row {lease.row} that has expired; send the request again")
