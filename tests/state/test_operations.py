from __future__ import annotations

import json

import pytest

from qwen35.errors import Cancelled, DeadlineExceeded, InvalidArgument, Qwen35Error
from qwen35.state.extents import HolderRef
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.local import LocalTables
from qwen35.state.manager import Manager
from qwen35.state.operations import Operations, publication_to_json
from qwen35.state.pool import BlockPool
from qwen35.state.prefix import EntryRef, PrefixHasher, PrefixReader, Publication, Published
from qwen35.state.source import ManagerSource, RemoteManager
from tests.state.tiny import tiny_geometry

SECOND_NS = 10**9
NOW_UNIX_NS = 1_700_000_000 * SECOND_NS


def clock() -> float:
    return 50.0


class Far:
    """A manager behind JSON texts."""

    def __init__(self) -> None:
        self.owner = LocalTables(tiny_geometry())
        self.manager = Manager(self.owner, unclaimed_lease_seconds=5.0, clock=clock)
        self.operations = Operations(self.manager, clock, lambda: NOW_UNIX_NS)
        self.holder = Holder.register(self.owner, "llm", clock)
        self.remote = RemoteManager(self.call)

    def call(self, message: dict) -> dict:
        message = json.loads(json.dumps(message))
        return json.loads(json.dumps(self.operations.run(message["operation"], message)))

    def open(self, request_id: str = "r", deadline_s: float = 10, **more: object) -> Lease:
        deadline = NOW_UNIX_NS + int(deadline_s * SECOND_NS)
        message = {"request_id": request_id, "deadline_unix_ns": deadline, "uid": "ff", "sampling": {}} | more
        return Lease(**self.operations.run("open", message))


def test_a_request_from_open_to_close():
    far = Far()
    lease = far.open()
    assert far.remote.claim(far.holder.ref, [lease, Lease(5, 5)]) == (["claimed", "expired"], [None, None])
    assert far.call({"operation": "cancel", "request_id": "r"}) == {"cancelled": 1}
    assert far.holder.cancelled([lease]) == [True]
    assert far.remote.close(far.holder.ref, [lease]) == 1
    assert far.call({"operation": "check"}) == {"ok": True}


def test_drain_cancels_every_live_request():
    far = Far()
    running, waiting, ended = far.open("a"), far.open(""), far.open("b")
    far.remote.claim(far.holder.ref, [running, ended])
    far.remote.close(far.holder.ref, [ended])
    assert far.call({"operation": "drain"}) == {"cancelled": 2}
    assert far.holder.cancelled([running]) == [True]
    assert far.remote.claim(far.holder.ref, [waiting]) == (["cancelled"], [None])
    assert far.open("b") != ended  # nothing is remembered


def test_an_unclaimed_lease_can_be_closed_without_a_holder():
    far = Far()
    lease = far.open()
    assert far.operations.run("close", {"leases": [{"row": lease.row, "generation": lease.generation}]}) == {
        "closed": 1
    }


def test_times_are_converted():
    far = Far()
    with pytest.raises(DeadlineExceeded, match=r"got 2\.000 s ago"):
        far.open(deadline_s=-2)
    far.manager.cancel("r")
    with pytest.raises(Cancelled):
        far.open(arrival_unix_ns=NOW_UNIX_NS - SECOND_NS)
    far.open(arrival_unix_ns=NOW_UNIX_NS + SECOND_NS)


def test_a_pool_over_a_far_manager():
    far = Far()
    source = ManagerSource(far.remote, far.owner, far.holder, clock)
    pool = BlockPool(source, num_total_blocks=12, num_total_slots=3, extent_blocks=4, extent_slots=1)
    pool.refill()
    assert pool.allocate_blocks(3) == [0, 1, 2]
    pool.refill()
    blocks = far.call({"operation": "stats"})["blocks"]
    assert blocks == {"total": 12, "free": 4, "held": 8, "cached": 0}
    assert far.call({"operation": "stats"})["num_used_blocks"] == 3
    pool.free_blocks([0, 1, 2])
    pool.close()
    assert far.manager.stats().blocks.free == 12 and far.manager.stats().slots.free == 3


def test_a_prefix_from_publication_to_hit():
    far = Far()
    source = ManagerSource(far.remote, far.owner, far.holder, clock)
    extent, lease, other = source.acquire(3, 1), far.open(), far.open()
    hasher = PrefixHasher(range(10), block_tokens=4)
    publication = Publication(
        10, hasher.digest(10), extent.block_ids, hasher.block_keys(10), extent.slots[0], has_draft=True
    )
    assert far.remote.publish(far.holder.ref, lease, publication) == Published(None, ()), "not claimed"
    far.remote.claim(far.holder.ref, [lease])
    published = far.remote.publish(far.holder.ref, lease, publication)
    assert published.slot_taken and published.taken_blocks == extent.block_ids
    entries = PrefixReader(far.owner.tables).candidates(hasher, 10, needs_draft=True)
    gone = EntryRef(1, 1)
    claims, hits = far.remote.claim(far.holder.ref, [lease, other], [None, [gone, *entries]])
    assert (claims, hits) == (["claimed", "claimed"], [None, published.entry])
    assert far.remote.unpin(far.holder.ref, lease, [published.entry, gone]) == 1
    assert far.call({"operation": "stats"})["prefix"] | {"cached_bytes": 0} == {
        "num_entries": 1, "num_pins": 1, "cached_bytes": 0, "num_lookups": 1, "num_hits": 1, "num_hit_tokens": 10,
        "num_published": 1, "num_refused": 0, "num_evicted": 0,
    }  # fmt: skip


