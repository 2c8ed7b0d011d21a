// Linear layers: work items are blocks of output features, so that weights are read once and threads never share a row.
#pragma once
#include "products.h"

namespace qwen35 {
namespace QWEN35_ISA {

INLINE bf16 round_bf16(float value) {
  bf16 out[16];
  store_bf16(out, set1(value));
  return out[0];
}

static void linear(const Weight* weight, const bf16* x, const float* bias, void* out, int64_t num_rows,
                   int64_t out_is_float) {
  const Weight& w = *weight;
  const bf16** rows = static_cast<const bf16**>(scratch(1, num_rows * sizeof(bf16*)));
  for (int64_t m = 0; m < num_rows; ++m) rows[m] = x + m * w.width;
  float factor = factor_of(w, 0);
  auto item = [&](int64_t index) {
    int64_t first = index * kBlockRows, count = w.num_rows - first < kBlockRows ? w.num_rows - first : kBlockRows;
    float* sums = static_cast<float*>(scratch(2, num_rows * kBlockRows * 4));
    block(rows, num_rows, w, 0, first, count, sums, kBlockRows);
    for (int64_t m = 0; m < num_rows; ++m) {
      float values[kBlockRows] = {};
      for (int64_t n = 0; n < count; ++n)
        values[n] = sums[m * kBlockRows + n] * factor + (bias ? bias[first + n] : 0.0f);
      int64_t at = m * w.num_rows + first;
      if (out_is_float) std::memcpy(static_cast<float*>(out) + at, values, count * 4);
      else store_bf16_at(static_cast<bf16*>(out) + at, load(values), count);
    }
  };
  for_each((w.num_rows + kBlockRows - 1) / kBlockRows, item);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
