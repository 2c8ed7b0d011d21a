"""A process of a test: attaches to an arena and does what its parent writes to its stdin, one JSON object a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen35.errors import Qwen35Error
from qwen35.state.arena import Arena
from qwen35.state.entries import EntryTable
from qwen35.state.extents import ExtentRef, ExtentTable
from qwen35.state.geometry import Geometry
from qwen35.state.holder import Holder
from qwen35.state.leases import Lease
from qwen35.state.manager import Manager
from qwen35.state.prefix import PrefixHasher, PrefixReader, Publication

ROOT = Path(__file__).parents[2]


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Commands:
    """Each public method is a command; arguments and results are JSON."""

    def attach(self, directory: str, name: str, geometry: dict, fingerprint: str = "f") -> int:
        self.arena = Arena.open(name, Geometry(**geometry), fingerprint, directory=Path(directory))
        self.manager = Manager(self.arena, unclaimed_lease_seconds=5.0)
        return int(self.arena.tables.header["generation"])

    def register(self, instance: str) -> dict:
        self.holder = Holder.register(self.arena, instance)
        return asdict(self.holder.ref)

    def acquire(self, key: int, num_blocks: int, num_slots: int) -> dict | None:
        ref = self.manager.acquire(self.holder.ref, key, num_blocks, num_slots)
        return None if ref is None else asdict(ExtentTable(self.arena.tables).contents(ref))

    def release(self, ref: dict) -> int:
        return self.manager.release(self.holder.ref, [ExtentRef(**ref)])

    def claim(self, lease: dict) -> list[str]:
        return self.manager.claim(self.holder.ref, [Lease(**lease)])[0]

    def publish(self, lease: dict, extent: dict, num_tokens: int) -> dict:
        """A prefix of the tokens 0, 1, 2, … in the first blocks and slot of an extent."""
        return asdict(self.manager.publish(self.holder.ref, Lease(**lease), self._publication(extent, num_tokens)))

    def die_publishing(self, lease: dict, extent: dict, num_tokens: int, step: str) -> None:
        """The manager, which lives in this process, is killed where it comes to a step of its work, with its lock."""
        setattr(EntryTable, step, lambda *_: kill_process())
        self.publish(lease, extent, num_tokens)

    def find(self, num_tokens: int) -> list[dict]:
        hasher = PrefixHasher(range(num_tokens), block_tokens=self.arena.geometry.block_tokens)
        candidates = PrefixReader(self.arena.tables).candidates(hasher, num_tokens, needs_draft=True)
        return [asdict(entry) for entry in candidates]

    def _publication(self, extent: dict, num_tokens: int) -> Publication:
        block_tokens = self.arena.geometry.block_tokens
        hasher = PrefixHasher(range(num_tokens), block_tokens=block_tokens)
        blocks = tuple(extent["block_ids"][: -(-num_tokens // block_tokens)])
        digest, keys = hasher.digest(num_tokens), hasher.block_keys(num_tokens)
        return Publication(num_tokens, digest, blocks, keys, extent["slots"][0], has_draft=True)

    def is_cancelled(self, lease: dict) -> bool:
        return self.holder.cancelled([Lease(**lease)])[0]

    def die_holding_manager_lock(self) -> None:
        """Stop in the middle of an acquisition: blocks marked, extent not finished, lock held."""
        with self.manager._tables_locked():
            self.arena.tables.extents[5] = (1, 999, self.holder.ref.row, self.holder.ref.generation, 77)
            self.arena.tables.block_owner[:3] = 6
            kill_process()

    def fill_cache(self, value: int) -> int:
        """Write a number into the draft's keys of block 1; returns the bytes that were there."""
        cache = self.arena.cache_view()
        before = int(cache.draft.keys[1].view(-1)[0].item())
        cache.draft.keys[1] = value
        return before

    def announce_end(self) -> None:
        self.holder.announce_end()

    def detach(self) -> bool:
        return self.arena.close()


class Actor:
    """The parent's end. ``call`` waits for the answer; ``tell`` and ``answer`` do it in two steps."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.state.actor"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"actor ended with {self.process.wait()}")
        kind, value = json.loads(line)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def call(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def signal(self, number: int) -> None:
        """Send a signal; returns when it has taken effect."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        wanted = {signal.SIGSTOP: "T"}.get(number)
        while wanted and Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != wanted:
            time.sleep(0.001)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


class Actors:
    """All processes of a test."""

    def __init__(self) -> None:
        self._started: list[Actor] = []

    def start(self) -> Actor:
        self._started.append(Actor())
        return self._started[-1]

    def end(self) -> None:
        while self._started:
            self._started.pop().end()


def main() -> None:
    commands = Commands()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = ["ok", getattr(commands, command)(*arguments)]
        except Qwen35Error as error:
            answer = ["error", str(error)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
