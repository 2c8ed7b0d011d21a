// Attention of a tile to one partition, by dot products of vectors. Letters as in attention.h.
#pragma once
#include "attention_parts.h"

namespace qwen35 {
namespace QWEN35_ISA {

#if defined(__AVX512BF16__)
constexpr int kRowBlock = 4, kMixRows = 8;  // as many sums as registers hold
#else
constexpr int kRowBlock = 2, kMixRows = 2;
#endif

INLINE int64_t stored_rows(int64_t num_rows) { return num_rows; }  // of a tile's share

// Rows of keys or values at `count` KV positions from `first` on, one KV head: pointers into the cache, or expanded.
static void cache_rows(const Attention& a, const void* cache, const int64_t* blocks, int64_t head, int64_t first,
                       int64_t count, const bf16** rows, bf16* expanded) {
  const int64_t dim = a.head_dim;
  const ExpandE4M3 expand;
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = row_at(a, blocks, first + i) + head * dim;
    if (!a.is_fp8) {
      rows[i] = static_cast<const bf16*>(cache) + at;
    } else {
      expand.row(static_cast<const uint8_t*>(cache) + at, dim, expanded + i * dim);
      rows[i] = expanded + i * dim;
    }
  }
}

// out[i] = sum(x[i]) for a block of score sums, each by the halving tree of `sum`.
INLINE void store_sums(const F16 (&x)[kRowBlock * 4], float* out) {
#if defined(__AVX512BF16__)
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {  // x[i], x[i + 8]: lanes + 8
    __m512 low = _mm512_shuffle_f32x4(x[i].v, x[i + 8].v, 0x44), high = _mm512_shuffle_f32x4(x[i].v, x[i + 8].v, 0xEE);
    a[i] = _mm512_add_ps(low, high);
  }
  for (int i = 0; i < 4; ++i) {  // quarters: i, i + 8, i + 4, i + 12: lanes + 4
    __m512 low = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
    b[i] = _mm512_add_ps(low, high);
  }
  for (int i = 0; i < 2; ++i)  // lanes + 2
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xEE));
  // Each quarter: sums of i = 0, 0, 2, 2 in c[0] and of 1, 1, 3, 3 in c[1]: lanes + 1.
  __m512 even = _mm512_shuffle_ps(c[0], c[1], 0x88), odd = _mm512_shuffle_ps(c[0], c[1], 0xDD);
  __m512 sums = _mm512_add_ps(even, odd);  // a quarter: 0, 2, 1, 3; quarters: + 0, + 8, + 4, + 12
  sums = _mm512_shuffle_ps(sums, sums, 0xD8);
  _mm512_storeu_ps(out, _mm512_shuffle_f32x4(sums, sums, 0xD8));
#else
  for (int i = 0; i < kRowBlock * 4; ++i) out[i] = sum(x[i]);
#endif
}

// Scores of R rows against `count` keys: out[row * kPartition + key], four keys and kRowBlock rows at a time.
static void score(const bf16* const* rows, int64_t num_rows, const bf16* const* keys, int64_t count, int64_t dim,
                  float* out) {
  for (int64_t r = 0; r < num_rows; r += kRowBlock) {
    const bf16* query[kRowBlock];
    for (int64_t n = 0; n < kRowBlock; ++n) query[n] = rows[r + n < num_rows ? r + n : num_rows - 1];
    for (int64_t key = 0; key < count; key += 4) {
      const bf16* four[4];
      for (int64_t k = 0; k < 4; ++k) four[k] = keys[key + k < count ? key + k : count - 1];
      F16 acc[kRowBlock * 4];
      for (F16& one : acc) one = zero();
      for (int64_t d = 0; d < dim; d += 32) {
        B32 parts[4];
        for (int k = 0; k < 4; ++k) parts[k] = load32(four[k] + d);
        for (int n = 0; n < kRowBlock; ++n) {
          B32 own = load32(query[n] + d);
          for (int k = 0; k < 4; ++k) acc[n * 4 + k] = dot(acc[n * 4 + k], parts[k], own);
        }
      }
      float sums[kRowBlock * 4];
      store_sums(acc, sums);
      for (int64_t n = 0; n < kRowBlock && r + n < num_rows; ++n)
        std::memcpy(out + (r + n) * kPartition + key, sums + n * 4, 16);  // what is behind `count` comes anew or is not read
    }
  }
}

