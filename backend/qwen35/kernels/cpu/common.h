// Shared by every translation unit: plain records, the thread pool, scratch memory. No vector code, no std templates:
// what is inlined here is compiled once for each instruction set, and the linker keeps any one of them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qwen35 {

using bf16 = uint16_t;  // bits of a bfloat16

enum WeightKind : int64_t { kDense = 0, kNVFP4 = 1, kFP8 = 2 };

// What the activations of an NVFP4 weight are rounded to before the product; dense and FP8 weights take bf16.
enum Arithmetic : int64_t { kBF16 = 0, kInt8 = 1, kFP4 = 2, kInt11 = 3 };

// A weight [E, N, K] (E = 1 for a plain matrix): dense and FP8 in the checkpoint's layout, NVFP4 in panels of 16 output
// features (P = ceil(N / 16)), see qwen35/nvfp4.py: NVFP4Panels.
struct Weight {
  int64_t kind;
  const void* values;        // bf16 [E, N, K]; NVFP4 codes [E, P, K/16, 128]; E4M3 [E, N, K]
  const uint8_t* scales;     // NVFP4: positive E4M3 [E, P, K/16, 16]
  const float* factor;       // NVFP4 global scale or FP8 scale: [E] or one
  const float* input_scale;  // of kFP4 activations: [E] or one
  int64_t factor_stride, input_stride;  // 0: one for all experts
  int64_t num_experts, num_rows, width;
  int64_t arithmetic;
};

// Half-open token range start:stop of one sequence, as qwen35/views.py: BatchView.
struct Sequence {
  int64_t start, stop, kv_start, first_kv, slot, num_pending, defer;
};

struct Attention {
  const bf16 *query, *key, *value;  // [T, Hq, D], [T, Hkv, D] twice
  void *keys, *values;              // [B, P, Hkv, D], bf16 or E4M3
  const int64_t* block_table;       // [S, max_blocks]
  const Sequence* sequences;
  bf16* out;  // [T, Hq, D]
  int64_t num_sequences, max_blocks, block_tokens, num_heads, num_kv_heads, head_dim, is_fp8;
  float key_scale, value_scale, scale;
};

struct GatedDelta {
  const bf16* inputs;                // [T, Cc]
  const float *decay, *beta, *taps;  // [T, Hv], [T, Hv], [W, Cc]
  float* recurrent;                  // [C, Hv, Dk, Dv]
  bf16* conv;                        // [C, Cc, W - 1]
  bf16* pending_inputs;              // [C, R, Cc]
  float *pending_decay, *pending_beta;  // [C, R, Hv]
  const Sequence* sequences;
  float* out;  // [T, Hv, Dv]
  int64_t num_sequences, num_heads, key_width, value_width, channels, conv_width, max_pending;
};

struct Experts {
  const bf16* x;           // [T, H]
  const int64_t* ids;      // [T, k]
  const float* shares;     // [T, k]
  const Weight *gate, *up, *down;
  bf16* out;  // [T, H]
  int64_t num_tokens, top;
};

// A row of logits; depth = (peak - value) * rate, scaled = value * inverse.
struct RowScan {
  const void* values;  // [count] float, or double
  int64_t count, is_double, num_depths;
  double peak, rate, inverse;
};

// What one instruction set implements.
struct Kernels {
  const char* name;
  void (*linear)(const Weight*, const bf16* x, const float* bias, void* out, int64_t num_rows, int64_t out_is_float);
  void (*experts)(const Experts*);
  void (*choose)(const float* logits, int64_t* ids, float* shares, int64_t num_rows, int64_t num_experts, int64_t top);
  void (*rms_norm)(const void* x, int64_t x_is_float, int64_t x_stride, const bf16* gate, const float* scale, float eps,
                   bf16* out, int64_t out_stride, int64_t num_rows, int64_t width);
  void (*silu_mul)(const bf16* gate, const bf16* up, bf16* out, int64_t count);
  void (*sigmoid_mul)(const bf16* gate, int64_t gate_stride, int64_t gate_width, const bf16* x, bf16* out,
                      int64_t num_rows, int64_t width);
  void (*add_rows)(const bf16* x, const bf16* y, bf16* out, int64_t count);
  void (*rotate)(const bf16* x, const float* cos, const float* sin, bf16* out, int64_t num_tokens, int64_t num_heads,
                 int64_t width, int64_t half);
  void (*gated_delta)(const GatedDelta*);
  void (*attention)(const Attention*);
  void (*scan_depths)(const RowScan*, int64_t* counts, double* masses);
  int64_t (*scan_between)(const RowScan*, double low, double high, int64_t* ids);
  int64_t (*scan_contenders)(const RowScan*, double limit, uint64_t key, int64_t capacity, int64_t* ids, double* scores);
};

extern const Kernels kernels_portable;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_amx;

// Calls fn(context, i) for each i < count, on the pool's threads; results must not depend on who calls what.
void parallel(int64_t count, void (*fn)(void*, int64_t), void* context);

// Memory of this thread, 64-byte aligned, kept; `which` < 4 tells buffers in use at the same time apart.
void* scratch(int which, size_t num_bytes);

extern uint16_t e4m3_values[256];   // bf16 bits
extern uint8_t e4m3_bytes[2][128];  // of the magnitudes: low bytes, high bytes; aligned to 64

}  // namespace qwen35
