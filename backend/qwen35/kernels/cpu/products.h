// Matrix products. Letters: M activation rows, N output features, K input features.
//
// One chain for every output element, whatever the shape around it: one accumulator of 16 lanes, 32 products a step in
// ascending K, zeros beyond K, then the halving tree of `sum`. Packed weights are expanded exactly (E2M1 * E4M3 has at
// most 6 significant bits, a bf16 has 8), so fused and unfused paths have the same bits.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kBlockRows = 16;  // output features of one work item
#if defined(__AVX512BF16__)
constexpr int kTile = 4;
#else
constexpr int kTile = 2;
#endif

INLINE int64_t padded(int64_t width) { return (width + 31) & ~int64_t{31}; }

INLINE void fill32(bf16* to, const bf16* from, int64_t count) {
  std::memset(to, 0, 64);
  std::memcpy(to, from, count * 2);
}

// out[m * stride + n] = x[m] . w[n] for an M x N tile; w rows are ldw apart.
template <int M, int N>
static void tile(const bf16* const* x, const bf16* w, int64_t ldw, int64_t width, float* out, int64_t stride) {
  F16 acc[M][N];
  for (auto& row : acc)
    for (auto& one : row) one = zero();
  int64_t k = 0;
  for (; k + 32 <= width; k += 32) {
    B32 weights[N];
    for (int n = 0; n < N; ++n) weights[n] = load32(w + n * ldw + k);
    for (int m = 0; m < M; ++m) {
      B32 row = load32(x[m] + k);
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], weights[n], row);
    }
  }
  if (k < width) {
    bf16 ends[M + N][32];
    for (int n = 0; n < N; ++n) fill32(ends[n], w + n * ldw + k, width - k);
    for (int m = 0; m < M; ++m) fill32(ends[N + m], x[m] + k, width - k);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], load32(ends[n]), load32(ends[N + m]));
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) out[m * stride + n] = sum(acc[m][n]);
}

template <int M>
static void strip(const bf16* const* x, const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, float* out,
                  int64_t stride) {
  constexpr int N = M <= kTile / 2 ? 2 * kTile : kTile;
  int64_t n = 0;
  for (; n + N <= num_rows; n += N) tile<M, N>(x, w + n * ldw, ldw, width, out + n, stride);
  for (; n < num_rows; ++n) tile<M, 1>(x, w + n * ldw, ldw, width, out + n, stride);
}

// All M rows against `num_rows` expanded weight rows.
static void dense_block(const bf16* const* x, int64_t m_count, const bf16* w, int64_t ldw, int64_t width,
                        int64_t num_rows, float* out, int64_t stride) {
  int64_t m = 0;
  for (; m + kTile <= m_count; m += kTile) strip<kTile>(x + m, w, ldw, width, num_rows, out + m * stride, stride);
  float* rest = out + m * stride;
  if (m_count - m == 1) strip<1>(x + m, w, ldw, width, num_rows, rest, stride);
  if (m_count - m == 2) strip<2>(x + m, w, ldw, width, num_rows, rest, stride);
  if (m_count - m == 3) strip<3>(x + m, w, ldw, width, num_rows, rest, stride);
}

#if defined(__AVX512BF16__)
// 32 weights (16 bytes of codes, 2 scales) -> bf16 in their natural order, both nibbles of a byte side by side.
INLINE __m512bh expand32(const uint8_t* codes, const uint8_t* scales) {
  const __m512i nibbles = _mm512_set1_epi32(0x000F000F);
  const __m512i second = _mm512_set_epi32(0x00100010, 0x00100010, 0x00100010, 0x00100010, 0x00100010, 0x00100010,
                                          0x00100010, 0x00100010, 0, 0, 0, 0, 0, 0, 0, 0);
  __m512i table = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_load_si256((const __m256i*)e2m1_products[scales[0]])),
      _mm256_load_si256((const __m256i*)e2m1_products[scales[1]]), 1);
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
  __m512i index = _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi32(bytes, 12), nibbles, 0xA8);  // (a | b) & c
  return (__m512bh)_mm512_permutexvar_epi16(_mm512_or_si512(index, second), table);
}

