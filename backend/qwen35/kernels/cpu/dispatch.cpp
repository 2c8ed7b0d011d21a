// Chooses the instruction set once and exports the C interface that qwen35/kernels/cpu/library.py loads.
#include <cmath>
#include <cstring>
#ifdef QWEN35_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "exports.h"

namespace qwen35 {

uint16_t e4m3_values[256];
alignas(64) uint8_t e4m3_bytes[2][128];

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
  for (int bits = 0; bits < 256; ++bits) e4m3_values[bits] = exact_bf16(e4m3(bits));
  for (int bits = 0; bits < 128; ++bits)
    e4m3_bytes[0][bits] = e4m3_values[bits] & 0xFF, e4m3_bytes[1][bits] = e4m3_values[bits] >> 8;
}

#ifdef QWEN35_X86
// Tiles must be asked for: the kernel grows the threads' register areas only then.
bool has_tiles() {
  unsigned int a, b, c, d;
  const unsigned int bf16_tiles = 1u << 22, tiles = 1u << 24, int8_tiles = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16_tiles | tiles | int8_tiles)) != (bf16_tiles | tiles | int8_tiles))
    return false;
#ifdef __linux__
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

bool supports(const char* name) {
#ifdef QWEN35_X86
  if (!std::strcmp(name, "amx")) return supports("avx512") && has_tiles();
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
  if (!std::strcmp(name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return !std::strcmp(name, "portable");
}

const Kernels* const all[] = {
#ifdef QWEN35_X86
    &kernels_amx, &kernels_avx512, &kernels_avx2,
#endif
    &kernels_portable};

// Four bytes of neighbouring codes n0..n7 -> n0 | n4, n1 | n5, n2 | n6, n3 | n7, low nibble first.
uint32_t pair_far(uint32_t codes) {
  auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00FF00FF;
    return (half | half << 4) & 0x0F0F0F0F;
  };
  return spread(codes & 0xFFFF) | spread(codes >> 16) << 4;
}

struct Layout {
  const uint8_t* from;
  uint8_t* to;
  int64_t num_rows, num_blocks;
};

void lay_out_codes(void* argument, int64_t panel) {
  const Layout& a = *static_cast<Layout*>(argument);
  uint8_t* to = a.to + panel * a.num_blocks * 128;
  for (int64_t lane = 0; lane < 16; ++lane) {
    const uint8_t* row = a.from + (panel * 16 + lane) * a.num_blocks * 8;
    bool is_there = panel * 16 + lane < a.num_rows;
    for (int64_t half = 0; half < 2 * a.num_blocks; ++half) {
      uint32_t codes = 0;
      if (is_there) std::memcpy(&codes, row + 4 * half, 4);
      codes = pair_far(codes);
      std::memcpy(to + half * 64 + lane * 4, &codes, 4);
    }
  }
}

void lay_out_scales(void* argument, int64_t panel) {
  const Layout& a = *static_cast<Layout*>(argument);
  uint8_t* to = a.to + panel * a.num_blocks * 16;
  for (int64_t lane = 0; lane < 16; ++lane)
    for (int64_t block = 0; block < a.num_blocks; ++block) {
      bool is_there = panel * 16 + lane < a.num_rows;
      to[block * 16 + lane] = is_there ? a.from[(panel * 16 + lane) * a.num_blocks + block] : 0;
    }
}

}  // namespace
}  // namespace qwen35

using namespace qwen35;

extern "C" {

// Seconds that callers have spent in here so far; those who compute at the same time count each.
double qwen35_seconds() { return double(Inside::total.load()) * 1e-9; }

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

const char* qwen35_instruction_set() { return chosen->name; }

// Rows of an NVFP4 matrix -> panels (qwen35/nvfp4.py: NVFP4Panels): codes [N, K/2] -> [P, K/16, 128] and scales
// [N, K/16] -> [P, K/16, 16], each alone, as they come from disk. `from` and `to` must not overlap.
void qwen35_lay_out_codes(const uint8_t* from, uint8_t* to, int64_t num_rows, int64_t width) {
  Layout layout{from, to, num_rows, width / 16};
  parallel((num_rows + 15) / 16, lay_out_codes, &layout);
}
void qwen35_lay_out_scales(const uint8_t* from, uint8_t* to, int64_t num_rows, int64_t width) {
  Layout layout{from, to, num_rows, width / 16};
  parallel((num_rows + 15) / 16, lay_out_scales, &layout);
}

void qwen35_linear(const Weight* w, const bf16* x, const float* bias, void* out, int64_t rows, int64_t is_float) {
  Inside inside;
  chosen->linear(w, x, bias, out, rows, is_float);
}
void qwen35_experts(const Experts* arguments) {
  Inside inside;
  chosen->experts(arguments);
}
void qwen35_choose(const float* logits, int64_t* ids, float* shares, int64_t rows, int64_t experts, int64_t top) {
  Inside inside;
  chosen->choose(logits, ids, shares, rows, experts, top);
}
void qwen35_rms_norm(const void* x, int64_t x_is_float, int64_t x_stride, const bf16* gate, const float* scale, float eps,
                     bf16* out, int64_t out_stride, int64_t rows, int64_t width) {
  Inside inside;
  chosen->rms_norm(x, x_is_float, x_stride, gate, scale, eps, out, out_stride, rows, width);
}
void qwen35_silu_mul(const bf16* gate, const bf16* up, bf16* out, int64_t count) {
  Inside inside;
  chosen->silu_mul(gate, up, out, count);
}
void qwen35_sigmoid_mul(const bf16* gate, int64_t gate_stride, int64_t gate_width, const bf16* x, bf16* out, int64_t rows,
                        int64_t width) {
  Inside inside;
  chosen->sigmoid_mul(gate, gate_stride, gate_width, x, out, rows, width);
}
void qwen35_add(const bf16* x, const bf16* y, bf16* out, int64_t count) {
  Inside inside;
  chosen->add_rows(x, y, out, count);
}
void qwen35_rotate(const bf16* x, const float* cos, const float* sin, bf16* out, int64_t tokens, int64_t heads,
                   int64_t width, int64_t half) {
  Inside inside;
  chosen->rotate(x, cos, sin, out, tokens, heads, width, half);
}
void qwen35_gated_delta(const GatedDelta* arguments) {
  Inside inside;
  chosen->gated_delta(arguments);
}
void qwen35_attention(const Attention* arguments) {
  Inside inside;
  chosen->attention(arguments);
}
void qwen35_scan_depths(const RowScan* row, int64_t* counts, double* masses) {
  Inside inside;
  chosen->scan_depths(row, counts, masses);
}
int64_t qwen35_scan_between(const RowScan* row, double low, double high, int64_t* ids) {
  Inside inside;
  return chosen->scan_between(row, low, high, ids);
}
int64_t qwen35_scan_contenders(const RowScan* row, double limit, uint64_t key, int64_t capacity, int64_t* ids,
                               double* scores) {
  Inside inside;
  return chosen->scan_contenders(row, limit, key, capacity, ids, scores);
}

// Log decay rate * softplus(a + dt_bias) and beta = sigmoid(b); few elements, so in double, one at a time.
void qwen35_delta_gates(const bf16* a, const bf16* b, const float* rate, const float* dt_bias, float* decay,
                        float* beta, int64_t rows, int64_t heads) {
  Inside inside;
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
