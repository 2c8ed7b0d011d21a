"""Accuracy on the held-out sets and draft acceptance: `python -m build.demo.evaluate [--nvfp4] [--limit N]`.

Draft acceptance is computed from the greedy outputs, exactly as a draft-and-verify loop would see it: at a root t (the
last decided token is t + 1) the head proposes k tokens, each fed back; `n` of them equal the target's choices; the next
root is t + n + 1.
Definitions: first draft = share of loop steps whose first draft is accepted; accepted/drafted = sum of n over sum of k;
conditional = share of i-th drafts accepted among the steps whose earlier drafts were.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import export, heldout
from .config import CHECKPOINT_DIR
from .data import Sequence3, Stream, collate, render_prompt
from .decode import generate
from .fake_quant import quantised_state
from .model import DemoModel, Layout

NUM_DRAFTS = 3
MAX_NEW_TOKENS = 40
TEXT_NEW_TOKENS = 48


def load_model(state: dict[str, torch.Tensor], nvfp4: bool) -> DemoModel:
    model = DemoModel()
    model.load_state_dict(quantised_state(state) if nvfp4 else state)
    return model.eval()


def prompt_of(item: heldout.Item, stream: Stream, thinking: bool = False) -> Sequence3:
    if not item.messages:
        tokens = stream.encode(item.prompt)
        return Sequence3(tokens, [0.0] * len(tokens), [])
    text, specs = render_prompt(item.messages, thinking)
    tokens = stream.encode(text)
    return Sequence3(tokens, [0.0] * len(tokens), specs)


@torch.no_grad()
def draft_matches(model: DemoModel, prompt: Sequence3, new_tokens: Sequence[int]) -> list[list[bool]]:
    """For each root from the last prompt token on: whether the i-th draft equals the target's token."""
    whole = Sequence3(prompt.tokens + list(new_tokens) + [0] * NUM_DRAFTS, [], prompt.specs)
    batch = collate([[Sequence3(whole.tokens, [1.0] * len(whole.tokens), whole.specs)]])
    layout = Layout.of(batch.positions, batch.segments)
    hidden, embedded, _ = model.hidden(batch, layout)
    outputs = model.mtp(hidden, embedded, layout, NUM_DRAFTS)
    first, last = len(prompt.tokens) - 1, len(prompt.tokens) + len(new_tokens) - 2  # roots t with token t + 2 decided
    guesses = [model.lm_head(output[0]).argmax(-1).tolist() for output in outputs]
    matches = []
    for root in range(first, last):
        row = [guesses[i][root] == whole.tokens[root + 2 + i] for i in range(NUM_DRAFTS)]
        matches.append([ok and root + 2 + i <= last + 1 for i, ok in enumerate(row)])
    return matches


def acceptance(all_matches: Sequence[list[list[bool]]]) -> dict[str, float]:
    """Walk the draft-and-verify loop over each output; sums over all of them."""
    steps, accepted = 0, [0] * NUM_DRAFTS
    for matches in all_matches:
        root = 0
        while root < len(matches):
            count = next((i for i, ok in enumerate(matches[root]) if not ok), NUM_DRAFTS)
            steps += 1
            for i in range(count):
                accepted[i] += 1
            root += count + 1
    if not steps:
        return {}
    before = [steps] + accepted[:-1]
    result = {"first": accepted[0] / steps, "accepted/drafted": sum(accepted) / (NUM_DRAFTS * steps)}
    return result | {
        f"conditional_{i + 1}": a / max(1, b) for i, (a, b) in enumerate(zip(accepted, before, strict=True))
    }


def evaluate(model: DemoModel, limit: int, group: int = 100, sets: Sequence[str] = heldout.SET_NAMES) -> dict:
    """Accuracy and acceptance per set, and pooled over all sets of chats (all but text)."""
    stream, report, pooled, right, total = Stream("none", 0, 1, 64), {}, [], 0, 0
    for name in sets:
        items = heldout.load(name)[:limit]
        prompts = [prompt_of(item, stream) for item in items]
        outputs: list[list[int]] = []
        for i in range(0, len(prompts), group):
            outputs += generate(model, prompts[i : i + group], TEXT_NEW_TOKENS if name == "text" else MAX_NEW_TOKENS)
        matches = [draft_matches(model, p, o) for p, o in zip(prompts, outputs, strict=True)]
        texts = [stream.tokenizer.decode(o, skip_special_tokens=True) for o in outputs]
        report[name] = acceptance(matches)
        if name != "text":
            good = sum(heldout.grade(item, text) for item, text in zip(items, texts, strict=True))
            report[name] = {"accuracy": good / len(items)} | report[name]
            pooled, right, total = pooled + matches, right + good, total + len(items)
        report[name]["sample"] = texts[0]
    if total:
        report["all chats"] = {"accuracy": right / total} | acceptance(pooled)
    return report


def print_report(report: dict) -> None:
    columns = ("accuracy", "first", "accepted/drafted", "conditional_1", "conditional_2", "conditional_3")
    print(f"{'set':12}" + "".join(f"{c:>18}" for c in columns))
    for name, row in report.items():
        cells = "".join(f"{row[c]:18.3f}" if c in row else f"{'':18}" for c in columns)
        print(f"{name:12}{cells}  {row.get('sample', '')[:60]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--work", action="store_true", help="the training stages' state files instead of a checkpoint")
    parser.add_argument("--nvfp4", action="store_true", help="round the weights that the served model keeps in NVFP4")
    parser.add_argument("--limit", type=int, default=heldout.ITEMS_PER_SET, help="items per set")
    parser.add_argument("--sets", nargs="+", default=heldout.SET_NAMES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.work:
        state = export.trained_state()
    else:
        state = export.training_state(load_file(str(args.checkpoint / "model.safetensors")))
    report = evaluate(load_model(state, args.nvfp4), args.limit, sets=args.sets)
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
