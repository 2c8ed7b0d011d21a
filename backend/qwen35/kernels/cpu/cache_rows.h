// Keys and values on their way into and out of the cache. Letters: D head dim, P block tokens.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

// Rows that are expanded at a time: they stay in the nearest cache.
#if defined(__AMX_TILE__)
constexpr int64_t kChunkKeys = 64;
#else
constexpr int64_t kChunkKeys = 32;
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

#if defined(__AVX512VBMI__)
// E4M3 -> bf16 by tables of the two bytes of each magnitude's bf16.
struct ExpandE4M3 {
  __m512i low[2], high[2];
  ExpandE4M3() {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; ++i) bytes[0][i] = uint8_t(e4m3_values[i]), bytes[1][i] = uint8_t(e4m3_values[i] >> 8);
    for (int i = 0; i < 2; ++i) low[i] = _mm512_load_si512(bytes[0] + 64 * i), high[i] = _mm512_load_si512(bytes[1] + 64 * i);
  }
  // Codes of a lane's low half become words of `first`, those of its high half words of `second`.
  void operator()(__m512i codes, __m512i& first, __m512i& second) const {
    __m512i lows = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    __m512i highs = _mm512_permutex2var_epi8(high[0], codes, high[1]);
    highs = _mm512_ternarylogic_epi32(highs, codes, _mm512_set1_epi8(-128), 0xF8);  // a | (b & c)
    first = _mm512_unpacklo_epi8(lows, highs), second = _mm512_unpackhi_epi8(lows, highs);
  }
  // D a multiple of 32.
  void row(const uint8_t* from, int64_t dim, bf16* to) const {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < dim; i += 64) {
      const bool is_whole = i + 64 <= dim;
      __m512i codes = is_whole ? _mm512_loadu_si512(from + i) : _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(from + i)));
      __m512i first, second;
      (*this)(_mm512_permutexvar_epi64(order, codes), first, second);
      _mm512_storeu_si512(to + i, first);
      if (is_whole) _mm512_storeu_si512(to + i + 32, second);
    }
  }
};
#else
struct ExpandE4M3 {
  void row(const uint8_t* from, int64_t dim, bf16* to) const {
#if defined(__AVX512BF16__)
    alignas(64) static const uint16_t small[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};  // n / 512
    const __m512i subnormal = _mm512_load_si512(small), most = _mm512_set1_epi16(0x7F), bias = _mm512_set1_epi16(120 << 7);
    for (int64_t i = 0; i < dim; i += 32) {
      __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(from + i)));
      __m512i magnitude = _mm512_and_si512(codes, most);
      __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
      __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
      value = _mm512_mask_permutexvar_epi16(value, is_small, magnitude, subnormal);
      value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, most), _mm512_set1_epi16(0x7FC0));
      __m512i sign = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(short(0x8000)));
      _mm512_storeu_si512(to + i, _mm512_or_si512(value, sign));
    }
#else
    for (int64_t i = 0; i < dim; ++i) to[i] = e4m3_values[from[i]];
#endif
  }
};
#endif

// Asks for the rows of the next chunk, from `first` on and before `stop`, all heads of them: blocks lie anywhere, no
// hardware foresees them.
static void prefetch_rows(const Attention& a, const void* cache, const int64_t* blocks, int64_t first, int64_t stop) {
  const int64_t value_bytes = a.is_fp8 ? 1 : 2, num_bytes = a.num_kv_heads * a.head_dim * value_bytes;
  for (int64_t i = first; i < stop && i < first + kChunkKeys; ++i) {
    const char* row = static_cast<const char*>(cache) + row_at(a, blocks, i) * value_bytes;
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
