"""Sessions in files: a safetensors file with a JSON record among its metadata. What is read fits the model and the
program that wrote it, or is refused."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from qwen35.engine.request import ImageSpan, Request, SamplingParams, TokenLogprob
from qwen35.engine.sequence import Progress
from qwen35.engine.session import Session
from qwen35.engine.snapshot import Snapshot
from qwen35.errors import StateError

FORMAT = "qwen35-session-1"
_COUNTERS = ("num_computed_tokens", "num_pending", "num_drafted_tokens", "is_draft_lost")
_CACHED = "cache."  # before the names of a snapshot's tensors


def save_session(session: Session, path: Path, fingerprint: str) -> None:
    """Writes the file whole or not at all. ``fingerprint``: of checkpoint and program (``state.fingerprint``)."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".saving-")
    try:
        safetensors.torch.save_file(_tensors(session), name, _metadata(session, fingerprint))
        os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)


def load_session(path: Path, fingerprint: str) -> Session:
    """Raises StateError for a file that is none of ours, is damaged, or comes from another checkpoint or program."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise StateError(f"session: expected a readable file, got {path.name}: {error}") from error
    for name, expected in (("format", FORMAT), ("fingerprint", fingerprint)):
        if metadata.get(name) != expected:
            raise StateError(
                f"session: {name}: expected {expected}, got {metadata.get(name)}; a session can only go on with the "
                "checkpoint, the program and the settings that it was saved with"
            )
    try:
        return _session(json.loads(metadata["session"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"session: expected a whole record, got {path.name}: {error}") from error


def _tensors(session: Session) -> dict[str, Tensor]:
    request = session.request
    tensors = {"positions": request.positions, "image_embeds": request.image_embeds}
    cached = {} if session.snapshot is None else session.snapshot.tensors
    tensors |= {_CACHED + name: tensor for name, tensor in cached.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _metadata(session: Session, fingerprint: str) -> dict[str, str]:
    request, progress, snapshot = session.request, session.progress, session.snapshot
    record: dict[str, Any] = {
        "request": {
            "request_id": request.request_id,
            "token_ids": request.token_ids,
            "sampling": asdict(request.sampling),
            "seed": request.seed,
            "priority": request.priority,
            "sample_index": request.sample_index,
            "images": [asdict(image) for image in request.images],
        },
        "progress": asdict(progress),
        "snapshot": None
        if snapshot is None
        else {"drafts": snapshot.drafts, **{name: getattr(snapshot, name) for name in _COUNTERS}},
    }
    return {"format": FORMAT, "fingerprint": fingerprint, "session": json.dumps(record)}


def _session(record: dict[str, Any], tensors: dict[str, Tensor]) -> Session:
    asked, told, held = record["request"], record["progress"], record["snapshot"]
    request = Request(
        uid=0,
        deadline=0.0,
        positions=tensors["positions"],
        image_embeds=tensors["image_embeds"],
        sampling=SamplingParams.from_record(asked.pop("sampling")),
        token_ids=tuple(asked.pop("token_ids")),
        images=tuple(ImageSpan(**image) for image in asked.pop("images")),
        **asked,
    )
    logprobs = tuple(tuple(TokenLogprob(**entry) for entry in entries) for entries in told.pop("prompt_logprobs"))
    progress = Progress(token_ids=tuple(told.pop("token_ids")), prompt_logprobs=logprobs, **told)
    if held is None:
        return Session(request, progress, None)
    cached = {name.removeprefix(_CACHED): tensor for name, tensor in tensors.items() if name.startswith(_CACHED)}
    return Session(request, progress, Snapshot(drafts=tuple(held.pop("drafts")), tensors=cached, **held))