// Scores [seen] of a row become weights relative to their peak.
static Running weigh(float* scores, int64_t seen, float scale) {
  F16 peaks = set1(-3.0e38f), total = zero();
  for (int64_t i = seen; i % 16; ++i) scores[i] = -3.0e38f;
  for (int64_t i = 0; i < seen; i += 16) {
    F16 scaled = mul(load(scores + i), set1(scale));
    store(scores + i, scaled);
    peaks = max(peaks, scaled);
  }
  float peak = highest(peaks);
  for (int64_t i = 0; i < seen; i += 16) {
    F16 weight = exp(sub(load(scores + i), set1(peak)));
    store(scores + i, weight);
    total = add(total, weight);
  }
  return {peak, sum(total)};
}

// mixed[row] += sum over keys of weights[row][key] * values[key], keys ascending; N rows, 32 dims a pass.
template <int N>
static void mix(const float* weights, const bf16* const* values, int64_t count, int64_t dim, float* mixed) {
  for (int64_t d = 0; d < dim; d += 32) {
    F16 low[N], high[N];
    for (int n = 0; n < N; ++n) low[n] = load(mixed + n * dim + d), high[n] = load(mixed + n * dim + d + 16);
    for (int64_t key = 0; key < count; ++key) {
      F16 first = load_bf16(values[key] + d), second = load_bf16(values[key] + d + 16);
      for (int n = 0; n < N; ++n) {
        F16 weight = set1(weights[n * kPartition + key]);
        low[n] = fma(weight, first, low[n]), high[n] = fma(weight, second, high[n]);
      }
    }
    for (int n = 0; n < N; ++n) store(mixed + n * dim + d, low[n]), store(mixed + n * dim + d + 16, high[n]);
  }
}

static void mix_rows(const float* weights, int64_t num_rows, const bf16* const* values, int64_t count, int64_t dim,
                     float* mixed) {
  int64_t row = 0;
  for (; row + kMixRows <= num_rows; row += kMixRows)
    mix<kMixRows>(weights + row * kPartition, values, count, dim, mixed + row * dim);
  for (; row + 2 <= num_rows; row += 2) mix<2>(weights + row * kPartition, values, count, dim, mixed + row * dim);
  for (; row < num_rows; ++row) mix<1>(weights + row * kPartition, values, count, dim, mixed + row * dim);
}

// What all rows of a tile get of the partition at `start`; total 0: nothing. Uses scratch 0 and 1.
static void attend(const Attention& a, const AttentionTile& tile, int64_t start, Running* running, float* mixed) {
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, num_rows = (tile.stop - tile.first) * group;
  const int64_t low = tile.low(start), high = tile.high(start);
  auto* scores = static_cast<float*>(scratch(0, num_rows * (kPartition * 4 + sizeof(bf16*))));
  auto** rows = reinterpret_cast<const bf16**>(scores + num_rows * kPartition);
  auto* expanded = static_cast<bf16*>(scratch(1, kChunkKeys * dim * 2));
  for (int64_t row = 0; row < num_rows; ++row) rows[row] = query_row(a, tile, row);
  std::memset(mixed, 0, num_rows * dim * 4);
  const bf16* chunk[kChunkKeys];
  for (int64_t at = low; at < high; at += kChunkKeys) {
    int64_t count = high - at < kChunkKeys ? high - at : kChunkKeys, row = tile.first_seeing(at) * group;
    cache_rows(a, a.keys, tile.blocks, tile.head, at, count, chunk, expanded);
    prefetch_next(a, tile, at, low, high);
    score(rows + row, num_rows - row, chunk, count, dim, scores + row * kPartition + at - low);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t seen = tile.seen(tile.first + row / group, start);
    running[row] = seen ? weigh(scores + row * kPartition, seen, a.scale * a.key_scale) : Running{-3.0e38f, 0.0f};
  }
  for (int64_t at = low; at < high; at += kChunkKeys) {
    int64_t count = high - at < kChunkKeys ? high - at : kChunkKeys;
    cache_rows(a, a.values, tile.blocks, tile.head, at, count, chunk, expanded);
    if (tile.head == 0) prefetch_rows(a, a.values, tile.blocks, at + count, high);
    for (int64_t row = tile.first_seeing(at) * group; row < num_rows; row += group) {
      int64_t left = tile.seen(tile.first + row / group, start) - (at - low);
      mix_rows(scores + row * kPartition + at - low, group, chunk, left < count ? left : count, dim, mixed + row * dim);
    }
  }
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
