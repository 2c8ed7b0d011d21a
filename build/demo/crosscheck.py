"""Hold the training model's greedy outputs against transformers: `python -m build.demo.crosscheck [--dtype bfloat16]`.

An output is confirmed when transformers' greedy choice equals it at every position: what its `generate` gives.
"""

import argparse

import torch
from safetensors.torch import load_file
from transformers import Qwen3_5MoeForConditionalGeneration

from . import export, heldout, images
from .config import CHECKPOINT_DIR
from .data import IMAGE_ID, Sequence3, Stream
from .decode import generate
from .evaluate import MAX_NEW_TOKENS, load_model, prompt_of


def transformers_inputs(sequence: Sequence3) -> dict:
    """Picture arguments of transformers' forward for one sequence."""
    if not sequence.specs:
        return {}
    patches, grids = zip(*(images.to_patches(images.render(spec)) for spec in sequence.specs), strict=True)
    kinds = torch.tensor([[int(token == IMAGE_ID) for token in sequence.tokens]], dtype=torch.int)
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}


@torch.no_grad()
def confirms(hf: torch.nn.Module, prompt: Sequence3, output: list[int]) -> bool:
    """Whether transformers' greedy decoding gives `output` too."""
    whole = Sequence3(prompt.tokens + output, [], prompt.specs)
    logits = hf(input_ids=torch.tensor([whole.tokens]), **transformers_inputs(whole)).logits[0]
    return logits[len(prompt.tokens) - 1 : -1].argmax(-1).tolist() == output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=heldout.ITEMS_PER_SET, help="items per set")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stream = Stream("none", 0, 1, 64)
    ours = load_model(export.training_state(load_file(str(CHECKPOINT_DIR / "model.safetensors"))), nvfp4=False)
    hf = Qwen3_5MoeForConditionalGeneration.from_pretrained(CHECKPOINT_DIR, dtype=getattr(torch, args.dtype))
    for name in heldout.SET_NAMES:
        items = heldout.load(name)[: args.limit]
        prompts = [prompt_of(item, stream) for item in items]
        outputs = generate(ours, prompts, MAX_NEW_TOKENS)
        confirmed = sum(confirms(hf, prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
        print(f"{name:12} {confirmed} of {len(items)} outputs confirmed ({args.dtype})")


if __name__ == "__main__":
    main()
