// Keys and values on their way into and out of the cache. Letters: D head dim, P block tokens.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kChunkKeys = 32;  // rows that are expanded at a time: they stay in the nearest cache
#if defined(__AVX512BF16__)
constexpr int kRowBlock = 4, kMixRows = 8;  // as many sums as registers hold
#else
constexpr int kRowBlock = 2, kMixRows = 2;
#endif

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

// Index of the first value of a KV position's row, of all its heads.
INLINE int64_t row_at(const Attention& a, const int64_t* blocks, int64_t position) {
  return (blocks[position / a.block_tokens] * a.block_tokens + position % a.block_tokens) * a.num_kv_heads * a.head_dim;
}

// The batch's rows [T, Hkv, D] of a sequence into its blocks.
static void write_rows(const Attention& a, const bf16* rows, void* cache, float scale, const Sequence& s,
                       const int64_t* blocks) {
  const int64_t width = a.num_kv_heads * a.head_dim;
  for (int64_t token = s.start; token < s.stop; ++token) {
    int64_t at = row_at(a, blocks, s.kv_start + token - s.start);
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

// E4M3 -> bf16, exact; D a multiple of 32.
INLINE void expand_e4m3(const uint8_t* from, int64_t dim, bf16* to) {
#if defined(__AVX512BF16__)
  alignas(64) static const uint16_t small[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};  // n / 512
  const __m512i subnormal = _mm512_load_si512(small), seven = _mm512_set1_epi16(0x7F);
  for (int64_t i = 0; i < dim; i += 32) {
    __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + i)));
    __m512i magnitude = _mm512_and_si512(codes, seven);
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    value = _mm512_mask_permutexvar_epi16(value, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormal);
    value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, seven), _mm512_set1_epi16(0x7FC0));
    __m512i sign = _mm512_slli_epi16(codes, 8);
    _mm512_storeu_si512(to + i, _mm512_ternarylogic_epi32(value, sign, _mm512_set1_epi16(short(0x8000)), 0xF8));  // a | (b & c)
  }
#else
  for (int64_t i = 0; i < dim; ++i) to[i] = e4m3_values[from[i]];
#endif
}

// Rows of keys or values at `count` KV positions from `first` on, one KV head: pointers into the cache, or expanded.
static void cache_rows(const Attention& a, const void* cache, const int64_t* blocks, int64_t head, int64_t first,
                       int64_t count, const bf16** rows, bf16* expanded) {
  const int64_t dim = a.head_dim;
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = row_at(a, blocks, first + i) + head * dim;
    if (!a.is_fp8) {
      rows[i] = static_cast<const bf16*>(cache) + at;
    } else {
      expand_e4m3(static_cast<const uint8_t*>(cache) + at, dim, expanded + i * dim);
      rows[i] = expanded + i * dim;
    }
  }
}

// Asks for the rows of the next chunk, from `first` on and before `stop`: blocks lie anywhere, no hardware foresees them.
static void prefetch_rows(const Attention& a, const void* cache, const int64_t* blocks, int64_t head, int64_t first,
                          int64_t stop) {
  const int64_t value_bytes = a.is_fp8 ? 1 : 2, num_bytes = a.head_dim * value_bytes;
  for (int64_t i = first; i < stop && i < first + kChunkKeys; ++i) {
    const char* row = static_cast<const char*>(cache) + (row_at(a, blocks, i) + head * a.head_dim) * value_bytes;
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(row + at);
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

}  // namespace QWEN35_ISA
}  // namespace qwen35
