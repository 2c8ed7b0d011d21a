"""The blocks and slots that an llm instance may hand out: whole extents from a source, single ones to sequences.

Allocating and freeing never leave the process and never wait. A background thread (`start`) keeps a reserve, gives idle
extents back and beats; `refill` does one round of the same by hand. Knows no sequence and no tensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from qwen35.errors import StateError, Unavailable
from qwen35.state.extents import Extent, Need
from qwen35.state.source import ExtentSource

IDLE_SECONDS = 5.0
WISH_SECONDS = 2.0  # a wish that nobody repeats any more is forgotten
RETRY_SECONDS = 0.05  # between two questions to a source that has nothing


class PoolExhausted(Unavailable):
    """The pool has not so many free blocks or slots now. It has asked for them: try again after `on_refill`."""


class _Shelf:
    """Items of one kind (blocks or slots) with the extents that they came in. Not thread-safe."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.extents: dict[int, Extent] = {}  # by generation, oldest first
        self.free: dict[int, list[int]] = {}  # generation -> free items, the next one last
        self.home: dict[int, int] = {}  # item -> generation of its extent
        self.used: set[int] = set()
        self.num_items: dict[int, int] = {}  # generation -> items, free and used
        self.idle_since: dict[int, float] = {}

    @property
    def num_free(self) -> int:
        return len(self.home) - len(self.used)

    def add(self, extent: Extent, items: tuple[int, ...], now: float) -> None:
        generation = extent.ref.generation
        self.extents[generation] = extent
        self.free[generation] = list(reversed(items))
        self.num_items[generation] = len(items)
        self.home.update(dict.fromkeys(items, generation))
        self.idle_since[generation] = now

    def take(self, count: int) -> list[int]:
        """The oldest extents first, so that the youngest become idle."""
        taken: list[int] = []
        for generation, items in self.free.items():
            while items and len(taken) < count:
                taken.append(items.pop())
                self.idle_since.pop(generation, None)
        self.used.update(taken)
        return taken

    def put(self, items: list[int], now: float) -> None:
        for item in items:
            generation = self._stop_use(item)
            self.free[generation].append(item)
            self._note_idle(generation, now)

    def transfer(self, items: Iterable[int], now: float) -> None:
        """Used items that are not ours any more. An extent of which nothing is left is gone."""
        for item in items:
            generation = self._stop_use(item)
            del self.home[item]
            self.num_items[generation] -= 1
            if self.num_items[generation] == 0:
                del self.extents[generation], self.free[generation], self.num_items[generation]
            else:
                self._note_idle(generation, now)

    def remove(self, generation: int) -> Extent:
        for item in self.free.pop(generation):
            del self.home[item]
        del self.idle_since[generation], self.num_items[generation]
        return self.extents.pop(generation)

    def _stop_use(self, item: int) -> int:
        if item not in self.used:
            raise StateError(f"{self.kind} {item}: expected one that is in use, got one that is free or not ours")
        self.used.remove(item)
        return self.home[item]

    def _note_idle(self, generation: int, now: float) -> None:
        if len(self.free[generation]) == self.num_items[generation]:
            self.idle_since[generation] = now


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
        """Extents default to an eighth of the blocks and a sixteenth of the slots. ``on_refill`` is called from the
        background thread, after the pool has grown. ``asks_at_once``: the source is in this process and answers in no
        time, so whoever finds too little asks it himself, and nothing is kept in reserve."""
        self.num_total_blocks = num_total_blocks
        self.num_total_slots = num_total_slots
        self.on_refill = on_refill
        self._source = source
        self._extent_blocks = extent_blocks or -(-num_total_blocks // 8)
        self._extent_slots = extent_slots or -(-num_total_slots // 16)
        self._asks_at_once = asks_at_once
        self._blocks, self._slots = _Shelf("block"), _Shelf("slot")
        self._wishes = {"block": (0, 0.0), "slot": (0, 0.0)}  # how many somebody asked for in vain, and until when
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
        """One round: grow to the reserve, give idle extents back, beat. True when the pool has grown."""
        self._empty = set()
        has_grown = self._grow(self._blocks) | self._grow(self._slots)
        self._give_back(self._source.is_under_pressure)
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
            while count > shelf.num_free and self._grow_once(shelf, count - shelf.num_free, Need.WISH):
                pass
        return self.num_free_blocks >= num_blocks and self.num_free_slots >= num_slots

    def _want(self, num_blocks: int, num_slots: int) -> None:
        until = time.monotonic() + WISH_SECONDS
        self._wishes.update({k: (n, until) for k, n in (("block", num_blocks), ("slot", num_slots)) if n > 0})
        self._wake.set()

    def _is_low(self) -> bool:
        return any(shelf.num_free < self._reserve(shelf) for shelf in (self._blocks, self._slots))

    def _reserve(self, shelf: _Shelf) -> int:
        """Free items to keep at hand: half an extent."""
        return -(-(self._extent_blocks if shelf.kind == "block" else self._extent_slots) // 2)

    def _target(self, shelf: _Shelf) -> int:
        """The reserve, or more while somebody waits for more."""
        num_wanted, until = self._wishes[shelf.kind]
        return max(self._reserve(shelf), num_wanted if time.monotonic() < until else 0)

    def _grow(self, shelf: _Shelf) -> bool:
        """Acquire extents until the reserve and every wish is met or the source has nothing."""
        has_grown = False
        while True:
            with self._mutex:
                missing = self._target(shelf) - shelf.num_free
                if missing <= 0:
                    self._wishes[shelf.kind] = (0, 0.0)
                    return has_grown
                is_wish = self._target(shelf) > self._reserve(shelf)
            if not self._grow_once(shelf, missing, Need.WISH if is_wish else Need.RESERVE):
                return has_grown
            has_grown = True

    def _grow_once(self, shelf: _Shelf, num_missing: int, need: Need) -> bool:
        """Acquire one extent: a whole one of what is free, but no more than is missing of what must be evicted."""
        is_block = shelf.kind == "block"
        unit = self._extent_blocks if is_block else self._extent_slots
        extent = None
        for count, how in ((-(-num_missing // unit) * unit, Need.SPARE), (num_missing, need)):
            extent = extent or self._source.acquire(count if is_block else 0, 0 if is_block else count, how)
        if extent is None:
            self._empty.add(shelf.kind)
            return False
        self._empty.discard(shelf.kind)
        with self._mutex:
            shelf.add(extent, extent.block_ids if is_block else extent.slots, time.monotonic())
        return True

    def _give_back(self, is_pressed: bool) -> None:
        """Release extents that have been idle for a while (at once under pressure), but for the reserve."""
        now, extents = time.monotonic(), []
        with self._mutex:
            for shelf in (self._blocks, self._slots):
                for generation in list(reversed(shelf.idle_since)):
                    is_due = is_pressed or now - shelf.idle_since[generation] >= IDLE_SECONDS
                    if is_due and shelf.num_free - shelf.num_items[generation] >= self._target(shelf):
                        extents.append(shelf.remove(generation))
        if extents:
            self._source.release(extents)
