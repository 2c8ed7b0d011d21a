"""Memory of a load: what is left, in which pages the weights lie, and the peak of a process that loads."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from build.synthetic.generate import generate
from build.synthetic.layouts import LAYOUTS
from build.synthetic.shapes import SHAPES
from qwen35.weights import progress
from qwen35.weights.huge_pages import ALIGNMENT_BYTES, HugePageMemory, aligned_bytes
from qwen35.weights.memory import control_group_limits
from qwen35.weights.progress import LoadProgress
from qwen35.weights.stream import BUFFER_BYTES

GIB = 1 << 30


def group(directory: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


V2 = ("memory.max", "memory.current", "file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def test_limits_of_nested_control_groups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    group(tmp_path / "fs/a/b", V2, "max", 10, 0)
    group(tmp_path / "fs/a", V2, str(4 * GIB), GIB, GIB // 2)
    assert list(control_group_limits(membership, tmp_path / "fs")) == [4 * GIB - GIB // 2]
    group(tmp_path / "fs/a/b", V2, str(GIB), 10, 3)
    assert list(control_group_limits(membership, tmp_path / "fs")) == [GIB - 7, 4 * GIB - GIB // 2]


def test_limits_of_version_1_and_of_a_container(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("9:name=systemd:/\n4:memory:/docker/0123\n1:cpu,cpuacct:/x\n0::/\n")
    group(tmp_path / "fs/memory", V1, str(2 * GIB), GIB, 0)  # the container's own group is mounted as the root
    assert list(control_group_limits(membership, tmp_path / "fs")) == [GIB]
    group(tmp_path / "fs/memory", V1, str((1 << 63) - 4096), GIB, 0)
    assert list(control_group_limits(membership, tmp_path / "fs")) == []
    assert list(control_group_limits(tmp_path / "none", tmp_path / "fs")) == []


def test_tensors_lie_one_behind_the_other_in_huge_pages() -> None:
    shapes = [((3, 5), torch.bfloat16), ((), torch.float32), ((1 << 20,), torch.float8_e4m3fn), ((0, 4), torch.uint8)]
    memory = HugePageMemory(sum(aligned_bytes(*shape) for shape in shapes))
    with memory.populating():
        tensors = [memory.take(*shape) for shape in shapes]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == shapes
    assert tensors[0].data_ptr() % (2 << 20) == 0
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + ALIGNMENT_BYTES
    assert all(not tensor.float().any() for tensor in tensors)
    with pytest.raises(MemoryError, match="expected at most 0 bytes of weights to come, got 64"):
        memory.take((1,), torch.uint8)
    address = tensors[0].data_ptr()
    del memory
    tensors[2].fill_(1)
    assert "hg" in flags_of(address)  # the system was asked for huge pages


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping around an address."""
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            is_ours = low <= address < high
        elif is_ours and first == "VmFlags:":
            return line.split()[1:]
    return []


_PROBE = """
import json, logging, sys
from pathlib import Path
from qwen35 import LLM, SamplingParams
from qwen35.weights import loader

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10

reports, load = [], loader._load
def observed(*arguments):
    before = status("VmRSS")
    result = load(*arguments)
    held, after, peak = result[1].num_bytes_held, status("VmRSS"), status("VmHWM")
    reports.append({"held": held, "before": before, "after": after, "peak": peak})
    return result
loader._load = observed
llm = LLM(sys.argv[1], num_draft_tokens=0, kv_cache_bytes=1 << 20, num_slots=1)
answers = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
[report] = reports
print(json.dumps({**report, "end": status("VmHWM"), "tokens": len(answers[0].token_ids)}))
"""


def test_peak_of_a_process_that_loads(tmp_path: Path) -> None:
    """What it holds, buffers, and nothing twice; with imports, tokenizer and engine still within 1 GiB more."""
    generate(SHAPES["344m"], LAYOUTS["nvfp4"], tmp_path / "checkpoint")
    command = [sys.executable, "-c", _PROBE, str(tmp_path / "checkpoint")]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout)
    assert seen["tokens"] == 2
    assert 200 << 20 < seen["held"] < 240 << 20
    assert seen["peak"] - seen["before"] < seen["held"] + BUFFER_BYTES + (48 << 20)
    assert seen["after"] - seen["before"] < seen["held"] + (48 << 20)
    assert seen["end"] < seen["held"] + GIB


def test_progress_in_a_terminal_and_in_a_log(monkeypatch, caplog, capsys) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0)
    with LoadProgress("dir", is_terminal=True) as bar:
        bar(1 << 20, 4 << 20)
        time.sleep(0.11)  # a bar is drawn ten times a second at most
        bar(3 << 20, 4 << 20)
    assert "75%" in capsys.readouterr().err and not caplog.text
    with LoadProgress("dir", is_terminal=False) as quiet:
        quiet(1, 2)
    assert not caplog.text
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0)
    with LoadProgress("dir", is_terminal=False) as log:
        log(10**9, 4 * 10**9)
    assert "dir: loading, 25 % (1.00 of 4.00 GB, " in caplog.text
    assert capsys.readouterr().err == ""
