"""Write the checkpoint from the training stages' state files: `python -m build.demo.export [--output DIR]`."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from .config import CHECKPOINT_DIR, WORK_DIR, write_config_files

FUSED = "mtp.layers.0.mlp.experts."


def published_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bf16 tensors under their published names: experts fused in the target, one by one in the draft head."""
    tensors = {}
    for name, value in state.items():
        value = value.detach().to(torch.bfloat16)
        if name == FUSED + "gate_up_proj":
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                tensors[f"{FUSED}{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{FUSED}{expert}.up_proj.weight"] = up.contiguous()
        elif name == FUSED + "down_proj":
            for expert, down in enumerate(value):
                tensors[f"{FUSED}{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = value.contiguous()
    return tensors


def training_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inverse of `published_tensors`: fp32 tensors for the training model."""
    state = {name: value.float() for name, value in tensors.items() if not name.startswith(FUSED)}
    experts = {int(name[len(FUSED) :].split(".")[0]) for name in tensors if name.startswith(FUSED)}
    if experts:
        get = lambda e, part: tensors[f"{FUSED}{e}.{part}_proj.weight"].float()  # noqa: E731
        order = sorted(experts)
        state[FUSED + "gate_up_proj"] = torch.stack([torch.cat((get(e, "gate"), get(e, "up"))) for e in order])
        state[FUSED + "down_proj"] = torch.stack([get(e, "down") for e in order])
    return state


def write_checkpoint(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Config files and model.safetensors; the tokenizer is written by `tokenizer.write_tokenizer`."""
    write_config_files(directory)
    path = directory / "model.safetensors"
    save_file(published_tensors(state), str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def main_state(work_dir: Path = WORK_DIR) -> dict[str, torch.Tensor]:
    """Parameters of the model after the main stage."""
    state = torch.load(work_dir / "main.pt")["modules"]
    return {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}


def trained_state(work_dir: Path = WORK_DIR) -> dict[str, torch.Tensor]:
    """The same, with the distilled draft head where that stage has run."""
    state = main_state(work_dir)
    distilled = work_dir / "distil.pt"
    if distilled.exists():
        state |= {f"mtp.{name}": value for name, value in torch.load(distilled)["modules"].items()}
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=CHECKPOINT_DIR)
    write_checkpoint(trained_state(), parser.parse_args().output)


if __name__ == "__main__":
    main()
