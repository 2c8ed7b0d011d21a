// Paged attention. Letters: S sequences, G query heads of one KV head, D head dim, L partition length, P block tokens.
//
// Keys are cut at absolute KV positions into partitions of 256, merged in ascending order. A query row meets only the
// keys it may see, in ascending order, so nothing of its company enters its chain.
#pragma once
#include "linear.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kPartition = 256, kTokens = 16;  // keys of a partition, query tokens of a work item

struct Running {  // of one query row
  float highest, total;
};

INLINE uint8_t e4m3_of(float x) {  // to the nearest, ties to even, saturating at 448
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint8_t sign = bits >> 24 & 0x80;
  float magnitude = __builtin_fabsf(x);
  if (!(magnitude == magnitude)) return sign | 0x7F;
  if (magnitude > 448.0f) magnitude = 448.0f;
  if (magnitude < 0x1p-6f) return sign | uint8_t(int(magnitude * 512.0f + 0x1p23f - 0x1p23f));  // subnormal: steps of 2^-9
  std::memcpy(&bits, &magnitude, 4);
  bits += 0x7FFFF + (bits >> 20 & 1);
  return sign | uint8_t((bits >> 20) - (120 << 3));
}

static void write_rows(const Attention& a, const bf16* rows, void* cache, float scale, const Sequence& s,
                       const int64_t* blocks) {
  const int64_t width = a.num_kv_heads * a.head_dim;
  for (int64_t token = s.start; token < s.stop; ++token) {
    int64_t position = s.kv_start + token - s.start;
    int64_t at = (blocks[position / a.block_tokens] * a.block_tokens + position % a.block_tokens) * width;
    const bf16* from = rows + token * width;
    if (!a.is_fp8) {
      std::memcpy(static_cast<bf16*>(cache) + at, from, width * 2);
      continue;
    }
    uint8_t* to = static_cast<uint8_t*>(cache) + at;
    for (int64_t i = 0; i < width; i += 16) {
      float values[16];
      store(values, div(load_bf16_at(from + i, width - i), set1(scale)));
      for (int64_t j = 0; j < 16 && i + j < width; ++j) to[i + j] = e4m3_of(values[j]);
    }
  }
}

// Rows of keys or values at KV positions first:stop of one KV head: pointers into the cache, or expanded from E4M3.
static void gather(const Attention& a, const void* cache, const int64_t* blocks, int64_t head, int64_t first,
                   int64_t stop, const bf16** rows, bf16* expanded) {
  for (int64_t position = first; position < stop; ++position) {
    int64_t block = blocks[position / a.block_tokens] * a.block_tokens + position % a.block_tokens;
    int64_t at = (block * a.num_kv_heads + head) * a.head_dim;
    if (!a.is_fp8) {
      *rows++ = static_cast<const bf16*>(cache) + at;
      continue;
    }
    const uint8_t* from = static_cast<const uint8_t*>(cache) + at;
    for (int64_t i = 0; i < a.head_dim; ++i) expanded[i] = e4m3_values[from[i]];
    *rows++ = expanded;
    expanded += a.head_dim;
  }
}

// mixed[row] += sum over keys of weights[row][key] * values[key], keys ascending; N rows, 64 dims a pass.
template <int N>
static void mix(const float* weights, const bf16* const* values, int64_t count, int64_t head_dim, float* mixed) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    F16 low[N], high[N];
    for (int n = 0; n < N; ++n) low[n] = high[n] = zero();
    for (int64_t key = 0; key < count; ++key) {
      F16 first = load_bf16(values[key] + d), second = load_bf16(values[key] + d + 16);
      for (int n = 0; n < N; ++n) {
        F16 weight = set1(weights[n * kPartition + key]);
        low[n] = fma(weight, first, low[n]), high[n] = fma(weight, second, high[n]);
      }
    }
    for (int n = 0; n < N; ++n) {
      float* to = mixed + n * head_dim + d;
      store(to, add(load(to), low[n])), store(to + 16, add(load(to + 16), high[n]));
    }
  }
}

// Softmax weights of one row's scores [count] relative to its running maximum; fades what it has.
static void weigh(float* scores, int64_t count, float scale, Running& row, float* mixed, int64_t head_dim) {
  float peak = row.highest;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] *= scale;
    peak = scores[i] > peak ? scores[i] : peak;
  }
  F16 total = zero();
  for (int64_t i = 0; i < count; i += 16) {
    float weights[16];
    store(weights, exp(sub(load_at(scores + i, count - i), set1(peak))));
    for (int64_t j = count - i; j < 16; ++j) weights[j] = 0.0f;
    total = add(total, load(weights));
    std::memcpy(scores + i, weights, (count - i < 16 ? count - i : 16) * 4);
  }
  float fade[16];
  store(fade, exp(set1(row.highest - peak)));
  row.total = row.total * fade[0] + sum(total);
  row.highest = peak;
  for (int64_t d = 0; d < head_dim; d += 16) store(mixed + d, mul(load(mixed + d), set1(fade[0])));
}

