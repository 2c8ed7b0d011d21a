// Matrix products of any weight. Letters: M activation rows, N output features, K input features.
//
// Every output element has one fixed sequence of operations, whatever the shape around it: that of panels.h for NVFP4,
// that of tiles.h for dense and FP8 weights where there are tiles, else the chain below: one accumulator of 16 lanes, 32
// products a step in ascending K, zeros beyond K, then the halving tree of `sum`.
#pragma once
#include "panels.h"
#include "tiles.h"

namespace qwen35 {
namespace QWEN35_ISA {

INLINE int64_t num_panels(const Weight& w) { return (w.num_rows + 15) / 16; }

// 32 bytes of E4M3 -> bf16, exact.
#if defined(__AVX512BF16__)
INLINE void expand_e4m3(const uint8_t* from, bf16* to) {
  const __m512i subnormals = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7F));
  __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  value = _mm512_mask_permutexvar_epi16(value, is_small, magnitude, subnormals);
  value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F)), _mm512_set1_epi16(0x7FC0));
  __m512i sign = _mm512_and_si512(_mm512_slli_epi16(words, 8), _mm512_set1_epi16(int16_t(0x8000)));
  _mm512_storeu_si512(to, _mm512_or_si512(value, sign));
}
#else
INLINE void expand_e4m3(const uint8_t* from, bf16* to) {
  for (int i = 0; i < 32; ++i) to[i] = e4m3_values[from[i]];
}
#endif

// `num_rows` rows of an FP8 weight -> bf16, rows padded(K) apart, zeros behind K. Uses scratch 0.
static const bf16* expand_fp8(const Weight& w, int64_t first, int64_t num_rows) {
  const int64_t ldw = padded(w.width);
  auto* expanded = static_cast<bf16*>(scratch(0, num_rows * ldw * 2));
  for (int64_t n = 0; n < num_rows; ++n) {
    const uint8_t* from = static_cast<const uint8_t*>(w.values) + (first + n) * w.width;
    bf16* to = expanded + n * ldw;
    int64_t k = 0;
    for (; k + 32 <= w.width; k += 32) expand_e4m3(from + k, to + k);
    for (; k < ldw; ++k) to[k] = k < w.width ? e4m3_values[from[k]] : 0;
  }
  return expanded;
}

#if defined(__AVX512BF16__)
constexpr int kTile = 4;
#else
constexpr int kTile = 2;
#endif

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

#if !defined(__AMX_TILE__)
template <int M>
static void strip(const bf16* x, const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, float* out) {
  constexpr int N = M <= kTile / 2 ? 2 * kTile : kTile;
  const bf16* rows[M];
  for (int m = 0; m < M; ++m) rows[m] = x + m * padded(width);
  int64_t n = 0;
  for (; n + N <= num_rows; n += N) tile<M, N>(rows, w + n * ldw, ldw, width, out + n, 16);
  for (; n < num_rows; ++n) tile<M, 1>(rows, w + n * ldw, ldw, width, out + n, 16);
}

// out[m * 16 + n] = x[m] . w[n], rows of w ldw apart, those of x padded(K).
static void dense_panel(const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, const bf16* x, int64_t count,
                        float* out) {
  for (; count >= kTile; count -= kTile, x += kTile * padded(width), out += kTile * 16)
    strip<kTile>(x, w, ldw, width, num_rows, out);
  if (count == 1) strip<1>(x, w, ldw, width, num_rows, out);
  if (count == 2) strip<2>(x, w, ldw, width, num_rows, out);
  if (count == 3) strip<3>(x, w, ldw, width, num_rows, out);
}
#endif

static void nvfp4_panel(const Weight& w, int64_t expert, int64_t panel, const uint8_t* rows, int64_t count, float* out) {
  const Panel p = panel_of(w, expert, panel);
  const int64_t stride = row_bytes(w, count);
#if defined(__AMX_TILE__)
  if (form_of(w, count) == Form::kRows) return row_panel(p, rows, stride, count, out);
  if (form_of(w, count) == Form::kIntegers && count > 8) return integer_tiles(p, rows, stride, count, out);
#endif
  if (form_of(w, count) == Form::kIntegers) return integer_panel(p, rows, stride, count, out);
  float_panel(p, rows, stride, count, out);
}

// out[m * 16 + n] = x[m] . weight[expert, 16 * panel + n], without the weight's factor, for n < 16 and within N, of
// `count` rows prepared by `put` for this weight. `out` has room for rows up to a multiple of 16. Uses scratch 0.
static void product(const Weight& w, int64_t expert, int64_t panel, const uint8_t* rows, int64_t count, float* out) {
  if (w.kind == kNVFP4) return nvfp4_panel(w, expert, panel, rows, count, out);
  const int64_t left = w.num_rows - 16 * panel, num_rows = left < 16 ? left : 16;
  const int64_t first = expert * w.num_rows + 16 * panel;
  const bf16* values = w.kind == kFP8 ? expand_fp8(w, first, num_rows) : static_cast<const bf16*>(w.values) + first * w.width;
  const int64_t ldw = w.kind == kFP8 ? padded(w.width) : w.width;
#if defined(__AMX_TILE__)
  column_panel(values, ldw, w.width, num_rows, rows, count, out);
#else
  dense_panel(values, ldw, w.width, num_rows, reinterpret_cast<const bf16*>(rows), count, out);
#endif
}

// What a sum of `product` is to be multiplied with.
INLINE float factor_of(const Weight& w, int64_t expert) {
  if (w.kind == kDense) return 1.0f;
  const float unit = w.kind == kFP8 ? 1.0f : w.arithmetic == kBF16 ? 256.0f : 128.0f;
  return w.factor[expert * w.factor_stride] * unit;
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
