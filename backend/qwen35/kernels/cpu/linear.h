// Linear layers: work items are panels of 16 output features, so that weights are read once and threads share no output.
#pragma once
#include "products.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kPanelsAtOnce = 4;  // 128 bytes of bf16 output: whole cache lines

INLINE int64_t num_items(const Weight& w) { return (num_panels(w) + kPanelsAtOnce - 1) / kPanelsAtOnce; }

// Panels [first, stop) of work item `index`.
struct Panels {
  int64_t first, stop;
  Panels(const Weight& w, int64_t index) : first(kPanelsAtOnce * index), stop(first + kPanelsAtOnce) {
    if (stop > num_panels(w)) stop = num_panels(w);
  }
};

// sums of one row and panel -> out[m, 16 * panel:], times the factor, plus the bias.
INLINE void store_outputs(const Weight& w, int64_t panel, const float* bias, void* out, int64_t out_is_float, int64_t m,
                          F16 sums, F16 factor) {
  const int64_t first = 16 * panel, left = w.num_rows - first, at = m * w.num_rows + first;
  F16 values = mul(sums, factor);
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
  auto prepare = [&](int64_t part) { put_part(w, 0, num_rows, part, [&](int64_t m) { return x + m * w.width; }, rows); };
  for_each((num_rows + 15) / 16, prepare);
  const F16 factor = set1(factor_of(w, 0));
  auto item = [&](int64_t index) {
    const Panels panels(w, index);
    const int64_t stride = padded_rows(num_rows) * 16;
    auto* sums = static_cast<float*>(scratch(2, kPanelsAtOnce * stride * 4));
    product({w, 0, panels.first, panels.stop, rows, num_rows, sums, stride});
    for (int64_t m = 0; m < num_rows; ++m)
      for (int64_t panel = panels.first; panel < panels.stop; ++panel)
        store_outputs(w, panel, bias, out, out_is_float, m, load(sums + (panel - panels.first) * stride + 16 * m), factor);
  };
  for_each(num_items(w), item);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
