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

// Panels [first, stop) of the weight of one expert, and where their sums go: out[(panel - first) * stride + m * 16 + n].
struct Job {
  const Weight& w;
  int64_t expert, first, stop;
  const uint8_t* rows;  // `count` rows prepared by `put` for this weight
  int64_t count;
  float* out;
  int64_t stride;

  int64_t num_steps() const { return padded(w.width) / 32; }
  float* sums(int64_t panel, int64_t m) const { return out + (panel - first) * stride + m * 16; }
  int64_t outputs(int64_t panel) const { return w.num_rows - 16 * panel < 16 ? w.num_rows - 16 * panel : 16; }
  // First value of a dense or FP8 panel.
  int64_t at(int64_t panel) const { return (expert * w.num_rows + 16 * panel) * w.width; }
};

// A pass over so many rows at once keeps them in the cache for all panels of a job.
constexpr int64_t kRowsAtOnce = 64;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <int D>
static void few_integer_products(const Job& job) {
  for (int64_t panel = job.first; panel < job.stop; ++panel)
    integer_group<D>(panel_of(job.w, job.expert, panel), job.rows, job.count, job.sums(panel, 0));
}

static void float_products(const Job& job) {
  FlushSubnormals flush;
  const int64_t stride = row_bytes(job.w, job.count);
  for (int64_t panel = job.first; panel < job.stop; ++panel)
    for (int64_t m = 0; m < job.count; m += 4)
      float_panel(panel_of(job.w, job.expert, panel), job.rows + m * stride, stride, least(4, job.count - m),
                  job.sums(panel, m));
}

#if defined(__AMX_TILE__)
// Integers: from here on a panel expanded once for all rows pays.
constexpr int64_t tile_rows(int digits) { return digits == 2 ? 16 : 32; }

template <int D>
static void many_integer_products(const Job& job) {
  const int64_t width = job.w.width, num_bytes = ExpandedIntegers<D>::num_bytes(width);
  const int64_t group_bytes = 16 * row_bytes(job.w, job.count);
  const bool by_tiles = job.count >= tile_rows(D);
  auto* expanded = static_cast<uint8_t*>(scratch(0, by_tiles ? (job.stop - job.first) * num_bytes : 0));
  IntegerScope scope(D);
  for (int64_t start = 0; start < job.count; start += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel) {
      const Panel p = panel_of(job.w, job.expert, panel);
      if (by_tiles && start == 0) ExpandedIntegers<D>::fill(p, expanded + (panel - job.first) * num_bytes);
      const ExpandedIntegers<D> weight(width, expanded + (panel - job.first) * num_bytes);
      for (int64_t m = start; m < least(job.count, start + kRowsAtOnce); m += 16) {
        const uint8_t* group = job.rows + m / 16 * group_bytes;
        if (by_tiles && job.count - m > 8) integer_tile<D>(weight, width / 16, group, job.sums(panel, m));
        else integer_rows_of_16<D>(p, group, least(16, job.count - m), job.sums(panel, m));
      }
    }
}

// Sums of tiles for all rows, kRowsAtOnce at a time. `tiles(panel, m)`: the weight's tiles; `operands(m)`: those of
// the rows; `finish(panel, m, sums, count)`: what happens to the sums of `count` tiles of 16 rows.
template <bool IsFirst, class Weights, class Rows, class Finish>
static void tile_products(const Job& job, Weights&& tiles, Rows&& operands, Finish&& finish) {
  alignas(64) float sums[1024];
  for (int64_t m = 0; m < job.count; m += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel) {
      const int64_t count = (least(kRowsAtOnce, job.count - m) + 15) / 16;
      multiply_tiles<IsFirst>(count, tiles(panel, m), operands(m), job.num_steps(), sums);
      finish(panel, m, sums, count);
    }
}

// Memory for the expanded tiles of all panels of a job, or for the few steps that are needed at once.
struct TileBuffer {
  const bool keeps;
  const int64_t panel_bytes;
  uint8_t* const data;
  explicit TileBuffer(const Job& job)
      : keeps(job.count > kRowsAtOnce),
        panel_bytes(keeps ? (job.num_steps() + kSteps - 1) / kSteps * kSteps * 1024 : 0),
        data(static_cast<uint8_t*>(scratch(0, keeps ? (job.stop - job.first) * panel_bytes : kSteps * 1024))) {}
};

// NVFP4 with bf16 activations.
static void row_products(const Job& job) {
  const int64_t stride = row_bytes(job.w, job.count);
  const TileBuffer buffer(job);
  Bf16Scope scope(false, 16, 16);
  tile_products<false>(
      job,
      [&](int64_t panel, int64_t m) {
        return ExpandedTiles<ExpandNVFP4>{{panel_of(job.w, job.expert, panel)},
                                          buffer.data + (panel - job.first) * buffer.panel_bytes, buffer.keeps, m > 0};
      },
      [&](int64_t m) { return Operands{job.rows + m * stride, stride, 64, 16 * stride}; },
      [&](int64_t panel, int64_t m, const float* sums, int64_t count) {
        std::memcpy(job.sums(panel, m), sums, count * 1024);
      });
}

