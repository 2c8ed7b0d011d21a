// Instructions of a program, as qwen35/kernels/cpu/program.py writes them. Buffers are numbers: 0 the input, 1 the
// output, others lie in the workspace. Widths, strides and offsets are elements; what a kind does not name is 0.
#pragma once
#include "common.h"

namespace qwen35 {

enum InstructionKind : int64_t {
  kLinear,      // out = x . weight a, float where is_float
  kNorm,        // out = norm(x from offset on, every stride) * scale a (* silu(y), y >= 0), `rows` of a token, eps factor
  kSiluMul,     // out = silu(x) * y
  kSigmoidMul,  // out = sigmoid(x from offset on, every stride) * y; gate_width 1: one gate a row
  kRotate,      // out = x rotated, `rows` heads of a token
  kAdd,         // out = x + y
  kAttention,   // out = attention of query x, key y, value z; record a
  kDeltaGates,  // decay out, beta z of a x and b y; rate a, dt_bias b
  kGatedDelta,  // out of inputs x, decay y, beta z; record a
  kChoose,      // expert ids out, shares z of router logits x; `rows` experts of a token
  kExperts,     // out = experts y with shares z of x; gate, up, down a, b, c
};

struct Instruction {
  int64_t kind, x, y, z, out;
  const void *a, *b, *c;
  int64_t rows, width, offset, stride, out_offset, out_stride, gate_width, is_float;
  double factor;
};

struct Run {
  const Instruction* instructions;
  const int64_t* offsets;  // of the buffers, bytes of one token
  void *workspace, *input, *output;
  const float *cos, *sin;  // [T, half]
  const Sequence* sequences;
  const int64_t* block_table;
  int64_t num_instructions, num_tokens, half, num_sequences, max_blocks;
};

}  // namespace qwen35
