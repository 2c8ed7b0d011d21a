// Attention of a tile to one partition, by tile instructions (AMX). Letters as in attention.h; rows go 16 at a time.
//
// Scores are keys times queries, [16 keys][16 rows]; weights, rounded to bf16, times values are [16 rows][16 dims], their
// sums in ascending pairs of keys. A weight of a key that a row does not see is 0 and leaves its sum as it is.
#pragma once
#include "attention_parts.h"

namespace qwen35 {
namespace QWEN35_ISA {

INLINE int64_t stored_rows(int64_t num_rows) { return (num_rows + 15) & ~int64_t{15}; }

// Eight tiles of 16 rows of 64 bytes. 0-3: sums, 4: the operand that they share, 5-7: their own.
struct AttentionTiles {
  AttentionTiles() {
    alignas(64) uint8_t shapes[64] = {1};
    for (int tile = 0; tile < 8; ++tile) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
    _tile_loadconfig(shapes);
  }
  ~AttentionTiles() { _tile_release(); }
};

// Queries as second operands: [R / 16][D / 2][16 rows][2].
static void pair_queries(const Attention& a, const AttentionTile& tile, int64_t num_rows, bf16* out) {
  const int64_t pairs = a.head_dim / 2;
  std::memset(out, 0, stored_rows(num_rows) * a.head_dim * 2);
  for (int64_t row = 0; row < num_rows; ++row) {
    const bf16* from = query_row(a, tile, row);
    bf16* to = out + row / 16 * pairs * 32 + row % 16 * 2;
    for (int64_t i = 0; i < pairs; ++i) std::memcpy(to + i * 32, from + 2 * i, 4);
  }
}

// Rows of the chunk at `at`, one after the other; behind `count` they keep what was there.
static void chunk_keys(const Attention& a, const AttentionTile& tile, const ExpandE4M3& expand, int64_t at, int64_t count,
                       bf16* out) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = row_at(a, tile.blocks, at + i) + tile.head * a.head_dim;
    if (a.is_fp8) expand.row(static_cast<const uint8_t*>(a.keys) + place, a.head_dim, out + i * a.head_dim);
    else std::memcpy(out + i * a.head_dim, static_cast<const bf16*>(a.keys) + place, a.head_dim * 2);
  }
}

// Thirty-two values of two keys -> pairs: dims 0-15 to `low`, 16-31 to `high`.
INLINE void pair_values(const ExpandE4M3& expand, const uint8_t* first, const uint8_t* second, bf16* low, bf16* high) {
  alignas(64) static const uint8_t order[64] = {  // (first i, second i) for i = 0-3 and 16-19, then 4-7 and 20-23, ...
      0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51, 4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,
      8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59, 12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
  __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first)),
                                     _mm256_loadu_si256((const __m256i*)second), 1);
  __m512i pairs[2];
  expand(_mm512_permutexvar_epi8(_mm512_load_si512(order), codes), pairs[0], pairs[1]);
  _mm512_storeu_si512(low, pairs[0]), _mm512_storeu_si512(high, pairs[1]);
}
INLINE void pair_values(const ExpandE4M3&, const bf16* first, const bf16* second, bf16* low, bf16* high) {
  __m512i x = _mm512_loadu_si512(first), y = _mm512_loadu_si512(second);
  __m512i a = _mm512_unpacklo_epi16(x, y), b = _mm512_unpackhi_epi16(x, y);
  // Lanes of a: dims 0-3, 8-11, 16-19, 24-27; of b: four more.
  __m512i front = _mm512_shuffle_i64x2(a, b, 0x44), back = _mm512_shuffle_i64x2(a, b, 0xEE);
  _mm512_storeu_si512(low, _mm512_shuffle_i64x2(front, front, 0xD8));
  _mm512_storeu_si512(high, _mm512_shuffle_i64x2(back, back, 0xD8));
}

// Values of the chunk at `at` as second operands: [keys / 32][D / 16][16 pairs of keys][16 dims][2]; zeros behind `count`.
template <class Value>
static void chunk_values(const Attention& a, const AttentionTile& tile, const ExpandE4M3& expand, int64_t at,
                         int64_t count, bf16* out) {
  const int64_t dim = a.head_dim;
  alignas(64) static const Value nothing[32] = {};
  const auto* values = static_cast<const Value*>(a.values) + tile.head * dim;
  for (int64_t i = 0; i < (count + 31) / 32 * 32; i += 2) {
    bf16* to = out + i / 32 * 32 * dim + i % 32 * 16;
    const Value* first = i < count ? values + row_at(a, tile.blocks, at + i) : nullptr;
    const Value* second = i + 1 < count ? values + row_at(a, tile.blocks, at + i + 1) : nullptr;
    for (int64_t d = 0; d < dim; d += 32, to += 1024)
      pair_values(expand, first ? first + d : nothing, second ? second + d : nothing, to, to + 512);
  }
}

// out[column * stride + row] = tile[row][column].
INLINE void transpose16(const float* tile, float* out, int64_t stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    __m512 x = _mm512_load_ps(tile + 16 * i), y = _mm512_load_ps(tile + 16 * i + 16);
    a[i] = _mm512_unpacklo_ps(x, y), a[i + 1] = _mm512_unpackhi_ps(x, y);
  }
  for (int i = 0; i < 16; i += 4)  // b[i + j]: rows i .. i + 3 of columns j, j + 4, j + 8, j + 12
    for (int j = 0; j < 4; ++j) {
      __m512 x = a[i + j / 2], y = a[i + 2 + j / 2];
      b[i + j] = j % 2 ? _mm512_shuffle_ps(x, y, 0xEE) : _mm512_shuffle_ps(x, y, 0x44);
    }
  for (int j = 0; j < 4; ++j) {
    __m512 even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
    __m512 even2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), odd2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
    _mm512_storeu_ps(out + j * stride, _mm512_shuffle_f32x4(even, even2, 0x88));
    _mm512_storeu_ps(out + (j + 4) * stride, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    _mm512_storeu_ps(out + (j + 8) * stride, _mm512_shuffle_f32x4(even, even2, 0xDD));
    _mm512_storeu_ps(out + (j + 12) * stride, _mm512_shuffle_f32x4(odd, odd2, 0xDD));
  }
}