// Dense and FP8 weights, for panels of `num_rows` outputs each.
static void column_products(const Job& job, int64_t num_rows) {
  const Weight& w = job.w;
  const int64_t group = group_rows(Form::kColumns, job.count), distance = row_bytes(w, job.count) * group;
  Bf16Scope scope(true, num_rows, group);
  auto operands = [&](int64_t m) { return Operands{job.rows + m / 16 * distance, 4 * group, 64 * group, distance}; };
  auto finish = [&](int64_t panel, int64_t m, const float* sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store_transposed(sums + 256 * i, job.sums(panel, m + 16 * i));
  };
  if (w.kind == kDense) {
    alignas(64) bf16 end[16][32];
    auto tiles = [&](int64_t panel, int64_t m) {
      return DenseTiles{static_cast<const bf16*>(w.values) + job.at(panel), w.width, num_rows,
                        m == 0 && panel + 1 < job.stop, end};
    };
    return tile_products<true>(job, tiles, operands, finish);
  }
  const TileBuffer buffer(job);
  auto tiles = [&](int64_t panel, int64_t m) {
    return ExpandedTiles<ExpandFP8>{{static_cast<const uint8_t*>(w.values) + job.at(panel), w.width, num_rows},
                                    buffer.data + (panel - job.first) * buffer.panel_bytes, buffer.keeps, m > 0};
  };
  tile_products<true>(job, tiles, operands, finish);
}

static void dense_products(const Job& job) {
  const int64_t num_whole = least(job.stop, job.w.num_rows / 16);
  Job whole = job, last = job;
  whole.stop = last.first = num_whole > job.first ? num_whole : job.first;
  last.out = job.sums(last.first, 0);
  if (whole.first < whole.stop) column_products(whole, 16);
  if (last.first < last.stop) column_products(last, job.outputs(last.first));
}
#else
template <int D>
static void many_integer_products(const Job& job) {
  const int64_t group_bytes = 16 * row_bytes(job.w, job.count);
  for (int64_t start = 0; start < job.count; start += kRowsAtOnce)
    for (int64_t panel = job.first; panel < job.stop; ++panel)
      for (int64_t m = start; m < least(job.count, start + kRowsAtOnce); m += 16)
        integer_rows_of_16<D>(panel_of(job.w, job.expert, panel), job.rows + m / 16 * group_bytes,
                           least(16, job.count - m), job.sums(panel, m));
}

template <int M>
static void strip(const bf16* const* x, const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, float* out) {
  constexpr int N = M <= kTile / 2 ? 2 * kTile : kTile;
  int64_t n = 0;
  for (; n + N <= num_rows; n += N) tile<M, N>(x, w + n * ldw, ldw, width, out + n, 16);
  for (; n < num_rows; ++n) tile<M, 1>(x, w + n * ldw, ldw, width, out + n, 16);
}

// `num_rows` rows of FP8 -> bf16, rows padded(K) apart, zeros behind K. Uses scratch 0.
static const bf16* expand_rows(const uint8_t* from, int64_t num_rows, int64_t width) {
  auto* to = static_cast<bf16*>(scratch(0, num_rows * padded(width) * 2));
  for (int64_t n = 0; n < num_rows; ++n, from += width) {
    bf16* row = to + n * padded(width);
    int64_t k = 0;
    for (; k + 64 <= width; k += 64) expand_e4m3(from + k, row + k, row + k + 32);
    for (; k < padded(width); ++k) row[k] = k < width ? e4m3_values[from[k]] : 0;
  }
  return to;
}

static void dense_products(const Job& job) {
  const int64_t stride = row_bytes(job.w, job.count), width = job.w.width;
  const bool is_fp8 = job.w.kind == kFP8;
  for (int64_t panel = job.first; panel < job.stop; ++panel) {
    const int64_t num_rows = job.outputs(panel), ldw = is_fp8 ? padded(width) : width;
    const bf16* w = is_fp8 ? expand_rows(static_cast<const uint8_t*>(job.w.values) + job.at(panel), num_rows, width)
                           : static_cast<const bf16*>(job.w.values) + job.at(panel);
    for (int64_t m = 0; m < job.count; m += kTile) {
      const bf16* x[kTile];
      for (int64_t i = 0; i < kTile; ++i)
        x[i] = reinterpret_cast<const bf16*>(job.rows + least(m + i, job.count - 1) * stride);
      float* out = job.sums(panel, m);
      switch (least(kTile, job.count - m)) {
        case 1: strip<1>(x, w, ldw, width, num_rows, out); break;
        case 2: strip<2>(x, w, ldw, width, num_rows, out); break;
        case 3: strip<3>(x, w, ldw, width, num_rows, out); break;
        default: strip<kTile>(x, w, ldw, width, num_rows, out);
      }
    }
  }
}
#endif

template <int D>
static void integer_products(const Job& job) {
  job.count <= kIntegerRows ? few_integer_products<D>(job) : many_integer_products<D>(job);
}

// Sums x[m] . weight[expert, 16 * panel + n], without the weight's factor, of all rows and panels; those for n beyond N
// mean nothing, and sums of rows up to a multiple of 16 may be written. Uses scratch 0.
static void product(const Job& job) {
  if (job.w.kind != kNVFP4) return dense_products(job);
  switch (form_of(job.w, job.count)) {
    case Form::kFloats: return float_products(job);
#if defined(__AMX_TILE__)
    case Form::kRows: return row_products(job);
#endif
    default: return num_digits(job.w) == 2 ? integer_products<2>(job) : integer_products<1>(job);
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
