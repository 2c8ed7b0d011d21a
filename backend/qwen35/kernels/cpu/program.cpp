// A whole forward pass in one call: instructions that name kernels, weights and buffers, made once for a model by
// qwen35/kernels/cpu/program.py, run over any number of tokens. Each does what the Python method of its name does.
#include "program.h"

#include "exports.h"

namespace qwen35 {
namespace {

struct Machine {
  const Run& run;

  // Buffer 0 is the input, 1 the output, the others lie one behind the other in the workspace.
  template <class T>
  T* at(int64_t buffer) const {
    if (buffer < 2) return static_cast<T*>(buffer ? run.output : run.input);
    return reinterpret_cast<T*>(static_cast<char*>(run.workspace) + run.offsets[buffer] * run.num_tokens);
  }

  void norm(const Instruction& i) const {
    const bf16* gate = i.y < 0 ? nullptr : at<bf16>(i.y);
    const void* x = i.is_float ? static_cast<const void*>(at<float>(i.x) + i.offset) : at<bf16>(i.x) + i.offset;
    qwen35_rms_norm(x, i.is_float, i.stride, gate, static_cast<const float*>(i.a), float(i.factor),
                    at<bf16>(i.out) + i.out_offset, i.out_stride, run.num_tokens * i.rows, i.width);
  }

  void attention(const Instruction& i) const {
    Attention a = *static_cast<const Attention*>(i.a);
    a.query = at<bf16>(i.x), a.key = at<bf16>(i.y), a.value = at<bf16>(i.z), a.out = at<bf16>(i.out);
    a.sequences = run.sequences, a.num_sequences = run.num_sequences;
    a.block_table = run.block_table, a.max_blocks = run.max_blocks;
    qwen35_attention(&a);
  }

  void gated_delta(const Instruction& i) const {
    GatedDelta a = *static_cast<const GatedDelta*>(i.a);
    a.inputs = at<bf16>(i.x), a.decay = at<float>(i.y), a.beta = at<float>(i.z), a.out = at<float>(i.out);
    a.sequences = run.sequences, a.num_sequences = run.num_sequences;
    qwen35_gated_delta(&a);
  }

  void experts(const Instruction& i) const {
    Experts a = {at<bf16>(i.x), at<int64_t>(i.y), at<float>(i.z), static_cast<const Weight*>(i.a),
                 static_cast<const Weight*>(i.b), static_cast<const Weight*>(i.c), at<bf16>(i.out), run.num_tokens, i.rows};
    qwen35_experts(&a);
  }

  void execute(const Instruction& i) const {
    const int64_t tokens = run.num_tokens;
    switch (i.kind) {
      case kLinear:
        return qwen35_linear(static_cast<const Weight*>(i.a), at<bf16>(i.x), nullptr, at<void>(i.out), tokens, i.is_float);
      case kNorm: return norm(i);
      case kSiluMul: return qwen35_silu_mul(at<bf16>(i.x), at<bf16>(i.y), at<bf16>(i.out), tokens * i.width);
      case kSigmoidMul:
        return qwen35_sigmoid_mul(at<bf16>(i.x) + i.offset, i.stride, i.gate_width, at<bf16>(i.y), at<bf16>(i.out),
                                  tokens * i.rows, i.width);
      case kRotate:
        return qwen35_rotate(at<bf16>(i.x), run.cos, run.sin, at<bf16>(i.out), tokens, i.rows, i.width, run.half);
      case kAdd: return qwen35_add(at<bf16>(i.x), at<bf16>(i.y), at<bf16>(i.out), tokens * i.width);
      case kAttention: return attention(i);
      case kDeltaGates:
        return qwen35_delta_gates(at<bf16>(i.x), at<bf16>(i.y), static_cast<const float*>(i.a),
                                  static_cast<const float*>(i.b), at<float>(i.out), at<float>(i.z), tokens, i.width);
      case kGatedDelta: return gated_delta(i);
      case kChoose:
        return qwen35_choose(at<float>(i.x), at<int64_t>(i.out), at<float>(i.z), tokens, i.width, i.rows);
      case kExperts: return experts(i);
    }
  }
};

}  // namespace
}  // namespace qwen35

extern "C" void qwen35_run(const qwen35::Run* run) {
  qwen35::Inside inside;
  qwen35::Machine machine{*run};
  for (int64_t i = 0; i < run->num_instructions; ++i) machine.execute(run->instructions[i]);
}