REF = {"row": 0, "generation": 1}


@pytest.mark.parametrize(
    ("operation", "message", "error"),
    [
        ("destroy", {}, "operation: expected one of open, claim, publish, unpin, close, "),
        ("open", [], "request: expected a JSON object, got []"),
        ("open", {"deadline_unix_ns": 1}, "deadline: expected a time to come"),
        ("open", {"request_id": "r"}, "deadline_unix_ns: expected an integer of 64 bits, got None"),
        ("open", {"request_id": 7, "deadline_unix_ns": 2**62}, "request_id: expected text, got 7"),
        ("cancel", {}, "request_id: expected text, got None"),
        ("cancel", {"request_id": ""}, "request_id: expected a non-empty string, got ''"),
        ("claim", {"holder": REF}, "leases: expected a list of objects with row and generation, got None"),
        ("claim", {"holder": 3, "leases": []}, "holder: expected an object with row and generation, got 3"),
        ("claim", {"holder": {"row": "0"}, "leases": []}, "row: expected an integer of 64 bits, got '0'"),
        ("claim", {"holder": REF | {"generation": 2**80}, "leases": []}, "generation: expected an integer of 64 bits"),
        ("close", {"leases": [True]}, "leases: expected an object with row and generation, got True"),
        ("acquire", {"holder": REF, "key": 1, "num_blocks": 1.5}, "num_blocks: expected an integer of 64 bits, got 1"),
        ("acquire", {"holder": REF, "key": 1, "num_blocks": 1, "num_slots": 1, "need": "all"}, "need: expected one of"),
        ("claim", {"holder": REF, "leases": [REF], "candidates": []}, "candidates: expected a list with one item for"),
        ("claim", {"holder": REF, "leases": [REF], "candidates": [3]}, "candidates: expected a list of objects with"),
        ("unpin", {"holder": REF, "lease": REF}, "entries: expected a list of objects with row and generation, got"),
        ("release", {"holder": REF, "extents": {}}, "extents: expected a list of objects with row"),
        ("acquire", {"holder": REF | {"row": 2}, "key": 1, "num_blocks": 1, "num_slots": 0}, "holder: expected"),
    ],
)  # fmt: skip
def test_bad_messages_name_the_field(operation: str, message: object, error: str):
    far = Far()
    if isinstance(message, dict) and error.startswith("deadline:"):
        message = message | {"request_id": "r"}
    with pytest.raises(Qwen35Error) as raised:
        far.operations.run(operation, message)
    assert error in str(raised.value)
    assert isinstance(raised.value, InvalidArgument) or error.split(":")[0] in ("deadline", "holder")
    far.manager.check_integrity()
    assert far.manager.stats().num_open_leases == 0


PUBLICATION = publication_to_json(
    Publication(4, (1, 2), (0,), PrefixHasher(range(4), block_tokens=4).block_keys(4), 0, has_draft=False)
)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (None, "publication: expected an object, got None"),
        ({"num_tokens": "4"}, "num_tokens: expected an integer of 64 bits, got '4'"),
        ({"digest": 7}, "digest: expected a list of two integers, got 7"),
        ({"digest": [1, 2.5]}, "digest: expected an integer of 64 bits, got 2.5"),
        ({"block_ids": [0]}, "block_ids: expected text, got [0]"),
        ({"block_ids": "AAA"}, "block_ids: expected base64, got 'AAA'"),
        ({"block_ids": "é"}, "block_ids: expected base64, got 'é'"),
        ({"block_ids": "AAAA"}, "block_ids: expected whole numbers or keys, got 3 bytes"),
        ({"block_keys": "AAAAAAAAAAA="}, "block_keys: expected whole numbers or keys, got 8 bytes"),
        ({"block_keys": ""}, "block_keys: expected shape (1, 2), got (0, 2)"),
        ({"slot": None}, "slot: expected an integer of 64 bits, got None"),
        ({"has_draft": 1}, "has_draft: expected true or false, got 1"),
        ({"num_tokens": 2**62}, "num_tokens: expected 1 to 40, got 4611686018427387904"),
    ],
)
def test_bad_publications_name_the_field(changes: dict | None, error: str):
    far = Far()
    lease = far.open()
    far.remote.claim(far.holder.ref, [lease])
    message = {"holder": vars(far.holder.ref), "lease": vars(lease)}
    message |= {} if changes is None else {"publication": PUBLICATION | changes}
    with pytest.raises(InvalidArgument) as raised:
        far.operations.run("publish", message)
    assert error in str(raised.value)
    far.manager.check_integrity()


def test_negative_counts_grant_nothing():
    far = Far()
    assert far.remote.acquire(far.holder.ref, 1, -4, -1) is None
    assert far.remote.acquire(HolderRef(0, 1), 2, 3, -1) is not None
    assert far.manager.stats().blocks.held == 3 and far.manager.stats().slots.held == 0
