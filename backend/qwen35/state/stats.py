"""What the tables say in sum, and whether they agree with each other. The caller holds the manager's lock."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from qwen35.errors import StateError
from qwen35.state.holder import HolderInfo, holder_infos
from qwen35.state.tables import (
    ENTRY_READY,
    EXTENT_HELD,
    FREE,
    LEASE_CLAIMED,
    LEASE_OPEN,
    OWNER_CACHE,
    OWNER_FREE,
    PIN_HELD,
    Tables,
)


@dataclass(frozen=True)
class Counts:
    """free + held + cached == total."""

    total: int
    free: int
    held: int
    cached: int


@dataclass(frozen=True)
class PrefixStats:
    """The prefix cache. What begins with ``num_`` counts since the arena was made, but for entries and pins."""

    num_entries: int
    num_pins: int
    cached_bytes: int  # of blocks and slots
    num_lookups: int
    num_hits: int
    num_hit_tokens: int
    num_published: int
    num_refused: int  # publications that did not fit the tables
    num_evicted: int


@dataclass(frozen=True)
class Stats:
    """A consistent look at the tables."""

    blocks: Counts
    slots: Counts
    num_used_blocks: int  # of the held ones, as their holders said with the last heartbeat
    num_used_slots: int
    num_open_leases: int
    num_claimed_leases: int
    num_extents: int
    num_expired_leases: int  # since the arena was made, as the two below
    num_reclaimed_extents: int
    num_dead_holders: int
    prefix: PrefixStats
    holders: tuple[HolderInfo, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def collect(tables: Tables, now: float) -> Stats:
    header, holders = tables.header, holder_infos(tables, now)
    blocks, slots = _count(tables.block_owner), _count(tables.slot_owner)
    counted = ("num_lookups", "num_hits", "num_hit_tokens", "num_published", "num_refused", "num_evicted")
    prefix = PrefixStats(
        num_entries=int((tables.entries["state"] == ENTRY_READY).sum()),
        num_pins=int((tables.pins["state"] == PIN_HELD).sum()),
        cached_bytes=blocks.cached * tables.geometry.block_bytes + slots.cached * tables.geometry.slot_bytes,
        **{name: int(header[name]) for name in counted},
    )
    return Stats(
        blocks=blocks,
        slots=slots,
        num_used_blocks=sum(holder.num_used_blocks for holder in holders),
        num_used_slots=sum(holder.num_used_slots for holder in holders),
        num_open_leases=int((tables.leases["state"] == LEASE_OPEN).sum()),
        num_claimed_leases=int((tables.leases["state"] == LEASE_CLAIMED).sum()),
        num_extents=int((tables.extents["state"] == EXTENT_HELD).sum()),
        num_expired_leases=int(header["num_expired_leases"]),
        num_reclaimed_extents=int(header["num_reclaimed_extents"]),
        num_dead_holders=int(header["num_dead_holders"]),
        prefix=prefix,
        holders=tuple(holders),
    )


def check_integrity(tables: Tables) -> None:
    """Raise `StateError` unless every owner is a held extent or the cache, extents and leases belong to occupied rows,
    and the cache has exactly what its entries list."""
    sizes = _owned(tables.block_owner, "block", tables.extents) + _owned(tables.slot_owner, "slot", tables.extents)
    empty = np.flatnonzero((tables.extents["state"] == EXTENT_HELD) & (sizes == 0))
    if len(empty):
        raise StateError(f"extents: expected at least one block or slot in each, got none in row {empty[0]}")
    for kind, rows, state in (("extent", tables.extents, EXTENT_HELD), ("lease", tables.leases, LEASE_CLAIMED)):
        owned = rows[rows["state"] == state]
        holders = tables.holders[owned["holder"]]
        if np.any((holders["state"] == FREE) | (holders["generation"] != owned["holder_generation"])):
            raise StateError(f"{kind} rows: expected owners among the holders, got one that is gone")
    _check_entries(tables)
    _check_pins(tables)


def _check_entries(tables: Tables) -> None:
    states, block_tokens = tables.entries["state"], tables.geometry.block_tokens
    if not np.all((states == FREE) | (states == ENTRY_READY)):
        raise StateError("entries: expected each ready or free, got one half made or half evicted")
    if np.any((states == ENTRY_READY) != (tables.slot_owner == OWNER_CACHE)):
        raise StateError("cached slots: expected one for each entry, got others")
    is_listed = np.zeros(len(tables.block_owner), bool)
    for row in np.flatnonzero(states == ENTRY_READY).tolist():
        num_tokens = int(tables.entries["num_tokens"][row])
        listed = tables.entry_blocks[row, : -(-num_tokens // block_tokens)]
        if len(np.unique(listed)) != len(listed):
            raise StateError(f"entry {row}: expected different blocks, got one twice")
        if not np.all(tables.block_keys[listed[: num_tokens // block_tokens]].any(axis=1)):
            raise StateError(f"entry {row}: expected a key for each full block, got none for one")
        is_listed[listed] = True
    if np.any(is_listed != (tables.block_owner == OWNER_CACHE)):
        raise StateError("cached blocks: expected those that entries list, got others")


def _check_pins(tables: Tables) -> None:
    held = tables.pins[tables.pins["state"] == PIN_HELD]
    entries, leases = tables.entries[held["entry"]], tables.leases[held["lease"]]
    is_live = (entries["state"] == ENTRY_READY) & (entries["generation"] == held["entry_generation"])
    is_live &= (leases["state"] == LEASE_CLAIMED) & (leases["generation"] == held["lease_generation"])
    if not np.all(is_live):
        raise StateError("pins: expected live entries and leases, got one that is gone")
    if len(np.unique(held[["entry_generation", "lease_generation"]])) != len(held):
        raise StateError("pins: expected one for an entry and a lease, got two")


def _count(owner: np.ndarray) -> Counts:
    free, cached = int((owner == OWNER_FREE).sum()), int((owner == OWNER_CACHE).sum())
    return Counts(total=len(owner), free=free, held=int((owner > OWNER_FREE).sum()), cached=cached)


def _owned(owner: np.ndarray, kind: str, extents: np.ndarray) -> np.ndarray:
    """How many blocks or slots each extent row owns; an owner that isn't a held extent is an error."""
    rows = owner[owner > OWNER_FREE] - 1
    bad = rows[extents["state"][rows] != EXTENT_HELD]
    if len(bad):
        raise StateError(f"{kind}s: expected owners among held extents, got extent row {int(bad[0])}")
    return np.bincount(rows, minlength=len(extents))
