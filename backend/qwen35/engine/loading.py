"""From a checkpoint directory to an engine over somebody's cache. Knows neither Triton nor who owns the memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qwen35.config import ModelConfig
from qwen35.devices import select_dtype
from qwen35.engine.engine import Engine
from qwen35.engine.prefix import PrefixStore
from qwen35.kernels.ops import Ops
from qwen35.kernels.select import select_ops
from qwen35.nn.draft import DraftModel
from qwen35.nn.draft_head import DraftHead, blocks_of, read_ranking
from qwen35.nn.language import LanguageModel
from qwen35.nn.program import accelerate
from qwen35.nvfp4 import LinearWeight
from qwen35.prompt.tokenizer import Tokenizer
from qwen35.settings import Settings
from qwen35.state.pool import BlockPool
from qwen35.views import CacheView
from qwen35.weights.loader import load_language


def load_engine(
    settings: Settings, config: ModelConfig, pool: BlockPool, cache: CacheView, store: PrefixStore | None = None
) -> Engine:
    """Target and, with drafting on, draft of ``settings.checkpoint``, on the device of ``cache``. Blocks that come
    back to ``pool`` wake an engine that waits. ``store`` is used unless ``settings.num_checkpoints`` is 0. Raises
    CheckpointError and ConfigError."""
    device = cache.attention[0].keys.device
    ops = select_ops(settings, device)
    weights, draft_weights, _ = load_language(
        settings.checkpoint,
        config,
        with_draft=settings.num_draft_tokens > 0,
        device=device,
        dtype=select_dtype(settings.dtype),
        rounds_draft_experts=settings.draft_experts == "nvfp4",
        weight_layout=ops.weight_layout,
    )
    draft = None if draft_weights is None else accelerate(DraftModel(config.text, draft_weights, ops), ops)
    tokenizer = Tokenizer.from_directory(settings.checkpoint)
    target = accelerate(LanguageModel(config.text, weights, ops), ops)
    draft_logits = None if draft is None else _draft_logits(settings, config, weights.lm_head, ops)
    engine = Engine(
        target,
        draft,
        pool,
        cache,
        tokenizer,
        config,
        settings,
        ops.row_scan,
        draft_logits,
        store if settings.num_checkpoints else None,
    )
    pool.on_refill = engine.notify
    return engine


def _draft_logits(
    settings: Settings, config: ModelConfig, head: LinearWeight, ops: Ops
) -> Callable[[Tensor], Tensor] | None:
    """None: the target's own."""
    if not settings.draft_vocab_size:
        return None
    vocab_size, path = config.text.vocab_size, settings.draft_vocab_file
    ranking = read_ranking(path, vocab_size) if path else ()
    return DraftHead(head, vocab_size, blocks_of(settings.draft_vocab_size, vocab_size, ranking), ops).logits
