"""A request after validation: every option resolved, as it travels from the first step to the later ones in the tensor
``request``. Plain records with a JSON form; what made them is the business of ``options``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from qwen35.engine.request import ImageSpan, SamplingParams


@dataclass(frozen=True)
class Returns:
    """Which optional outputs the client switched on. Without its switch an output is absent from every response."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    perf_metrics: bool = False
    log_probs: bool = False  # TensorRT-LLM's cum_log_probs and output_log_probs


@dataclass(frozen=True)
class ResolvedRequest:
    """``uid`` is unique, the client's ``request_id`` need not be. Times are nanoseconds since the epoch."""

    uid: str  # 16 hex digits
    request_id: str
    sampling: SamplingParams
    seed: int  # sampling.seed or the one drawn for it
    stream: bool
    returns: Returns
    wants_logprobs: bool  # the client gave `logprobs`; without it the output `logprobs` is null
    arrival_unix_ns: int
    deadline_unix_ns: int
    priority: int = 0  # larger runs first
    echo: str = ""  # put before the text of the first response
    images: tuple[ImageSpan, ...] = ()
    save_session: str = ""  # the name that the text gets at its end
    restore_session: str = ""  # the name of what the prompt begins with
    is_continued: bool = False  # there is no prompt: the text of the restored session goes on

    def with_images(self, images: tuple[ImageSpan, ...]) -> ResolvedRequest:
        return replace(self, images=images)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ResolvedRequest:
        """Inverse of ``to_json``. It reads what the first step wrote: a wrong key is a KeyError or TypeError."""
        record = json.loads(text)
        return cls(
            sampling=SamplingParams.from_record(record.pop("sampling")),
            returns=Returns(**record.pop("returns")),
            images=tuple(ImageSpan(**image) for image in record.pop("images")),
            **record,
        )
