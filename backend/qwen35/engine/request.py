"""What goes into the engine and what comes out: plain records, no behaviour beyond validation of their own ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from qwen35.errors import InvalidArgument, Qwen35Error

if TYPE_CHECKING:
    from qwen35.engine.session import Session

# Of all stop strings, or of all bad words, of a request: each token that is generated is compared with them.
MAX_WORDS_CHARACTERS = 16384


@dataclass(frozen=True)
class StructuredOutputs:
    """What the text has to fit; after the thinking part where the prompt opens one."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str  # a JSON schema, a regular expression, a JSON list of texts, a grammar in Lark or GBNF form
    any_whitespace: bool = True  # json: between its tokens; else none


@dataclass(frozen=True)
class SamplingParams:
    """Names, defaults and meanings of vLLM's SamplingParams."""

    n: int = 1  # samples of one prompt
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0  # as in transformers; vLLM has none
    seed: int | None = None  # None: drawn from the operating system when the request is made
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # no others
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None  # of a thinking part that the prompt opens; then its end is forced
    bad_words: tuple[str, ...] = ()  # the tokens that spell such a word are not generated in a row
    stop: tuple[str, ...] = ()  # the earliest end in the text wins
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of top alternatives; None: no logprobs, and cumulative_logprob stays 0
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    num_draft_tokens: int | None = None  # None: the engine's; at most the engine's

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SamplingParams:
        """Inverse of ``dataclasses.asdict``, also after a way through JSON."""
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in fields["logit_bias"])
        if fields["structured_outputs"] is not None:
            fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
        return cls(**fields)

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidArgument.field(name, f"a value from {low} to {high}", value)
        if self.top_p <= 0.0:
            raise InvalidArgument.field("top_p", "a value above 0 and at most 1", self.top_p)
        if self.typical_p <= 0.0:
            raise InvalidArgument.field("typical_p", "a value above 0 and at most 1", self.typical_p)
        if self.repetition_penalty <= 0.0:
            raise InvalidArgument.field("repetition_penalty", "a value above 0", self.repetition_penalty)
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument.field("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if any(not text for text in self.stop):
            raise InvalidArgument.field("stop", "non-empty strings", self.stop)
        for name in ("stop", "bad_words"):
            num_characters = sum(map(len, getattr(self, name)))
            if num_characters > MAX_WORDS_CHARACTERS:
                raise InvalidArgument(
                    f"{name}: expected at most {MAX_WORDS_CHARACTERS} characters in all, got {num_characters}"
                )
        if any(not text.strip() for text in self.bad_words):
            raise InvalidArgument.field("bad_words", "strings that are more than white space", self.bad_words)
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise InvalidArgument.field("stop_token_ids", "token ids of at least 0", self.stop_token_ids)
        if any(token_id < 0 or not -100.0 <= bias <= 100.0 for token_id, bias in self.logit_bias):
            raise InvalidArgument.field("logit_bias", "token ids from 0, values from -100 to 100", self.logit_bias)
        if self.allowed_token_ids == ():
            raise InvalidArgument.field("allowed_token_ids", "at least one token id", self.allowed_token_ids)


_RANGES = (
    ("n", 1, 128),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 1e6),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("seed", 0, 2**64 - 1),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
    ("num_draft_tokens", 0, 16),
    ("thinking_token_budget", 0, 2**31 - 1),
)


@dataclass(frozen=True)
class ImageSpan:
    """Where an image's tokens lie in the expanded prompt: ``token_ids[offset:offset + num_tokens]``."""

    digest: str  # hex, of the image's content
    offset: int
    num_tokens: int


@dataclass(frozen=True)
class Request:
    """sampling.n sequences to generate. ``uid`` is unique inside the engine; ``request_id`` is the client's and need
    not be."""

    uid: int
    request_id: str
    token_ids: tuple[int, ...]  # N prompt tokens, placeholders expanded
    positions: Tensor  # [3, N] int64
    image_embeds: Tensor  # [M, H], one row for each placeholder token in order of token_ids; [0, H] for text
    sampling: SamplingParams
    seed: int  # sampling.seed or the one drawn for it
    deadline: float  # time.monotonic() seconds
    priority: int = 0  # larger runs first
    arrival: float = 0.0  # time.monotonic() seconds
    sample_index: int = 0  # which of sampling.n; the engine makes them
    wants_session: bool = False  # the last emission brings it, unless there is an error
    images: tuple[ImageSpan, ...] = ()  # a prompt with placeholders outside of them reads and makes no checkpoint
    cache_salt: str = ""  # cached prefixes are shared among requests of one salt only
    lease: Any = None  # in whose name checkpoints are pinned, opaque to the engine; None: as without images


@dataclass(frozen=True)
class TokenLogprob:
    """One candidate at one generated position, of the raw target logits."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely


@dataclass(frozen=True)
class Usage:
    """Counts so far; equal to what was delivered. An EOS or stop token that ends the text is one of the output tokens
    (its id is delivered, its text is not), as in vLLM. Drafts count when the target has verified them; an accepted
    draft after the end of the text was not delivered and does not count as accepted."""

    num_input_tokens: int
    num_output_tokens: int
    num_draft_tokens: int  # verified by the target
    num_accepted_draft_tokens: int  # of those, accepted and delivered
    num_cached_tokens: int = 0  # of the input: a checkpoint or a session had them when the request came


@dataclass(frozen=True)
class Emission:
    """News of one sample of a request: the tokens and text of one step. Exactly one emission of a sample has
    ``is_final``; one with an error ends the others too.

    ``text`` may lag behind ``token_ids``: incomplete characters and what could be the start of a stop string are held
    back. The texts of all emissions concatenate to the whole text."""

    uid: int
    usage: Usage
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # one entry for each new token; the sampled token comes first
    cumulative_logprob: float = 0.0  # of all generated tokens so far; 0 unless sampling.logprobs is set
    finish_reason: str | None = None  # "stop" or "length" on the last emission without an error
    error: Qwen35Error | None = None
    # Nanoseconds since the epoch: arrival, first_scheduled, first_token, last_token, as far as they have come.
    times: dict[str, int] = field(default_factory=dict)
    sample_index: int = 0
    # Of the prompt's second token on, with the first tokens of sample 0 when sampling.prompt_logprobs is set.
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    session: Session | None = None  # at the end, when the request wants it

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None
