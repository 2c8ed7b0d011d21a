// Chooses the instruction set once and exports the C interface that qwen35/kernels/cpu/library.py loads.
#include <cmath>
#include <cstring>

#include "common.h"

namespace qwen35 {

alignas(64) uint16_t e2m1_products[256][16];
uint16_t e4m3_values[256];

namespace {

const Kernels* chosen = nullptr;

float e4m3(int bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float sign = bits & 128 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  return sign * (exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9));
}

uint16_t exact_bf16(float value) {  // every value passed here has at most 8 significant bits
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits >> 16;
}

void fill_tables() {
  const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int scale = 0; scale < 256; ++scale) {
    e4m3_values[scale] = exact_bf16(e4m3(scale));
    for (int code = 0; code < 16; ++code) {
      float value = (code & 8 && code & 7 ? -1.0f : 1.0f) * magnitudes[code & 7];
      e2m1_products[scale][code] = exact_bf16(value * e4m3(scale));
    }
  }
}

bool supports(const char* name) {
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
  if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return !std::strcmp(name, "portable");
}

const Kernels* const all[] = {
#ifdef QWEN35_X86
    &kernels_avx512, &kernels_avx2,
#endif
    &kernels_portable};

}  // namespace
}  // namespace qwen35

using namespace qwen35;

extern "C" {

// Takes the instruction set of this name, or the best one for an empty name. Null: this CPU does not have it.
const char* qwen35_select(const char* name) {
  if (!chosen) fill_tables();
  for (const Kernels* kernels : all) {
    if ((*name == 0 || !std::strcmp(name, kernels->name)) && supports(kernels->name)) {
      chosen = kernels;
      return chosen->name;
    }
  }
  return nullptr;
}

void qwen35_linear(const Weight* w, const bf16* x, const float* bias, void* out, int64_t rows, int64_t is_float) {
  chosen->linear(w, x, bias, out, rows, is_float);
}
void qwen35_experts(const Experts* arguments) { chosen->experts(arguments); }
void qwen35_choose(const float* logits, int64_t* ids, float* shares, int64_t rows, int64_t experts, int64_t top) {
  chosen->choose(logits, ids, shares, rows, experts, top);
}
void qwen35_rms_norm(const void* x, int64_t x_is_float, const bf16* gate, const float* scale, float eps, bf16* out,
                     int64_t rows, int64_t width) {
  chosen->rms_norm(x, x_is_float, gate, scale, eps, out, rows, width);
}
void qwen35_silu_mul(const bf16* gate, const bf16* up, bf16* out, int64_t count) {
  chosen->silu_mul(gate, up, out, count);
}
void qwen35_sigmoid_mul(const bf16* gate, int64_t gate_width, const bf16* x, bf16* out, int64_t rows, int64_t width) {
  chosen->sigmoid_mul(gate, gate_width, x, out, rows, width);
}
void qwen35_rotate(const bf16* x, const float* cos, const float* sin, bf16* out, int64_t tokens, int64_t heads,
                   int64_t width, int64_t half) {
  chosen->rotate(x, cos, sin, out, tokens, heads, width, half);
}
void qwen35_gated_delta(const GatedDelta* arguments) { chosen->gated_delta(arguments); }
void qwen35_attention(const Attention* arguments) { chosen->attention(arguments); }
void qwen35_scan_depths(const RowScan* row, int64_t* counts, double* masses) { chosen->scan_depths(row, counts, masses); }
int64_t qwen35_scan_between(const RowScan* row, double low, double high, int64_t* ids) {
  return chosen->scan_between(row, low, high, ids);
}
int64_t qwen35_scan_contenders(const RowScan* row, double limit, uint64_t key, int64_t capacity, int64_t* ids,
                               double* scores) {
  return chosen->scan_contenders(row, limit, key, capacity, ids, scores);
}

// Log decay rate * softplus(a + dt_bias) and beta = sigmoid(b); few elements, so in double, one at a time.
void qwen35_delta_gates(const bf16* a, const bf16* b, const float* rate, const float* dt_bias, float* decay,
                        float* beta, int64_t rows, int64_t heads) {
  auto wide = [](bf16 bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return double(value);
  };
  for (int64_t i = 0; i < rows * heads; ++i) {
    double x = wide(a[i]) + double(dt_bias[i % heads]);
    decay[i] = float(rate[i % heads] * (std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x)))));
    beta[i] = float(1.0 / (1.0 + std::exp(-wide(b[i]))));
  }
}
}