// out[row * kPartition + key] for 64 keys and 16 rows.
static void score_tiles(const bf16* queries, const bf16* keys, int64_t dim, float* out) {
  alignas(64) float sums[4][256];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(4, queries + d * 16, 64);
    _tile_loadd(5, keys + d, dim * 2);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, keys + 16 * dim + d, dim * 2);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, keys + 32 * dim + d, dim * 2);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, keys + 48 * dim + d, dim * 2);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int tile = 0; tile < 4; ++tile) transpose16(sums[tile], out + 16 * tile, kPartition);
}

// Scores [seen] of a row become bf16 weights [kPartition] relative to their peak, zeros behind.
static Running weigh(float* scores, int64_t seen, float scale, bf16* weights) {
  F16 peaks = set1(-3.0e38f), total = zero();
  for (int64_t i = seen; i % 16; ++i) scores[i] = -3.0e38f;
  for (int64_t i = 0; i < seen; i += 16) peaks = max(peaks, mul(load(scores + i), set1(scale)));
  float peak = highest(peaks);
  for (int64_t i = 0; i < seen; i += 16) {
    F16 weight = exp(sub(mul(load(scores + i), set1(scale)), set1(peak)));
    store_bf16(weights + i, weight);
    total = add(total, load_bf16(weights + i));
  }
  std::memset(weights + seen, 0, (kPartition - seen) * 2);
  return {peak, sum(total)};
}

// mixed[16 rows][dims from d on] += weights [16 rows][32 * num_steps keys] times values, Wide: 64 dims, else 32.
template <bool Wide>
static void mix_tiles(const bf16* weights, const bf16* values, int64_t num_steps, int64_t dim, float* mixed) {
  _tile_loadd(0, mixed, dim * 4);
  _tile_loadd(1, mixed + 16, dim * 4);
  if constexpr (Wide) {
    _tile_loadd(2, mixed + 32, dim * 4);
    _tile_loadd(3, mixed + 48, dim * 4);
  }
  for (int64_t step = 0; step < num_steps; ++step, values += 32 * dim) {
    _tile_loadd(4, weights + 32 * step, kPartition * 2);
    _tile_loadd(5, values, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values + 512, 64);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (Wide) {
      _tile_loadd(7, values + 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, values + 1536, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, mixed, dim * 4);
  _tile_stored(1, mixed + 16, dim * 4);
  if constexpr (Wide) {
    _tile_stored(2, mixed + 32, dim * 4);
    _tile_stored(3, mixed + 48, dim * 4);
  }
}

// What all rows of a tile get of the partition at `start`; total 0: nothing. Uses scratch 0 and 1.
static void attend(const Attention& a, const AttentionTile& tile, int64_t start, Running* running, float* mixed) {
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, num_rows = (tile.stop - tile.first) * group;
  const int64_t low = tile.low(start), high = tile.high(start), stored = stored_rows(num_rows);
  auto* scores = static_cast<float*>(scratch(0, stored * kPartition * 6));
  auto* weights = reinterpret_cast<bf16*>(scores + stored * kPartition);
  auto* chunk = static_cast<bf16*>(scratch(1, (kChunkKeys + stored) * dim * 2));
  bf16* queries = chunk + kChunkKeys * dim;
  const ExpandE4M3 expand;
  AttentionTiles tiles;
  pair_queries(a, tile, num_rows, queries);
  std::memset(mixed, 0, stored * dim * 4);
  for (int64_t at = low; at < high; at += kChunkKeys) {
    chunk_keys(a, tile, expand, at, high - at < kChunkKeys ? high - at : kChunkKeys, chunk);
    prefetch_next(a, tile, at, low, high);
    for (int64_t row = tile.first_seeing(at) * group / 16 * 16; row < num_rows; row += 16)
      score_tiles(queries + row * dim, chunk, dim, scores + row * kPartition + at - low);
  }
  for (int64_t row = 0; row < stored; ++row) {
    int64_t seen = row < num_rows ? tile.seen(tile.first + row / group, start) : 0;
    if (!seen) std::memset(weights + row * kPartition, 0, kPartition * 2);
    Running nothing = {-3.0e38f, 0.0f};
    running[row] = seen ? weigh(scores + row * kPartition, seen, a.scale * a.key_scale, weights + row * kPartition) : nothing;
  }
  for (int64_t at = low; at < high; at += kChunkKeys) {
    int64_t count = high - at < kChunkKeys ? high - at : kChunkKeys, num_steps = (count + 31) / 32;
    if (a.is_fp8) chunk_values<uint8_t>(a, tile, expand, at, count, chunk);
    else chunk_values<bf16>(a, tile, expand, at, count, chunk);
    if (tile.head == 0) prefetch_rows(a, a.values, tile.blocks, at + count, high);
    for (int64_t row = tile.first_seeing(at) * group / 16 * 16; row < num_rows; row += 16) {
      const bf16* own = weights + row * kPartition + at - low;
      float* to = mixed + row * dim;
      int64_t d = 0;
      for (; d + 64 <= dim; d += 64) mix_tiles<true>(own, chunk + d * 32, num_steps, dim, to + d);
      if (d < dim) mix_tiles<false>(own, chunk + d * 32, num_steps, dim, to + d);
    }
  }
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
