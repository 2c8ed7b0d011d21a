"""Quantises a checkpoint directory to NVFP4 with ModelOpt, on a CPU.

    python build/quantize.py --checkpoint DIR --output DIR --scheme nvfp4 [--kv-cache fp8] [--calibration FILE.jsonl]

The output is a complete checkpoint: weights in ModelOpt's unified layout under the published names, both configuration
files, and the source's tokenizer, chat template, preprocessor and generation files. The draft (`mtp.*`) is kept bit for
bit and excluded in both files. The directory appears only when everything is written and verified.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: the folder of this file is no place to import from
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from build.quantization.calibration import CalibrationError, calibration_inputs
from build.quantization.ptq import KV_CACHES, SCHEMES, export_model, logits_of, quantize_model, write_configs
from build.quantization.reference import load_reference, published_name
from build.quantization.summary import Agreement, Group, agreement, groups_of, table, warnings_for
from build.quantization.verify import VerificationError, verify
from qwen35.config import ModelConfig
from qwen35.errors import Qwen35Error
from qwen35.weights.loader import load_language, load_vision
from qwen35.weights.reader import CheckpointReader
from qwen35.weights.scheme import QuantizationScheme

NUM_CALIBRATION_SAMPLES = 64
NUM_COMPARED_SAMPLES = 6
_NOT_COPIED = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")


class QuantizeError(RuntimeError):
    """The arguments or the checkpoint do not allow it; the message says what to change."""


@dataclass(frozen=True)
class Result:
    """What was written: groups of tensors, bytes by type, agreement with the original, warnings."""

    output: Path
    groups: list[Group]
    dtype_bytes: dict[str, int]
    agreement: Agreement
    warnings: list[str]


def quantize(
    checkpoint: Path,
    output: Path,
    *,
    scheme: str = "nvfp4",
    kv_cache: str | None = None,
    calibration: Path | None = None,
    num_samples: int = NUM_CALIBRATION_SAMPLES,
    force: bool = False,
    seed: int = 0,
) -> Result:
    """Quantises `checkpoint` into the new directory `output`.

    Raises QuantizeError, CalibrationError, VerificationError or a Qwen35Error; then `output` is as it was.
    """
    _check_places(checkpoint, output, force)
    config = ModelConfig.from_directory(checkpoint)
    if QuantizationScheme.from_directory(checkpoint).algorithm is not None:
        raise QuantizeError(f"{checkpoint}: expected an unquantised checkpoint, this one is quantised already")
    inputs = calibration_inputs(checkpoint, config, num_samples, calibration, seed)
    with CheckpointReader(checkpoint) as source, _new_directory(output, force) as partial:
        agreed = _write(source, partial, inputs, scheme, kv_cache)
        _copy_companions(checkpoint, partial)
        with CheckpointReader(partial) as written:
            arrivals = verify(source, written, has_vision=config.vision is not None)
            dtype_bytes = _bytes_by_type(written)
        notes = _check_loading(partial, any(arrival.name.startswith("mtp.") for arrival in arrivals))
    groups = groups_of(arrivals, scheme)
    return Result(output, groups, dtype_bytes, agreed, [*warnings_for(groups), *notes])


def _write(source: CheckpointReader, directory: Path, inputs: list, scheme: str, kv_cache: str | None) -> Agreement:
    """Reference model, calibration, export."""
    model = load_reference(source)
    compared = inputs[:: max(1, len(inputs) // NUM_COMPARED_SAMPLES)][:NUM_COMPARED_SAMPLES]
    before = logits_of(model, compared)
    model = quantize_model(model, inputs, scheme, kv_cache)
    agreed = agreement(before, logits_of(model, compared))
    has_vision = hasattr(model.config, "vision_config")
    published = {name: published_name(name, has_vision=has_vision) for name in source.names}
    beside_draft = [name.removesuffix(".weight") for name, ours in published.items() if not ours.startswith("mtp.")]
    export_model(model, directory, _kept_tensors(source, published, model.dtype), beside_draft)
    write_configs(source.directory, directory)
    return agreed


def _kept_tensors(source: CheckpointReader, published: dict[str, str], dtype: torch.dtype) -> dict[str, Tensor]:
    """The draft, and the vectors whose type the model does not have (float32 among bfloat16)."""
    return {
        ours: source.read(name)
        for name, ours in published.items()
        if ours.startswith("mtp.") or (source.info(name).dtype != dtype and len(source.info(name).shape) == 1)
    }


def _check_places(checkpoint: Path, output: Path, force: bool) -> None:
    if output.resolve() == checkpoint.resolve() or checkpoint.resolve() in output.resolve().parents:
        raise QuantizeError(f"output: expected a directory outside the checkpoint, got {output}")
    if output.exists() and not output.is_dir():
        raise QuantizeError(f"output: expected a directory, {output} is a file")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise QuantizeError(
            f"output: expected no directory or an empty one, {output} has files; use --force to replace it"
        )


@contextmanager
def _new_directory(output: Path, force: bool) -> Iterator[Path]:
    """A directory beside `output` that becomes `output` when the block ends well, and vanishes otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        yield partial
        _make_readable(partial)
        if force and output.is_dir():
            replaced = partial.with_suffix(".replaced")
            output.rename(replaced)
            partial.rename(output)
            shutil.rmtree(replaced)
        else:
            partial.rename(output)  # an empty directory may be there
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_readable(directory: Path) -> None:
    """Temporary directories and ModelOpt's files are for their owner alone; a server may run as someone else."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


def _copy_companions(source: Path, directory: Path) -> None:
    """Tokenizer, chat template, preprocessor, generation config and licence, byte for byte."""
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COPIED_SUFFIXES or path.name.upper().startswith("LICENSE")
        if path.is_file() and wanted and path.name not in _NOT_COPIED:
            shutil.copyfile(path, directory / path.name)


def _check_loading(directory: Path, has_draft: bool) -> list[str]:
    """Our own loader must accept the result, without reading it; returns its warnings."""
    config = ModelConfig.from_directory(directory)
    *_, report = load_language(directory, config, with_draft=has_draft, device="meta")
    if config.vision is not None:
        load_vision(directory, config, device="meta")
    notes = [] if has_draft else ["the checkpoint has no mtp.* tensors: it can be served with num_draft_tokens 0 only"]
    return [*report.warnings, *notes]


def _bytes_by_type(reader: CheckpointReader) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in reader.names:
        info = reader.info(name)
        key = str(info.dtype).removeprefix("torch.")
        sizes[key] = sizes.get(key, 0) + info.num_bytes
    return sizes


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python build/quantize.py", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory of a bfloat16 checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="directory to create")
    parser.add_argument("--scheme", choices=sorted(SCHEMES), default="nvfp4")
    parser.add_argument("--kv-cache", choices=sorted(KV_CACHES), help="calibrate scales of a quantised KV cache")
    parser.add_argument("--calibration", type=Path, metavar="FILE.jsonl", help="one sample a line: text, or messages")
    parser.add_argument("--num-samples", type=int, default=NUM_CALIBRATION_SAMPLES)
    parser.add_argument("--force", action="store_true", help="replace the output directory")
    return parser.parse_args(arguments)


def _quieten() -> None:
    """Notes of the libraries that hold for every run on a CPU."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="transformers .* is not tested with current version of modelopt")
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_arguments(arguments)
    started = time.monotonic()
    _quieten()
    try:
        result = quantize(
            options.checkpoint,
            options.output,
            scheme=options.scheme,
            kv_cache=options.kv_cache,
            calibration=options.calibration,
            num_samples=options.num_samples,
            force=options.force,
        )
    except (QuantizeError, CalibrationError, VerificationError, Qwen35Error) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 1
    print(table(result.groups, result.dtype_bytes))
    agreed = result.agreement
    print(
        f"against the original on {agreed.num_tokens} tokens (fake quantisation): KL {agreed.kl:.4f}, "
        f"same most likely token {100 * agreed.same_top:.1f} %"
    )
    print("every source tensor arrived: kept ones bit for bit, quantised ones within the error above")
    for warning in result.warnings:
        print(f"WARNING: {warning}")
    print(f"{result.output}: written in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
