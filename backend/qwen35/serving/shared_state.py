"""This llm's part of the arena that all models share. Knows no Triton: how to call the manager comes as a function."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35.config import ModelConfig
from qwen35.devices import select_device
from qwen35.kernels.identity import arithmetic_of
from qwen35.settings import Settings
from qwen35.state.arena import Arena
from qwen35.state.fingerprint import fingerprint
from qwen35.state.geometry import Geometry
from qwen35.state.holder import Holder
from qwen35.state.pool import BlockPool
from qwen35.state.source import ManagerSource, RemoteManager


@dataclass(frozen=True)
class SharedState:
    """This instance's part of the arena. ``close`` says that nothing of it will be touched again."""

    arena: Arena
    holder: Holder
    manager: RemoteManager
    pool: BlockPool
    prefix_salt: str  # of `PrefixHasher`: on a GPU each process has bytes of its own behind the arena's blocks

    @classmethod
    def attach(
        cls,
        settings: Settings,
        config: ModelConfig,
        instance: str,
        call: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> SharedState:
        """Create or attach, and register as a holder. ``call``: one operation of the state manager; not called yet."""
        geometry = Geometry.derive(config, settings)
        with ExitStack() as undo:
            arena = Arena.open(settings.arena_name, geometry, contents_of(settings))
            undo.callback(arena.close)
            holder = Holder.register(arena, instance)
            undo.pop_all()
        manager = RemoteManager(call)
        pool = BlockPool(
            ManagerSource(manager, arena, holder, time.monotonic),
            num_total_blocks=geometry.num_blocks,
            num_total_slots=geometry.num_slots,
        )
        is_shared = select_device(settings.device).type == "cpu"
        salt = "" if is_shared else f"holder {holder.ref.row} {holder.ref.generation}"
        return cls(arena, holder, manager, pool, salt)

    def close(self) -> None:
        """The manager takes back what is still ours; the last one out removes the arena."""
        self.holder.close()
        self.arena.close()


def contents_of(settings: Settings) -> str:
    """Fingerprint of what the models of one server put into their arena; each of them must come to the same."""
    return fingerprint(Path(settings.checkpoint), arithmetic_of(settings, select_device(settings.device)))
