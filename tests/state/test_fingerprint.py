from __future__ import annotations

import os
from pathlib import Path

from qwen35.state.fingerprint import fingerprint


def test_it_follows_checkpoint_and_arithmetic(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12")
    os.utime(weights, (1, 1))
    seen = [fingerprint(tmp_path, "a"), fingerprint(tmp_path, "b")]
    os.utime(weights, (2, 2))
    seen.append(fingerprint(tmp_path, "a"))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    seen.append(fingerprint(tmp_path, "a"))
    assert len(set(seen)) == 4 and all(len(one) == 32 for one in seen)
    assert fingerprint(tmp_path, "a") == seen[-1]