// One token's G heads against keys first:first + count of a partition.
static void attend(const Attention& a, const bf16* query, const bf16* const* keys, const bf16* const* values,
                   int64_t count, int64_t group, float* scores, Running* running, float* mixed) {
  const int64_t dim = a.head_dim;
  const bf16* rows[kTile];
  for (int64_t g = 0; g < group; g += kTile) {
    int64_t num_rows = group - g < kTile ? group - g : kTile;
    for (int64_t n = 0; n < num_rows; ++n) rows[n] = query + (g + n) * dim;
    for (int64_t key = 0; key < count; ++key) {
      float dots[kTile];
      if (num_rows == kTile) tile<1, kTile>(keys + key, rows[0], dim, dim, dots, kTile);
      else
        for (int64_t n = 0; n < num_rows; ++n) tile<1, 1>(keys + key, rows[n], dim, dim, dots + n, 1);
      for (int64_t n = 0; n < num_rows; ++n) scores[(g + n) * kPartition + key] = dots[n];
    }
  }
  for (int64_t g = 0; g < group; ++g)
    weigh(scores + g * kPartition, count, a.scale * a.key_scale, running[g], mixed + g * dim, dim);
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) mix<4>(scores + g * kPartition, values, count, dim, mixed + g * dim);
  for (; g < group; ++g) mix<1>(scores + g * kPartition, values, count, dim, mixed + g * dim);
}

// Tokens first:stop (of the batch) of one sequence and one KV head. Uses scratch 0 and 2.
static void attend_tokens(const Attention& a, const Sequence& s, const int64_t* blocks, int64_t head, int64_t first,
                          int64_t stop) {
  const int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, num_rows = (stop - first) * group;
  float* mixed = static_cast<float*>(scratch(2, (num_rows * dim + group * kPartition + 16) * 4 + num_rows * sizeof(Running)));
  float* scores = mixed + num_rows * dim;
  auto* running = reinterpret_cast<Running*>(scores + group * kPartition + 16);
  auto* expanded = static_cast<bf16*>(scratch(0, a.is_fp8 ? 2 * kPartition * dim * 2 : 64));
  std::memset(mixed, 0, num_rows * dim * 4);
  for (int64_t row = 0; row < num_rows; ++row) running[row] = {-3.0e38f, 0.0f};
  const int64_t last = s.kv_start + stop - 1 - s.start;  // KV position of the last token
  for (int64_t start = s.first_kv / kPartition * kPartition; start <= last; start += kPartition) {
    const bf16 *keys[kPartition], *values[kPartition];
    int64_t low = s.first_kv > start ? s.first_kv : start;
    int64_t high = start + kPartition < last + 1 ? start + kPartition : last + 1;
    gather(a, a.keys, blocks, head, low, high, keys, expanded);
    gather(a, a.values, blocks, head, low, high, values, expanded + kPartition * dim);
    for (int64_t token = first; token < stop; ++token) {
      int64_t position = s.kv_start + token - s.start, seen = (high < position + 1 ? high : position + 1) - low;
      if (seen <= 0) continue;
      int64_t row = (token - first) * group;
      attend(a, a.query + (token * a.num_heads + head * group) * dim, keys, values, seen, group, scores, running + row,
             mixed + row * dim);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    bf16* out = a.out + ((first + row / group) * a.num_heads + head * group + row % group) * dim;
    F16 total = set1(running[row].total), factor = set1(a.value_scale);
    for (int64_t d = 0; d < dim; d += 16) store_bf16(out + d, mul(div(load(mixed + row * dim + d), total), factor));
  }
}

static void attention(const Attention* arguments) {
  const Attention& a = *arguments;
  int64_t num_items = 0;
  auto* starts = static_cast<int64_t*>(scratch(1, (a.num_sequences + 1) * sizeof(int64_t)));
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const Sequence& s = a.sequences[i];
    write_rows(a, a.key, a.keys, a.key_scale, s, a.block_table + i * a.max_blocks);
    write_rows(a, a.value, a.values, a.value_scale, s, a.block_table + i * a.max_blocks);
    starts[i] = num_items;
    num_items += (s.stop - s.start + kTokens - 1) / kTokens * a.num_kv_heads;
  }
  starts[a.num_sequences] = num_items;
  auto item = [&](int64_t index) {
    int64_t i = 0;
    while (starts[i + 1] <= index) ++i;
    const Sequence& s = a.sequences[i];
    int64_t tile_index = (index - starts[i]) / a.num_kv_heads, first = s.start + tile_index * kTokens;
    int64_t stop = first + kTokens < s.stop ? first + kTokens : s.stop;
    attend_tokens(a, s, a.block_table + i * a.max_blocks, (index - starts[i]) % a.num_kv_heads, first, stop);
  };
  for_each(num_items, item);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
