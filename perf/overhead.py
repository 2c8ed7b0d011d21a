"""What the framework takes of a decode step beside the native kernels: ``python -m perf.overhead``.

One stream without drafts on the benchmark shape of 344 M parameters (random weights): wall time of engine steps against
the time spent inside the native library in the same steps, which it counts itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

from perf import shapes
from qwen35.engine.request import Request, SamplingParams
from qwen35.kernels.cpu import CpuOps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--num-streams", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--sampled", action="store_true", help="temperature 1 in place of greedy")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ops = CpuOps(arguments.num_threads)
    engine, _ = shapes.make_engine(shapes.small(), ops)
    sampling = SamplingParams(max_tokens=arguments.num_steps + 20, temperature=float(arguments.sampled))
    for uid in range(arguments.num_streams):
        engine.submit(request(uid, 32, sampling))
    walls, natives = [], []
    for step in range(arguments.num_steps + 10):
        before, start = ops.native_seconds, time.perf_counter()
        engine.step()
        wall, native = time.perf_counter() - start, ops.native_seconds - before
        if step >= 10:
            walls.append(wall), natives.append(native)
    wall, native = statistics.median(walls), statistics.median(natives)
    share = statistics.median((w - n) / w for w, n in zip(walls, natives, strict=True))
    print(
        f"{arguments.num_threads} threads, {arguments.num_streams} streams: step {wall * 1e3:.3f} ms, native "
        f"{native * 1e3:.3f} ms, rest {share * 100:.1f} % ({(wall - native) * 1e6:.0f} us)"
    )


def request(uid: int, num_tokens: int, sampling: SamplingParams) -> Request:
    return Request(
        uid=uid,
        request_id=str(uid),
        token_ids=tuple((7 * i + uid) % 31_000 for i in range(num_tokens)),
        positions=torch.arange(num_tokens).repeat(3, 1),
        image_embeds=torch.empty(0, 1),
        sampling=sampling,
        seed=uid,
        deadline=math.inf,
    )


if __name__ == "__main__":
    main()
