"""Held-out sets through the live server: what speculation and NVFP4 change, and what they must not.

`python -m perf.heldout [--items-per-set N] [--output FILE.md]` serves the demo checkpoint three times, as NVFP4 with
drafts, as NVFP4 without and as bf16 without, asks every item greedily through the ensemble, and prints
    identical   items whose token ids are the same with and without drafts; all of them must be,
    accuracy    of each set, and the drop from bf16 to NVFP4 over all graded items with its one-sided 95 % upper bound,
    acceptance  accepted over drafted tokens.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from build import repository
from build.demo import heldout, images
from build.demo.heldout import Item
from build.server import Server
from qwen35.client import Client

NUM_DRAFT_TOKENS = 3
MAX_TOKENS = 40
NUM_STREAMS = 8
UPPER_95 = 1.645  # standard errors of a one-sided 95 % bound


@dataclass(frozen=True)
class Configuration:
    """One server."""

    name: str
    checkpoint: Path
    num_draft_tokens: int


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_draft_tokens: int


@dataclass(frozen=True)
class Results:
    """Answers of the three servers by item id."""

    items: Sequence[Item]
    drafted: Mapping[str, Answer]
    plain: Mapping[str, Answer]
    bf16: Mapping[str, Answer]

    @property
    def graded(self) -> list[Item]:
        return [item for item in self.items if item.answer]

    @property
    def different(self) -> list[str]:
        """Ids of the items whose tokens depend on drafting."""
        return [item.id for item in self.items if self.drafted[item.id].token_ids != self.plain[item.id].token_ids]

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens of all items."""
        answers = [self.drafted[item.id] for item in self.items]
        return sum(a.num_accepted_draft_tokens for a in answers) / sum(a.num_draft_tokens for a in answers)

    @property
    def drop(self) -> float:
        """Accuracy of bf16 minus that of NVFP4 on all graded items."""
        return statistics.fmean(self._losses())

    @property
    def drop_upper_bound(self) -> float:
        """One-sided 95 % bound of the drop, from the paired differences of the items."""
        losses = self._losses()
        return statistics.fmean(losses) + UPPER_95 * statistics.stdev(losses) / math.sqrt(len(losses))

    def _losses(self) -> list[int]:
        return [
            heldout.grade(item, self.bf16[item.id].text) - heldout.grade(item, self.plain[item.id].text)
            for item in self.graded
        ]


def items_of_all_sets(items_per_set: int) -> list[Item]:
    """The first items of each set."""
    return [item for name in heldout.SET_NAMES for item in heldout.load(name)[:items_per_set]]


def configurations() -> tuple[Configuration, Configuration, Configuration]:
    """NVFP4 with drafts, NVFP4 without, bf16 without."""
    quantised = repository.prepare(repository.DEMO_CHECKPOINT)
    return (
        Configuration(f"NVFP4, k = {NUM_DRAFT_TOKENS}", quantised, NUM_DRAFT_TOKENS),
        Configuration("NVFP4, k = 0", quantised, 0),
        Configuration("bf16, k = 0", repository.DEMO_CHECKPOINT, 0),
    )


def run(items: Sequence[Item]) -> Results:
    """Three servers, one after the other."""
    return Results(items, *(_answers(configuration, items) for configuration in configurations()))


def _answers(configuration: Configuration, items: Sequence[Item]) -> dict[str, Answer]:
    settings = {"num_draft_tokens": str(configuration.num_draft_tokens)}
    with Server(checkpoint=configuration.checkpoint, settings=settings) as server:
        return ask_all(server, items, configuration.name)


def ask_all(server: Server, items: Sequence[Item], title: str) -> dict[str, Answer]:
    """Answer of every item by its id, over NUM_STREAMS concurrent gRPC streams."""
    client = Client(server.grpc_url)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = tqdm(pool.map(lambda item: _ask(client, item), items), total=len(items), desc=title, unit="item")
        return {item.id: answer for item, answer in zip(items, answers, strict=True)}


def _ask(client: Client, item: Item) -> Answer:
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": 0}
    request: dict[str, Any] = {
        "stream": True,
        "return_logprobs": True,
        "return_perf_metrics": True,
        "sampling_parameters": json.dumps(sampling),
    }
    request |= {"messages": json.dumps(with_pictures(item.messages))} if item.messages else {"text_input": item.prompt}
    texts: list[str] = []
    token_ids: list[int] = []
    last: Mapping[str, Any] = {}
    for last in client.responses(request, request_id=item.id):
        texts.append(last["text_output"])
        token_ids += [int(token_id) for entry in json.loads(last["logprobs"]) for token_id in entry]
    return Answer("".join(texts), tuple(token_ids), last["total_draft_tokens"], last["total_accepted_draft_tokens"])


def with_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a client sends them: image specifications drawn and put in as PNG data URIs."""

    def part(content: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image_url", "image_url": {"url": _data_uri(content["spec"])}} if "spec" in content else content

    return [
        {**message, "content": content if isinstance(content, str) else [part(each) for each in content]}
        for message in messages
        for content in [message["content"]]
    ]


def _data_uri(spec: Mapping[str, Any]) -> str:
    buffer = io.BytesIO()
    images.render(spec).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def table(results: Results) -> str:
    """Markdown."""
    lines = [
        "| set | items | identical with and without drafts | accepted/drafted | NVFP4 | bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(item.set for item in results.items):
        part = Results([i for i in results.items if i.set == name], results.drafted, results.plain, results.bf16)
        lines.append(_row(name, part))
    lines.append(_row("all", results))
    lines += [
        "",
        f"Drop in accuracy from bf16 to NVFP4 on {len(results.graded)} graded items: {100 * results.drop:.2f} points, "
        f"one-sided 95 % upper bound {100 * results.drop_upper_bound:.2f} points.",
        f"Accepted over drafted tokens, k = {NUM_DRAFT_TOKENS}: {results.acceptance:.3f}.",
    ]
    return "\n".join(lines)


def _row(name: str, part: Results) -> str:
    num_items = len(part.items)
    return (
        f"| {name} | {num_items} | {num_items - len(part.different)} | {part.acceptance:.3f} "
        f"| {_accuracy(part.graded, part.plain)} | {_accuracy(part.graded, part.bf16)} |"
    )


def _accuracy(items: Sequence[Item], answers: Mapping[str, Answer]) -> str:
    if not items:
        return "not graded"
    return f"{100 * statistics.fmean(heldout.grade(item, answers[item.id].text) for item in items):.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.heldout", description=__doc__)
    parser.add_argument("--items-per-set", type=int, default=heldout.ITEMS_PER_SET)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    results = run(items_of_all_sets(options.items_per_set))
    text = table(results)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 1 if results.different else 0


if __name__ == "__main__":
    sys.exit(main())
