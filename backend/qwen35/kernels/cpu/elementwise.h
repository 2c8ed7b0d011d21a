// Norms, gates and rotation; rows are split among threads, a row's sums have one order.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kItemValues = 8192;  // of one work item: below, a thread costs more than it saves

template <class Function>
static void for_rows(int64_t num_rows, int64_t width, Function function) {
  int64_t step = width < kItemValues ? kItemValues / width : 1;
  auto item = [&](int64_t index) {
    int64_t stop = (index + 1) * step < num_rows ? (index + 1) * step : num_rows;
    for (int64_t row = index * step; row < stop; ++row) function(row);
  };
  for_each((num_rows + step - 1) / step, item);
}

INLINE F16 load_any(const void* x, int64_t is_float, int64_t at, int64_t left) {
  return is_float ? load_at(static_cast<const float*>(x) + at, left)
                  : load_bf16_at(static_cast<const bf16*>(x) + at, left);
}

// x over its root mean square, times scale, and times silu(gate) when there is one. Rows of x and out lie a stride apart.
static void rms_norm(const void* x, int64_t x_is_float, int64_t x_stride, const bf16* gate, const float* scale, float eps,
                     bf16* out, int64_t out_stride, int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [=](int64_t row) {
    F16 squares = zero();
    for (int64_t i = 0; i < width; i += 16) {
      F16 part = load_any(x, x_is_float, row * x_stride + i, width - i);
      squares = fma(part, part, squares);
    }
    F16 inverse = set1(1.0f / __builtin_sqrtf(sum(squares) / float(width) + eps));
    for (int64_t i = 0; i < width; i += 16) {
      int64_t left = width - i;
      F16 value = mul(mul(load_any(x, x_is_float, row * x_stride + i, left), inverse), load_at(scale + i, left));
      if (gate) value = mul(value, silu(load_bf16_at(gate + row * width + i, left)));
      store_bf16_at(out + row * out_stride + i, value, left);
    }
  });
}

static void silu_mul(const bf16* gate, const bf16* up, bf16* out, int64_t count) {
  for_rows((count + 15) / 16, 16, [=](int64_t row) {
    int64_t at = row * 16, left = count - at;
    store_bf16_at(out + at, mul(silu(load_bf16_at(gate + at, left)), load_bf16_at(up + at, left)), left);
  });
}

// Rows of gate lie a stride apart; gate_width 1: one for the whole row. `out` may be `x`.
static void sigmoid_mul(const bf16* gate, int64_t gate_stride, int64_t gate_width, const bf16* x, bf16* out,
                        int64_t num_rows, int64_t width) {
  for_rows(num_rows, width, [=](int64_t row) {
    const bf16* own = gate + row * gate_stride;
    bf16 repeated[16];
    for (bf16& one : repeated) one = own[0];
    for (int64_t i = 0; i < width; i += 16) {
      int64_t at = row * width + i, left = width - i;
      F16 open = sigmoid(gate_width == 1 ? load_bf16(repeated) : load_bf16_at(own + i, left));
      store_bf16_at(out + at, mul(open, load_bf16_at(x + at, left)), left);
    }
  });
}

static void add_rows(const bf16* x, const bf16* y, bf16* out, int64_t count) {
  for_rows((count + 15) / 16, 16, [=](int64_t row) {
    int64_t at = row * 16, left = count - at;
    store_bf16_at(out + at, add(load_bf16_at(x + at, left), load_bf16_at(y + at, left)), left);
  });
}

// The first 2 * half dimensions of x [T, heads, width], halves paired, by cos and sin [T, half]. `out` may be `x`.
static void rotate(const bf16* x, const float* cos, const float* sin, bf16* out, int64_t num_tokens, int64_t num_heads,
                   int64_t width, int64_t half) {
  for_rows(num_tokens * num_heads, width, [=](int64_t row) {
    const bf16* from = x + row * width;
    bf16* to = out + row * width;
    int64_t token = row / num_heads;
    for (int64_t i = 0; i < half; i += 16) {
      int64_t left = half - i;
      F16 first = load_bf16_at(from + i, left), second = load_bf16_at(from + half + i, left);
      F16 c = load_at(cos + token * half + i, left), s = load_at(sin + token * half + i, left);
      store_bf16_at(to + i, sub(mul(first, c), mul(second, s)), left);
      store_bf16_at(to + half + i, add(mul(second, c), mul(first, s)), left);
    }
    if (to != from) std::memcpy(to + 2 * half, from + 2 * half, (width - 2 * half) * 2);
  });
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
