from pathlib import Path

import pytest
import torch

from qwen35.config import ModelConfig
from qwen35.serving import shared_state
from qwen35.serving.shared_state import SharedState
from qwen35.settings import Settings
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.mark.parametrize(("device", "salts"), [("cpu", ["", ""]), ("cuda", ["holder 0 1", "holder 1 1"])])
def test_cached_prefixes_are_shared_where_their_bytes_are(monkeypatch, tmp_path: Path, device: str, salts: list[str]):
    monkeypatch.setattr(shared_state, "select_device", lambda _: torch.device(device))
    make_tiny_checkpoint(tmp_path)
    settings = Settings(checkpoint=str(tmp_path), arena_name=f"test-{tmp_path.name}-{device}", kv_cache_bytes=1 << 20)
    config = ModelConfig.from_directory(tmp_path)
    states = [SharedState.attach(settings, config, "llm_0_0", lambda message: message) for _ in range(2)]
    assert [state.prefix_salt for state in states] == salts
    for state in states:
        state.close()
