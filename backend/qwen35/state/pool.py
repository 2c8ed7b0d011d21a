"""The blocks and slots that an llm instance may hand out: whole extents from a source, single ones to sequences.

Allocating and freeing never leave the process and never wait. A background thread (`start`) keeps a reserve, gives idle
extents back and beats; `refill` does one round of the same by hand. Knows no sequence and no tensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from qwen35.errors import StateError, Unavailable
from qwen35.state.extents import Need
from qwen35.state.shelf import Shelf
from qwen35.state.source import ExtentSource

IDLE_SECONDS = 5.0
RETRY_SECONDS = 0.05  # between two questions to a source that has nothing


class PoolExhausted(Unavailable):
    """The pool has not so many free blocks or slots now. It has asked for them: try again after `on_refill`."""


class BlockPool:
    """Thread-safe. ``num_total_blocks`` and ``num_total_slots`` are the arena's: what could ever be had."""

    def __init__(
        self,
        source: ExtentSource,
        *,
        num_total_blocks: int,
        num_total_slots: int,
        extent_blocks: int | None = None,
        extent_slots: int | None = None,
        on_refill: Callable[[], None] | None = None,
        asks_at_once: bool = False,
    ) -> None:
        """Extents default to an eighth of the blocks and of the slots. ``on_refill`` is called from the
        background thread, after the pool has grown. ``asks_at_once``: the source is in this process and answers in no
        time, so whoever finds too little asks it himself, and nothing is kept in reserve."""
        self.num_total_blocks = num_total_blocks
        self.num_total_slots = num_total_slots
        self.on_refill = on_refill
        self._source = source
        self._asks_at_once = asks_at_once
        self._blocks = Shelf("block", num_total_blocks, extent_blocks or -(-num_total_blocks // 8))
        self._slots = Shelf("slot", num_total_slots, extent_slots or -(-num_total_slots // 8))
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._empty: set[str] = set()  # kinds of which the source had nothing when it was asked last
        self._thread: threading.Thread | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate_blocks` would give at once."""
        with self._mutex:
            return self._blocks.num_free

    @property
    def num_free_slots(self) -> int:
        with self._mutex:
            return self._slots.num_free

    @property
    def num_used_blocks(self) -> int:
        with self._mutex:
            return len(self._blocks.used)

    @property
    def num_used_slots(self) -> int:
        with self._mutex:
            return len(self._slots.used)

    @property
    def may_get_blocks(self) -> bool:
        """Whether free blocks may come without anybody here giving some back: not all there are have been acquired,
        and the source had some when it was asked last."""
        with self._mutex:
            return len(self._blocks.home) < self.num_total_blocks and "block" not in self._empty

    @property
    def may_get_slots(self) -> bool:
        """The same of slots."""
        with self._mutex:
            return len(self._slots.home) < self.num_total_slots and "slot" not in self._empty

    def can_allocate(self, num_blocks: int, num_slots: int = 0) -> bool:
        """True when so many are free now; else the pool asks its source for them (in the background), for as long as
        the question is repeated every second."""
        with self._mutex:
            if self._blocks.num_free >= num_blocks and self._slots.num_free >= num_slots:
                return True
            self._want(num_blocks, num_slots)
        return self._asks_at_once and self._ask(num_blocks, num_slots)

    def allocate_blocks(self, num_blocks: int) -> list[int]:
        """All or nothing; `PoolExhausted` when they are not there now. Contents are undefined."""
        if self._asks_at_once:
            self.can_allocate(num_blocks)
        with self._mutex:
            if self._blocks.num_free < num_blocks:
                self._want(num_blocks, 0)
                raise PoolExhausted(f"blocks: expected {num_blocks} free, got {self._blocks.num_free}")
            taken = self._blocks.take(num_blocks)
            if self._is_low():
                self._wake.set()
            return taken

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Blocks that no sequence uses any more; one that isn't in use is a `StateError`."""
        with self._mutex:
            self._blocks.put(list(block_ids), time.monotonic())

    def allocate_slot(self) -> int:
        """One slot, to be reset before use; `PoolExhausted` when none is there now."""
        if self._asks_at_once:
            self.can_allocate(0, 1)
        with self._mutex:
            if self._slots.num_free < 1:
                self._want(0, 1)
                raise PoolExhausted("slots: expected 1 free, got 0")
            slot = self._slots.take(1)[0]
            if self._is_low():
                self._wake.set()
            return slot

    def free_slot(self, slot: int) -> None:
        with self._mutex:
            self._slots.put([slot], time.monotonic())

    def transfer(self, block_ids: Iterable[int], slots: Iterable[int] = ()) -> None:
        """The prefix cache has taken these, which were in use: they leave the pool without being free. One that isn't
        in use here is a `StateError`."""
        with self._mutex:
            self._blocks.transfer(block_ids, time.monotonic())
            self._slots.transfer(slots, time.monotonic())

    def check_integrity(self) -> None:
        """Raise `StateError` unless every block and slot of the extents is either free or in use, once."""
        with self._mutex:
            for shelf in (self._blocks, self._slots):
                free = [item for items in shelf.free.values() for item in items]
                if sorted([*free, *shelf.used]) != sorted(shelf.home):
                    raise StateError(f"{shelf.kind}s: expected free + used == held, got {len(free)} + "
                                     f"{len(shelf.used)} != {len(shelf.home)}")  # fmt: skip

    def refill(self) -> bool:
        """One round: grow to the reserve and the wishes, give idle extents back, beat. True when the pool has grown."""
        self._empty = set()
        is_pressed = self._source.is_under_pressure
        has_grown = self._grow(self._blocks, is_pressed) | self._grow(self._slots, is_pressed)
        self._give_back(is_pressed)
        self._source.beat(self.num_used_blocks, self.num_used_slots)
        if has_grown and self.on_refill is not None:
            self.on_refill()
        return has_grown

    def start(self, period_seconds: float, on_error: Callable[[Exception], None]) -> None:
        """Refill in a background thread: every period, and at once when the pool runs low.

        A failed round (the manager is being reloaded, say) is told to ``on_error`` and tried again."""
        self._thread = threading.Thread(
            target=self._run, args=(period_seconds, on_error), name="block-pool", daemon=True
        )
        self._thread.start()

    def close(self, give_back: bool = True) -> None:
        """Stop the thread; with ``give_back`` release all extents. Blocks still in use then are a `StateError`."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if give_back:
            with self._mutex:
                if self._blocks.used or self._slots.used:
                    raise StateError(f"pool: expected nothing in use at close, got {len(self._blocks.used)} blocks and "
                                     f"{len(self._slots.used)} slots")  # fmt: skip
                extents = [shelf.remove(g) for shelf in (self._blocks, self._slots) for g in list(shelf.extents)]
            self._source.release(extents)

    def _run(self, period_seconds: float, on_error: Callable[[Exception], None]) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            try:
                self.refill()
            except Exception as error:  # whatever the call raised, the next round may succeed
                on_error(error)
                self._empty = {"block", "slot"}
            if self._empty:
                self._closing.wait(RETRY_SECONDS)
            self._wake.wait(period_seconds)

    def _ask(self, num_blocks: int, num_slots: int) -> bool:
        for shelf, count in ((self._blocks, num_blocks), (self._slots, num_slots)):
            self._grow_to(shelf, count, Need.WISH)
        return self.num_free_blocks >= num_blocks and self.num_free_slots >= num_slots

    def _want(self, num_blocks: int, num_slots: int) -> None:
        for shelf, count in ((self._blocks, num_blocks), (self._slots, num_slots)):
            if count > 0:
                shelf.wish(count, time.monotonic())
        self._wake.set()

    def _is_low(self) -> bool:
        return any(shelf.num_free < shelf.reserve for shelf in (self._blocks, self._slots))

    def _grow(self, shelf: Shelf, is_pressed: bool) -> bool:
        """Acquire extents until the reserve and every wish is met or the source has nothing. While another holder needs
        much, only running sequences grow here: two that both gather blocks for what waits would wait for ever."""
        with self._mutex:
            small, large = (wish(time.monotonic()) for wish in (shelf.small_wish, shelf.large_wish))
            need = Need.WISH if small > shelf.num_free else Need.RESERVE
        has_grown = self._grow_to(shelf, small if is_pressed else max(small, shelf.reserve), need)
        if large and not is_pressed:
            has_grown |= self._acquire(shelf, large - shelf.num_free, Need.WISH)
        with self._mutex:
            shelf.forget_wishes()
        return has_grown

    def _grow_to(self, shelf: Shelf, num_free: int, need: Need) -> bool:
        """Whole extents of what is free, but no more than is missing of what must be evicted."""
        has_grown = False
        while (missing := num_free - shelf.num_free) > 0:
            whole = -(-missing // shelf.extent_items) * shelf.extent_items
            if not self._acquire(shelf, whole, Need.SPARE) and not self._acquire(shelf, missing, need):
                return has_grown
            has_grown = True
        return has_grown

    def _acquire(self, shelf: Shelf, count: int, need: Need) -> bool:
        """One extent, unless none is wanted or the source has nothing."""
        if count <= 0:
            return False
        is_block = shelf.kind == "block"
        extent = self._source.acquire(count if is_block else 0, 0 if is_block else count, need)
        if extent is None:
            self._empty.add(shelf.kind)
            return False
        self._empty.discard(shelf.kind)
        with self._mutex:
            shelf.add(extent, extent.block_ids if is_block else extent.slots, time.monotonic())
        return True

    def _give_back(self, is_pressed: bool) -> None:
        """Release extents that have been idle for a while, but for the reserve and the wishes; all that are idle at
        once while another holder needs them."""
        now, extents = time.monotonic(), []
        with self._mutex:
            for shelf in (self._blocks, self._slots):
                small, large = shelf.small_wish(now), shelf.large_wish(now)
                kept = small if is_pressed else max(shelf.reserve, small, large)
                for generation in list(reversed(shelf.idle_since)):
                    is_due = is_pressed or now - shelf.idle_since[generation] >= IDLE_SECONDS
                    if is_due and shelf.num_free - shelf.num_items[generation] >= kept:
                        extents.append(shelf.remove(generation))
        if extents:
            self._source.release(extents)
