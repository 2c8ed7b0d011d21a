// Linear layers: work items are panels of 16 output features, so that weights are read once and threads share no output.
#pragma once
#include "products.h"

namespace qwen35 {
namespace QWEN35_ISA {

// A panel's results for row m -> out[m, 16 * panel:], times the factor, plus the bias.
INLINE void store_outputs(const Weight& w, int64_t panel, const float* bias, void* out, int64_t out_is_float, int64_t m,
                          F16 sums, float factor) {
  const int64_t first = 16 * panel, left = w.num_rows - first, at = m * w.num_rows + first;
  F16 values = mul(sums, set1(factor));
  if (bias) values = add(values, load_at(bias + first, left));
  if (out_is_float) store_at(static_cast<float*>(out) + at, values, left);
  else store_bf16_at(static_cast<bf16*>(out) + at, values, left);
}

static void linear(const Weight* weight, const bf16* x, const float* bias, void* out, int64_t num_rows,
                   int64_t out_is_float) {
  const Weight& w = *weight;
  if (!num_rows) return;
  auto* rows = static_cast<uint8_t*>(scratch(1, prepared_bytes(w, num_rows)));
  put_zeros(w, num_rows, rows);
  auto put_part = [&](int64_t part) {
    for (int64_t m = 16 * part; m < num_rows && m < 16 * part + 16; ++m)
      put_row(w, 0, num_rows, m, x + m * w.width, rows);
  };
  for_each((num_rows + 15) / 16, put_part);
  const float factor = factor_of(w, 0);
  const int64_t panels = num_panels(w), step = num_rows <= 8 && panels >= 64 ? 4 : 1;
  auto item = [&](int64_t index) {
    auto* sums = static_cast<float*>(scratch(2, padded_rows(num_rows) * 64));
    for (int64_t panel = step * index; panel < panels && panel < step * index + step; ++panel) {
      product(w, 0, panel, rows, num_rows, sums);
      for (int64_t m = 0; m < num_rows; ++m)
        store_outputs(w, panel, bias, out, out_is_float, m, load(sums + 16 * m), factor);
    }
  };
  for_each((panels + step - 1) / step, item);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
