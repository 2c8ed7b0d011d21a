// The C interface of the library, as qwen35/kernels/cpu/library.py loads it and programs call it.
#pragma once
#include <atomic>
#include <ctime>

#include "common.h"

namespace qwen35 {

// While one lives, its thread's time counts as spent in the library; nested ones count nothing.
struct Inside {
  static inline std::atomic<int64_t> total{0};  // nanoseconds
  static inline thread_local int depth = 0;
  int64_t start = 0;

  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
  }
  Inside() {
    if (depth++ == 0) start = now();
  }
  ~Inside() {
    if (--depth == 0) total.fetch_add(now() - start, std::memory_order_relaxed);
  }
};

}  // namespace qwen35

extern "C" {
void qwen35_linear(const qwen35::Weight* w, const qwen35::bf16* x, const float* bias, void* out, int64_t rows,
                   int64_t is_float);
void qwen35_experts(const qwen35::Experts* arguments);
void qwen35_choose(const float* logits, int64_t* ids, float* shares, int64_t rows, int64_t experts, int64_t top);
void qwen35_rms_norm(const void* x, int64_t x_is_float, int64_t x_stride, const qwen35::bf16* gate, const float* scale,
                     float eps, qwen35::bf16* out, int64_t out_stride, int64_t rows, int64_t width);
void qwen35_silu_mul(const qwen35::bf16* gate, const qwen35::bf16* up, qwen35::bf16* out, int64_t count);
void qwen35_sigmoid_mul(const qwen35::bf16* gate, int64_t gate_stride, int64_t gate_width, const qwen35::bf16* x,
                        qwen35::bf16* out, int64_t rows, int64_t width);
void qwen35_add(const qwen35::bf16* x, const qwen35::bf16* y, qwen35::bf16* out, int64_t count);
void qwen35_rotate(const qwen35::bf16* x, const float* cos, const float* sin, qwen35::bf16* out, int64_t tokens,
                   int64_t heads, int64_t width, int64_t half);
void qwen35_gated_delta(const qwen35::GatedDelta* arguments);
void qwen35_attention(const qwen35::Attention* arguments);
void qwen35_delta_gates(const qwen35::bf16* a, const qwen35::bf16* b, const float* rate, const float* dt_bias,
                        float* decay, float* beta, int64_t rows, int64_t heads);
}
