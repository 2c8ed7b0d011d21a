"""Stage 3: the draft head alone, on the target as it will be served (NVFP4 weights), recursively for three drafts.

Half of the sequences are the target's own outputs: continuations of documentation and answers to chats, greedy and
sampled. A draft learns the target's distribution and, with equal weight, its greedy choice.
"""

import random

import torch
import torch.nn.functional as F

from . import tasks
from .data import Sequence3, Stream
from .decode import generate
from .model import Batch, DemoModel, Layout

DEPTH = 3
NUM_OWN_TEXTS, NUM_OWN_CHATS = 1200, 1200
TEXT_PROMPT_TOKENS, TEXT_NEW_TOKENS, CHAT_NEW_TOKENS = 48, 56, 36
OWN_SHARE = 0.5
GROUP = 200
CHAT_TASKS = (tasks.definition, tasks.sequence, tasks.small_talk, tasks.conversation, tasks.arithmetic)


def own_outputs(model: DemoModel, seed: int) -> list[Sequence3]:
    """Prompts with what the target answers; every second group greedy, the others sampled at 0.8."""
    stream, rng = Stream("own", seed, 1, 64), random.Random(f"{seed}/own")
    prompts = [stream.text(rng, rng.randint(12, TEXT_PROMPT_TOKENS)).tokens for _ in range(NUM_OWN_TEXTS)]
    stream.tasks, stream.shares = CHAT_TASKS, [1.0] * len(CHAT_TASKS)
    prompts += [prompt_part(stream.chat(rng, ())) for _ in range(NUM_OWN_CHATS)]
    sequences: list[Sequence3] = []
    for group, start in enumerate(range(0, len(prompts), GROUP)):
        chosen = [Sequence3(tokens, [0.0] * len(tokens), []) for tokens in prompts[start : start + GROUP]]
        longest = TEXT_NEW_TOKENS if start < NUM_OWN_TEXTS else CHAT_NEW_TOKENS
        outputs = generate(model, chosen, longest, temperature=0.8 * (group % 2), seed=seed + group)
        for prompt, output in zip(chosen, outputs, strict=True):
            sequences.append(Sequence3(prompt.tokens + output, prompt.weights + [1.0] * len(output), []))
    return sequences


def prompt_part(sequence: Sequence3) -> list[int]:
    """A chat's tokens before its answer."""
    return sequence.tokens[: sequence.weights.index(1.0)]


class OwnStream(Stream):
    """The training stream with a share of the target's own outputs."""

    def __init__(self, own: list[Sequence3], seed: int, num_rows: int, row_tokens: int):
        super().__init__("distil", seed, num_rows, row_tokens)
        self.own = own

    def chat(self, rng: random.Random, sizes) -> Sequence3:
        if rng.random() < OWN_SHARE:
            return rng.choice(self.own)
        return super().chat(rng, sizes)


@torch.no_grad()
def target_states(model: DemoModel, batch: Batch) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """The batch without its pictures' patches, hidden states and merged embeddings in bf16, for the replay buffer."""
    hidden, embedded, _ = model.hidden(batch, Layout.of(batch.positions, batch.segments))
    light = Batch(batch.tokens, batch.positions, batch.segments, batch.weights)
    return light, hidden.to(torch.bfloat16), embedded.to(torch.bfloat16)


def distil_loss(model: DemoModel, batch: Batch, hidden: torch.Tensor, embedded: torch.Tensor):
    """Mean over the steps of soft and hard cross-entropy against the target, and each step's share of right drafts."""
    hidden, embedded = hidden.float(), embedded.float()
    outputs = model.mtp(hidden, embedded, Layout.of(batch.positions, batch.segments), DEPTH)
    roots = hidden.shape[1] - DEPTH - 1
    loss, scores = 0.0, {}
    for step, output in enumerate(outputs):
        ahead = slice(step + 2, step + 2 + roots)  # the drafted tokens; the target chooses them one position earlier
        counted = (batch.weights[:, ahead] > 0) & (batch.segments[:, ahead] == batch.segments[:, :roots])
        weights = batch.weights[:, ahead][counted]
        with torch.no_grad():
            chosen = model.lm_head(hidden[:, step + 1 : step + 1 + roots][counted]).float()
        logits = model.lm_head(output[:, :roots][counted]).float()
        soft = F.cross_entropy(logits, chosen.softmax(-1), reduction="none")
        hard = F.cross_entropy(logits, chosen.argmax(-1), reduction="none")
        loss = loss + ((soft + hard) * weights).sum() / weights.sum() / (2 * DEPTH)
        answer = weights >= 1
        scores[f"d{step + 1}"] = (logits.argmax(-1) == chosen.argmax(-1))[answer].float().mean().item()
    return loss, scores
