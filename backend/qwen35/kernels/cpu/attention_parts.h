// What the parts of attention share: query tiles, and what a row has so far. Letters as in attention.h.
#pragma once
#include "cache_rows.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kPartition = 256, kTokens = 16;  // keys of a partition, query tokens of a tile

struct Running {  // of one row
  float highest, total;
};

// Query tokens first:stop (of the batch) of one sequence, and one KV head.
struct AttentionTile {
  const Sequence* sequence;
  const int64_t* blocks;
  int64_t head, first, stop, partition_start, num_partitions, first_split;

  int64_t position(int64_t token) const { return sequence->kv_start + token - sequence->start; }
  // Keys of a partition up to which the tile's last token sees, and how many of them, from `low` on, another one sees.
  int64_t low(int64_t start) const { return sequence->first_kv > start ? sequence->first_kv : start; }
  int64_t high(int64_t start) const {
    int64_t end = position(stop - 1) + 1;
    return start + kPartition < end ? start + kPartition : end;
  }
  int64_t seen(int64_t token, int64_t start) const {
    int64_t end = position(token) + 1 < high(start) ? position(token) + 1 : high(start);
    return end > low(start) ? end - low(start) : 0;
  }
  // Tokens before this one of the tile do not see KV position `at`.
  int64_t first_seeing(int64_t at) const { return at > position(first) ? at - position(first) : 0; }
};

INLINE const bf16* query_row(const Attention& a, const AttentionTile& tile, int64_t row) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  return a.query + ((tile.first + row / group) * a.num_heads + tile.head * group + row % group) * a.head_dim;
}

// The keys behind the chunk at `at`, or the partition's first values behind the last one.
INLINE void prefetch_next(const Attention& a, const AttentionTile& tile, int64_t at, int64_t low, int64_t high) {
  const bool is_last = at + kChunkKeys >= high;
  if (tile.head == 0) prefetch_rows(a, is_last ? a.values : a.keys, tile.blocks, is_last ? low : at + kChunkKeys, high);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
