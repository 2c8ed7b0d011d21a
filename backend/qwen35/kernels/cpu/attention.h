// Paged attention. Letters: S sequences, G query heads of one KV head, D head dim, P block tokens, R rows (query tokens
// of a tile times G).
//
// Keys are cut at absolute KV positions into partitions of 256. What a row gets of a partition (its peak, the sum of its
// weights, the weighted values) depends on the keys it may see there and on nothing else; `merge` then takes partitions
// in ascending order. So it does not matter who computes a partition, nor when: many tiles go one to a thread, through
// all their partitions; few tiles are split by partition. A key or value row is read once for all rows of a tile.
#pragma once
#if defined(__AMX_TILE__)
#include "attention_tiles.h"
#else
#include "attention_vectors.h"
#endif

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kManyTiles = 16;                 // from here on tiles are not split
constexpr int64_t kMaxSplitBytes = 64 << 20;       // of what is kept for merging

// One more partition's share into what a row has so far.
static void merge(Running& sum, float* mixed, const Running& part, const float* part_mixed, int64_t dim) {
  if (part.total == 0.0f) return;
  float peak = sum.highest > part.highest ? sum.highest : part.highest, factors[2][16];
  store(factors[0], exp(set1(sum.highest - peak)));
  store(factors[1], exp(set1(part.highest - peak)));
  F16 old_factor = set1(factors[0][0]), new_factor = set1(factors[1][0]);
  for (int64_t d = 0; d < dim; d += 16)
    store(mixed + d, fma(load(part_mixed + d), new_factor, mul(load(mixed + d), old_factor)));
  sum = {peak, sum.total * factors[0][0] + part.total * factors[1][0]};
}

static void finish(const Attention& a, const AttentionTile& tile, const Running* running, const float* mixed) {
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, num_rows = (tile.stop - tile.first) * group;
  for (int64_t row = 0; row < num_rows; ++row) {
    bf16* out = a.out + ((tile.first + row / group) * a.num_heads + tile.head * group + row % group) * dim;
    F16 total = set1(running[row].total), factor = set1(a.value_scale);
    for (int64_t d = 0; d < dim; d += 16) store_bf16(out + d, mul(div(load(mixed + row * dim + d), total), factor));
  }
}

// Rows of a tile with their running sums: num_rows * (D + 2) floats.
struct Share {
  float* mixed;
  Running* running;
  static int64_t num_floats(int64_t num_rows, int64_t dim) { return stored_rows(num_rows) * (dim + 2); }
  Share(float* memory, int64_t num_rows, int64_t dim)
      : mixed(memory), running(reinterpret_cast<Running*>(memory + stored_rows(num_rows) * dim)) {}
  void clear(int64_t num_rows, int64_t dim) {
    std::memset(mixed, 0, num_rows * dim * 4);
    for (int64_t row = 0; row < num_rows; ++row) running[row] = {-3.0e38f, 0.0f};
  }
};

// A tile whose partitions come from `part_of`, in ascending order. Uses scratch 2.
template <class Parts>
static void attend_tile(const Attention& a, const AttentionTile& tile, Parts part_of) {
  const int64_t dim = a.head_dim, num_rows = (tile.stop - tile.first) * (a.num_heads / a.num_kv_heads);
  const int64_t num_floats = Share::num_floats(num_rows, dim);
  auto* memory = static_cast<float*>(scratch(2, 2 * num_floats * 4));
  Share sum(memory, num_rows, dim);
  sum.clear(num_rows, dim);
  for (int64_t i = 0; i < tile.num_partitions; ++i) {
    Share part = part_of(i, memory + num_floats);
    for (int64_t row = 0; row < num_rows; ++row)
      merge(sum.running[row], sum.mixed + row * dim, part.running[row], part.mixed + row * dim, dim);
  }
  finish(a, tile, sum.running, sum.mixed);
}

// Lists the tiles of all sequences; returns the number of their (tile, partition) pairs.
static int64_t list_tiles(const Attention& a, AttentionTile* tiles) {
  int64_t num_splits = 0;
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const Sequence& s = a.sequences[i];
    for (int64_t first = s.start; first < s.stop; first += kTokens)
      for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        int64_t stop = first + kTokens < s.stop ? first + kTokens : s.stop;
        AttentionTile tile = {&s, a.block_table + i * a.max_blocks, head, first, stop, 0, 0, num_splits};
        tile.partition_start = s.first_kv / kPartition * kPartition;
        tile.num_partitions = (tile.position(stop - 1) - tile.partition_start) / kPartition + 1;
        num_splits += tile.num_partitions;
        *tiles++ = tile;
      }
  }
  return num_splits;
}

static void attention(const Attention* arguments) {
  const Attention& a = *arguments;
  int64_t num_tiles = 0;
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const Sequence& s = a.sequences[i];
    const int64_t* blocks = a.block_table + i * a.max_blocks;
    write_rows(a, a.key, a.keys, a.key_scale, s, blocks);
    write_rows(a, a.value, a.values, a.value_scale, s, blocks);
    num_tiles += (s.stop - s.start + kTokens - 1) / kTokens * a.num_kv_heads;
  }
  // Scratch 3: tiles, then the shares of split ones.
  const int64_t dim = a.head_dim, group = a.num_heads / a.num_kv_heads, tile_bytes = num_tiles * sizeof(AttentionTile);
  const int64_t share_floats = Share::num_floats(kTokens * group, dim);
  auto* tiles = static_cast<AttentionTile*>(scratch(3, tile_bytes));
  const int64_t num_splits = list_tiles(a, tiles);
  auto part_of = [&](const AttentionTile& tile, int64_t i, float* memory) {
    Share part(memory, (tile.stop - tile.first) * group, dim);
    attend(a, tile, tile.partition_start + i * kPartition, part.running, part.mixed);
    return part;
  };
  if (num_tiles >= kManyTiles || num_splits <= num_tiles || num_splits * share_floats * 4 > kMaxSplitBytes) {
    auto whole = [&](int64_t index) {
      attend_tile(a, tiles[index], [&](int64_t i, float* memory) { return part_of(tiles[index], i, memory); });
    };
    return for_each(num_tiles, whole);
  }
  auto* memory = static_cast<char*>(scratch(3, tile_bytes + num_splits * share_floats * 4));
  tiles = reinterpret_cast<AttentionTile*>(memory);
  list_tiles(a, tiles);
  auto* shares = reinterpret_cast<float*>(memory + tile_bytes);
  auto split = [&](int64_t index) {  // one partition for all KV heads: their rows are neighbours in memory
    const AttentionTile* tile = tiles;
    while (tile->first_split + tile->num_partitions * a.num_kv_heads <= index * a.num_kv_heads) tile += a.num_kv_heads;
    const int64_t partition = index - tile->first_split / a.num_kv_heads;
    for (int64_t head = 0; head < a.num_kv_heads; ++head, ++tile)
      part_of(*tile, partition, shares + (tile->first_split + partition) * share_floats);
  };
  for_each(num_splits / a.num_kv_heads, split);
  auto join = [&](int64_t index) {
    const AttentionTile& tile = tiles[index];
    attend_tile(a, tile, [&](int64_t i, float*) {
      return Share(shares + (tile.first_split + i) * share_floats, (tile.stop - tile.first) * group, dim);
    });
  };
  for_each(num_tiles, join);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
