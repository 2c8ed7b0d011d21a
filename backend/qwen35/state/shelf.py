"""The blocks, or the slots, that a pool has: the extents they came in, which are used, how many are wished for."""

from __future__ import annotations

from collections.abc import Iterable

from qwen35.errors import StateError
from qwen35.state.extents import Extent

WISH_SECONDS = 2.0  # a wish that nobody repeats any more is forgotten


class Shelf:
    """Not thread-safe. ``extent_items``: how many an extent has, and half of them are the reserve to keep at hand."""

    def __init__(self, kind: str, num_total_items: int, extent_items: int) -> None:
        self.kind = kind
        self.num_total_items = num_total_items  # of the arena
        self.extent_items = extent_items
        self.reserve = -(-extent_items // 2)
        self.extents: dict[int, Extent] = {}  # by generation, oldest first
        self.free: dict[int, list[int]] = {}  # generation -> free items, the next one last
        self.home: dict[int, int] = {}  # item -> generation of its extent
        self.used: set[int] = set()
        self.num_items: dict[int, int] = {}  # generation -> items, free and used
        self.idle_since: dict[int, float] = {}
        self._wishes = {False: (0, 0.0), True: (0, 0.0)}  # is it above the reserve? -> count, until when it stands

    @property
    def num_free(self) -> int:
        return len(self.home) - len(self.used)

    def wish(self, count: int, now: float) -> None:
        """Somebody waits for so many. What is small, the growth of a sequence, does not wait behind what is large."""
        self._wishes[count > self.reserve] = (min(count, self.num_total_items), now + WISH_SECONDS)

    def small_wish(self, now: float) -> int:
        return self._wish(False, now)

    def large_wish(self, now: float) -> int:
        return self._wish(True, now)

    def forget_wishes(self) -> None:
        """Those that can be met now."""
        for is_large, (count, _) in self._wishes.items():
            if count <= self.num_free:
                self._wishes[is_large] = (0, 0.0)

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

    def _wish(self, is_large: bool, now: float) -> int:
        count, until = self._wishes[is_large]
        return count if now < until else 0

    def _stop_use(self, item: int) -> int:
        if item not in self.used:
            raise StateError(f"{self.kind} {item}: expected one that is in use, got one that is free or not ours")
        self.used.remove(item)
        return self.home[item]

    def _note_idle(self, generation: int, now: float) -> None:
        if len(self.free[generation]) == self.num_items[generation]:
            self.idle_since[generation] = now