// M activation rows against N weight rows, expanded on the way; K a multiple of 32.
template <int M, int N>
static void fused_tile(const bf16* const* x, const uint8_t* codes, const uint8_t* scales, int64_t width, float* out,
                       int64_t stride) {
  __m512 acc[M][N];
  for (auto& row : acc)
    for (auto& one : row) one = _mm512_setzero_ps();
  for (int64_t k = 0; k < width; k += 32) {
    __m512bh rows[M];
    for (int m = 0; m < M; ++m) rows[m] = (__m512bh)_mm512_loadu_si512(x[m] + k);
    for (int n = 0; n < N; ++n) {
      _mm_prefetch((const char*)(codes + n * width / 2 + k / 2 + 1024), _MM_HINT_T0);
      __m512bh weights = expand32(codes + n * width / 2 + k / 2, scales + n * width / 16 + k / 16);
      for (int m = 0; m < M; ++m) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], weights, rows[m]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) out[m * stride + n] = sum(F16{acc[m][n]});
}
#endif

// One row of an NVFP4 or FP8 weight -> bf16, zeros up to a multiple of 32.
static void expand_row(const Weight& w, int64_t row, bf16* out) {
  int64_t k = 0;
  if (w.kind == kFP8) {
    const uint8_t* values = static_cast<const uint8_t*>(w.values) + row * w.width;
    for (; k < w.width; ++k) out[k] = e4m3_values[values[k]];
  } else {
    const uint8_t* codes = static_cast<const uint8_t*>(w.values) + row * w.width / 2;
    const uint8_t* scales = w.scales + row * w.width / 16;
#if defined(__AVX512BF16__)
    for (; k + 32 <= w.width; k += 32)
      _mm512_storeu_si512(out + k, (__m512i)expand32(codes + k / 2, scales + k / 16));
#endif
    for (; k < w.width; k += 2) {
      const bf16* table = e2m1_products[scales[k / 16]];
      out[k] = table[codes[k / 2] & 15], out[k + 1] = table[codes[k / 2] >> 4];
    }
  }
  for (; k < padded(w.width); ++k) out[k] = 0;
}

INLINE float factor_of(const Weight& w, int64_t expert) {
  return w.kind == kDense ? 1.0f : w.factor[expert * w.factor_stride];
}

// out[m * stride + n] = x[m] . weight[expert, first + n], without the weight's factor. Uses scratch 0.
static void block(const bf16* const* x, int64_t m_count, const Weight& w, int64_t expert, int64_t first,
                  int64_t num_rows, float* out, int64_t stride) {
  int64_t row = expert * w.num_rows + first;
  if (w.kind == kDense) {
    const bf16* values = static_cast<const bf16*>(w.values) + row * w.width;
    return dense_block(x, m_count, values, w.width, w.width, num_rows, out, stride);
  }
#if defined(__AVX512BF16__)
  if (w.kind == kNVFP4 && m_count <= 2 && w.width % 32 == 0 && num_rows % 4 == 0) {
    for (int64_t n = 0; n < num_rows; n += 4) {
      const uint8_t* codes = static_cast<const uint8_t*>(w.values) + (row + n) * w.width / 2;
      const uint8_t* scales = w.scales + (row + n) * w.width / 16;
      if (m_count == 1) fused_tile<1, 4>(x, codes, scales, w.width, out + n, stride);
      if (m_count == 2) fused_tile<2, 4>(x, codes, scales, w.width, out + n, stride);
    }
    return;
  }
#endif
  int64_t ldw = padded(w.width);
  bf16* expanded = static_cast<bf16*>(scratch(0, num_rows * ldw * 2));
  for (int64_t n = 0; n < num_rows; ++n) expand_row(w, row + n, expanded + n * ldw);
  dense_block(x, m_count, expanded, ldw, w.width, num_rows, out, stride);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
