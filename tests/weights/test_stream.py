"""Pieces of files reach their places: any order, any alignment, with and without direct reads."""

import ctypes
import mmap
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from qwen35.errors import CheckpointError
from qwen35.weights import stream as streaming
from qwen35.weights.stream import Piece, stream

CONTENT = random.Random(0).randbytes(100_003)


@pytest.fixture(params=["direct", "page cache"])
def file(request, tmp_path: Path, monkeypatch) -> Path:
    if request.param == "page cache":
        monkeypatch.setattr(streaming, "_open", lambda path: os.open(path, os.O_RDONLY))
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


def pieces_of(path: Path, bounds: list[tuple[int, int]], taken: dict) -> list[Piece]:
    def store(key: tuple, data: torch.Tensor) -> None:
        assert key not in taken
        taken[key] = bytes(data.numpy())

    return [Piece(path, begin, end - begin, partial(store, (path, begin, end))) for begin, end in bounds]


def test_every_piece_gets_its_bytes_once(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "READ_BYTES", 5000)
    rng, taken, reads = random.Random(1), {}, []
    cuts = sorted(rng.sample(range(len(CONTENT)), 60))
    bounds = [(a, min(b, a + 5000)) for a, b in zip(cuts, cuts[1:], strict=False) if rng.random() < 0.8]
    bounds += [(len(CONTENT) - 3, len(CONTENT))]
    rng.shuffle(bounds)
    other = file.with_name("other")
    other.write_bytes(CONTENT[::-1])
    pieces = pieces_of(file, bounds, taken) + pieces_of(other, [(1, 4000)], taken)
    stream(pieces, lambda done, total: reads.append((done, total)))
    assert taken.pop((other, 1, 4000)) == CONTENT[::-1][1:4000]
    assert taken == {(file, begin, end): CONTENT[begin:end] for begin, end in bounds}
    total = sum(piece.num_bytes for piece in pieces)
    assert reads[-1] == (total, total) and 10 < len(reads) < len(pieces)


def test_what_was_read_leaves_the_page_cache(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())  # only clean pages can go
    assert opened.closed and resident_pages(file) > 0
    stream(pieces_of(file, [(0, 50_000), (50_000, len(CONTENT))], {}))
    assert resident_pages(file) == 0


def resident_pages(path: Path) -> int:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    found = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), found) == 0
    return sum(flags & 1 for flags in found)


def test_neighbours_are_read_together_and_what_lies_between_is_not(file: Path, monkeypatch) -> None:
    reads = []
    whole = streaming._File.read
    monkeypatch.setattr(
        streaming._File,
        "read",
        lambda self, begin, end, buffer: reads.append((begin, end)) or whole(self, begin, end, buffer),
    )
    stream(pieces_of(file, [(20_000, 30_000), (0, 10), (10, 500), (500, 501), (90_000, 90_001)], {}))
    assert sorted(reads) == [(0, 501), (20_000, 30_000), (90_000, 90_001)]


def test_a_file_that_is_cut_short_meanwhile(file: Path) -> None:
    pieces = pieces_of(file, [(0, 10), (50_000, 99_000)], {})
    os.truncate(file, 60_000)
    with pytest.raises(CheckpointError, match=f"{file}: expected 99000 bytes or more, got 60000"):
        stream(pieces)


def test_an_error_of_the_one_who_stores_ends_the_threads(file: Path) -> None:
    def fail(data: torch.Tensor) -> None:
        raise MemoryError("full")

    pieces = [Piece(file, begin, 1, fail) for begin in range(0, 100_000, 1000)]
    with pytest.raises(MemoryError, match="full"):
        stream(pieces)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: expected a readable file, got .*No such file"):
        stream(pieces_of(tmp_path / "none", [(0, 1)], {}))


def test_nothing_to_read() -> None:
    stream([], lambda *_: pytest.fail("progress of nothing"))


def test_a_file_system_that_refuses_direct_reads(tmp_path: Path, monkeypatch) -> None:
    def refuse(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    path, taken = tmp_path / "data", {}
    path.write_bytes(CONTENT)
    stream(pieces_of(path, [(3, 70_000)], taken))
    assert list(taken.values()) == [CONTENT[3:70_000]]
