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

// Elements from one expanded row to the next: an odd number of cache lines, see `row_bytes`.
INLINE int64_t expanded_stride(const Weight& w) { return padded(w.width) | 32; }

// `num_rows` rows of an FP8 weight -> bf16, zeros behind K. Uses scratch 0.
static const bf16* expand_fp8(const Weight& w, int64_t first, int64_t num_rows) {
  const int64_t ldw = expanded_stride(w);
  auto* expanded = static_cast<bf16*>(scratch(0, num_rows * ldw * 2));
  for (int64_t n = 0; n < num_rows; ++n) {
    const uint8_t* from = static_cast<const uint8_t*>(w.values) + (first + n) * w.width;
    bf16* to = expanded + n * ldw;
    int64_t k = 0;
    for (; k + 32 <= w.width; k += 32) expand_e4m3(from + k, to + k);
    for (; k < padded(w.width); ++k) to[k] = k < w.width ? e4m3_values[from[k]] : 0;
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

template <int M>
static void strip(const bf16* const* x, const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, float* out) {
  constexpr int N = M <= kTile / 2 ? 2 * kTile : kTile;
  int64_t n = 0;
  for (; n + N <= num_rows; n += N) tile<M, N>(x, w + n * ldw, ldw, width, out + n, 16);
  for (; n < num_rows; ++n) tile<M, 1>(x, w + n * ldw, ldw, width, out + n, 16);
}

// Panels [first, stop) of the weight of one expert, and where their sums go: out[(panel - first) * stride + m * 16 + n].
struct Job {
  const Weight& w;
  int64_t expert, first, stop;
  const uint8_t* rows;  // `count` rows prepared by `put` for this weight
  int64_t count;
  float* out;
  int64_t stride;

  int64_t row_stride() const { return row_bytes(w, count); }
  float* sums(int64_t panel, int64_t m) const { return out + (panel - first) * stride + m * 16; }
};

// A pass over so many rows at once keeps them in the cache for all panels of a job.
constexpr int64_t kRowsAtOnce = 64;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void integer_products(const Job& job, int64_t first_row) {
  const int64_t stride = job.row_stride();
  for (int64_t start = first_row; start < job.count; start += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel)
      for (int64_t m = start; m < least(job.count, start + kRowsAtOnce); m += 8)
        integer_panel(panel_of(job.w, job.expert, panel), job.rows + m * stride, stride, least(8, job.count - m),
                      job.sums(panel, m));
}

static void float_products(const Job& job) {
  FlushSubnormals flush;
  const int64_t stride = job.row_stride();
  for (int64_t panel = job.first; panel < job.stop; ++panel)
    for (int64_t m = 0; m < job.count; m += 4)
      float_panel(panel_of(job.w, job.expert, panel), job.rows + m * stride, stride, least(4, job.count - m),
                  job.sums(panel, m));
}

// Panels of a dense or FP8 weight as bf16 rows.
struct DenseRows {
  const bf16* values;
  int64_t stride;
  explicit DenseRows(const Job& job) {
    const Weight& w = job.w;
    const int64_t first = job.expert * w.num_rows + 16 * job.first;
    stride = w.kind == kFP8 ? expanded_stride(w) : w.width;
    values = w.kind == kFP8 ? expand_fp8(w, first, least(w.num_rows, 16 * job.stop) - 16 * job.first)
                            : static_cast<const bf16*>(w.values) + first * w.width;
  }
  const bf16* panel(const Job& job, int64_t panel) const { return values + 16 * (panel - job.first) * stride; }
};

#if defined(__AMX_TILE__)
constexpr int64_t kTileRows = 32;  // integers: from here on a panel expanded once for all rows pays

// Whole tiles of 16 rows; returns the first row that is left.
static int64_t integer_tiles(const Job& job) {
  const int64_t stride = job.row_stride(), num_bytes = ExpandedIntegers::num_bytes(job.w.width);
  const int64_t stop = job.count < kTileRows ? 0 : job.count - job.count % 16 + (job.count % 16 > 8 ? 16 : 0);
  if (!stop) return 0;
  IntegerScope scope;
  auto* expanded = static_cast<uint8_t*>(scratch(0, (job.stop - job.first) * num_bytes));
  for (int64_t start = 0; start < stop; start += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel) {
      const Panel p = panel_of(job.w, job.expert, panel);
      uint8_t* at = expanded + (panel - job.first) * num_bytes;
      const ExpandedIntegers weight(p, at, start == 0);
      for (int64_t m = start; m < least(stop, start + kRowsAtOnce); m += 16)
        integer_tile(weight, p.width, job.rows + m * stride, stride, job.sums(panel, m));
    }
  return stop;
}

static void row_products(const Job& job) {
  const int64_t stride = job.row_stride(), num_steps = padded(job.w.width) / 32;
  auto* expanded = static_cast<uint8_t*>(scratch(0, (job.stop - job.first) * num_steps * 1024));
  Bf16Scope scope;
  for (int64_t m = 0; m < job.count; m += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel) {
      uint8_t* weight = expanded + (panel - job.first) * num_steps * 1024;
      const uint8_t* rows = job.rows + m * stride;
      if (m == 0) expand_panel(panel_of(job.w, job.expert, panel), weight);
      switch ((least(kRowsAtOnce, job.count - m) + 15) / 16) {
        case 1: rows_by_tiles<1>(weight, rows, stride, num_steps, job.sums(panel, m)); break;
        case 2: rows_by_tiles<2>(weight, rows, stride, num_steps, job.sums(panel, m)); break;
        case 3: rows_by_tiles<3>(weight, rows, stride, num_steps, job.sums(panel, m)); break;
        default: rows_by_tiles<4>(weight, rows, stride, num_steps, job.sums(panel, m));
      }
    }
}

// Panels [first, stop), of `num_rows` outputs each.
static void column_products(const Job& job, const DenseRows& dense, int64_t first, int64_t stop, int64_t num_rows) {
  const int64_t distance = padded(job.w.width) * 32, ldw = dense.stride, width = job.w.width;
  Bf16Scope scope(num_rows);
  for (int64_t m = 0; m < job.count; m += kRowsAtOnce)
    for (int64_t panel = first; panel < stop; ++panel) {
      const bf16* w = dense.panel(job, panel);
      const uint8_t* columns = job.rows + m / 16 * distance;
      float* out = job.sums(panel, m);
      switch ((least(kRowsAtOnce, job.count - m) + 15) / 16) {
        case 1: columns_by_tiles<1>(w, ldw, width, num_rows, columns, distance, out); break;
        case 2: columns_by_tiles<2>(w, ldw, width, num_rows, columns, distance, out); break;
        case 3: columns_by_tiles<3>(w, ldw, width, num_rows, columns, distance, out); break;
        default: columns_by_tiles<4>(w, ldw, width, num_rows, columns, distance, out);
      }
    }
}

static void dense_products(const Job& job) {
  const DenseRows dense(job);
  const int64_t num_whole = least(job.stop, job.w.num_rows / 16), left = job.w.num_rows - 16 * num_whole;
  if (job.first < num_whole) column_products(job, dense, job.first, num_whole, 16);
  if (num_whole < job.stop) column_products(job, dense, num_whole, job.stop, left);
}
#else
static void dense_products(const Job& job) {
  const DenseRows dense(job);
  const int64_t stride = job.row_stride();
  for (int64_t panel = job.first; panel < job.stop; ++panel) {
    const bf16* w = dense.panel(job, panel);
    const int64_t num_rows = least(16, job.w.num_rows - 16 * panel);
    for (int64_t m = 0; m < job.count; m += kTile) {
      const bf16* x[kTile];
      for (int64_t i = 0; i < kTile; ++i)
        x[i] = reinterpret_cast<const bf16*>(job.rows + least(m + i, job.count - 1) * stride);
      float* out = job.sums(panel, m);
      switch (least(kTile, job.count - m)) {
        case 1: strip<1>(x, w, dense.stride, job.w.width, num_rows, out); break;
        case 2: strip<2>(x, w, dense.stride, job.w.width, num_rows, out); break;
        case 3: strip<3>(x, w, dense.stride, job.w.width, num_rows, out); break;
        default: strip<kTile>(x, w, dense.stride, job.w.width, num_rows, out);
      }
    }
  }
}
#endif

// Sums x[m] . weight[expert, 16 * panel + n], without the weight's factor, of all rows and panels; those for n beyond N
// mean nothing, and sums of rows up to a multiple of 16 may be written. Uses scratch 0.
static void product(const Job& job) {
  if (job.w.kind != kNVFP4) return dense_products(job);
  switch (form_of(job.w, job.count)) {
    case Form::kFloats: return float_products(job);
#if defined(__AMX_TILE__)
    case Form::kRows: return row_products(job);
    default: return integer_products(job, integer_tiles(job));
#else
    default: return integer_products(job, 0);
#endif
  }
}

// What a sum of `product` is to be multiplied with.
INLINE float factor_of(const Weight& w, int64_t expert) {
  if (w.kind == kDense) return 1.0f;
  const float unit = w.kind == kFP8 ? 1.0f : w.arithmetic == kBF16 ? 256.0f : 128.0f;
  return w.factor[expert * w.factor_stride] * unit;
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
