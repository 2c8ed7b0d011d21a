// Router and routed experts. Letters: T tokens, k experts a token, H hidden, I expert width.
//
// Rows are grouped by expert; gate, up and activation are one pass, down the next, and a token's results are added in
// ascending expert id, the order in which `choose` leaves them.
#pragma once
#include "linear.h"

namespace qwen35 {
namespace QWEN35_ISA {

static_assert(kBlockRows == 16, "one vector of sums");

struct Group {
  int64_t expert, first, count;  // rows first:first + count of the sorted choices
};

// Choices (token * k + rank) sorted by expert, and the groups; returns their number.
static int64_t group_by_expert(const Experts& a, int64_t num_experts, int64_t* sorted, int64_t* starts, Group* groups) {
  int64_t num_choices = a.num_tokens * a.top, num_groups = 0, first = 0;
  std::memset(starts, 0, num_experts * sizeof(int64_t));
  for (int64_t i = 0; i < num_choices; ++i) ++starts[a.ids[i]];
  for (int64_t e = 0; e < num_experts; ++e) {
    int64_t count = starts[e];
    if (count) groups[num_groups++] = {e, first, count};
    starts[e] = first;
    first += count;
  }
  for (int64_t i = 0; i < num_choices; ++i) sorted[starts[a.ids[i]]++] = i;
  return num_groups;
}

// silu(gate) * up of one block of expert width for all rows of a group.
static void gate_and_up(const Experts& a, const Group& group, const bf16* const* rows, int64_t first, bf16* inner) {
  int64_t width = a.gate->num_rows, count = width - first < kBlockRows ? width - first : kBlockRows;
  float* gates = static_cast<float*>(scratch(2, 2 * group.count * kBlockRows * 4 + 128));
  float* ups = gates + group.count * kBlockRows;
  block(rows, group.count, *a.gate, group.expert, first, count, gates, kBlockRows);
  block(rows, group.count, *a.up, group.expert, first, count, ups, kBlockRows);
  F16 gate_factor = set1(factor_of(*a.gate, group.expert)), up_factor = set1(factor_of(*a.up, group.expert));
  for (int64_t m = 0; m < group.count; ++m) {
    F16 gate = mul(load_at(gates + m * kBlockRows, count), gate_factor);
    F16 up = mul(load_at(ups + m * kBlockRows, count), up_factor);
    store_bf16_at(inner + m * width + first, mul(silu(gate), up), count);
  }
}

static void add_experts(const Experts& a, const float* results, int64_t token) {
  int64_t hidden = a.down->num_rows;
  for (int64_t h = 0; h < hidden; h += 16) {
    F16 total = zero();
    for (int64_t rank = 0; rank < a.top; ++rank) {
      int64_t choice = token * a.top + rank;
      total = fma(load_at(results + choice * hidden + h, hidden - h), set1(a.shares[choice]), total);
    }
    store_bf16_at(a.out + token * hidden + h, total, hidden - h);
  }
}

static void experts(const Experts* arguments) {
  const Experts& a = *arguments;
  const int64_t num_experts = a.gate->num_experts, width = a.gate->num_rows, hidden = a.down->num_rows;
  const int64_t num_choices = a.num_tokens * a.top;
  auto* sorted = static_cast<int64_t*>(scratch(
      1, num_choices * (2 * sizeof(int64_t) + 2 * sizeof(bf16*)) + num_experts * (sizeof(int64_t) + sizeof(Group))));
  int64_t* starts = sorted + num_choices;
  auto* groups = reinterpret_cast<Group*>(starts + num_experts);
  auto** rows = reinterpret_cast<const bf16**>(groups + num_experts);
  const bf16** inner_rows = rows + num_choices;
  const int64_t num_groups = group_by_expert(a, num_experts, sorted, starts, groups);
  auto* results = static_cast<float*>(scratch(3, num_choices * (hidden * 4 + width * 2)));
  auto* inner = reinterpret_cast<bf16*>(results + num_choices * hidden);
  for (int64_t i = 0; i < num_choices; ++i) {
    rows[i] = a.x + sorted[i] / a.top * a.gate->width;
    inner_rows[i] = inner + i * width;
  }
  const int64_t inner_blocks = (width + kBlockRows - 1) / kBlockRows, out_blocks = (hidden + kBlockRows - 1) / kBlockRows;
  auto first_pass = [&](int64_t index) {
    const Group& group = groups[index / inner_blocks];
    gate_and_up(a, group, rows + group.first, index % inner_blocks * kBlockRows, inner + group.first * width);
  };
  for_each(num_groups * inner_blocks, first_pass);
  auto second_pass = [&](int64_t index) {
    const Group& group = groups[index / out_blocks];
    int64_t first = index % out_blocks * kBlockRows, count = hidden - first < kBlockRows ? hidden - first : kBlockRows;
    float* sums = static_cast<float*>(scratch(2, group.count * kBlockRows * 4));
    block(inner_rows + group.first, group.count, *a.down, group.expert, first, count, sums, kBlockRows);
    float factor = factor_of(*a.down, group.expert);
    for (int64_t m = 0; m < group.count; ++m)
      for (int64_t n = 0; n < count; ++n)
        results[sorted[group.first + m] * hidden + first + n] = sums[m * kBlockRows + n] * factor;
  };
  for_each(num_groups * out_blocks, second_pass);
  auto last_pass = [&](int64_t token) { add_experts(a, results, token); };
  for_each(a.num_tokens, last_pass);
}

// Softmax over logits [E], the k highest (ties to the lowest id), renormalised, ids ascending. Uses scratch 2.
static void choose_row(const float* logits, int64_t* ids, float* shares, int64_t num_experts, int64_t top) {
  float* chances = static_cast<float*>(scratch(2, (num_experts + 16) * 4));
  float peak = logits[0];
  for (int64_t e = 1; e < num_experts; ++e) peak = logits[e] > peak ? logits[e] : peak;
  for (int64_t e = 0; e < num_experts; e += 16)
    store(chances + e, exp(sub(load_at(logits + e, num_experts - e), set1(peak))));
  for (int64_t rank = 0; rank < top; ++rank) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; ++e) {
      bool is_taken = false;
      for (int64_t i = 0; i < rank; ++i) is_taken |= ids[i] == e;
      if (!is_taken && (best < 0 || chances[e] > chances[best])) best = e;
    }
    ids[rank] = best;
  }
  for (int64_t i = 1; i < top; ++i)
    for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
      int64_t other = ids[j];
      ids[j] = ids[j - 1], ids[j - 1] = other;
    }
  float total = 0.0f;
  for (int64_t rank = 0; rank < top; ++rank) total += chances[ids[rank]];
  for (int64_t rank = 0; rank < top; ++rank) shares[rank] = chances[ids[rank]] / total;
}

static void choose(const float* logits, int64_t* ids, float* shares, int64_t num_rows, int64_t num_experts,
                   int64_t top) {
  for (int64_t row = 0; row < num_rows; ++row)
    choose_row(logits + row * num_experts, ids + row * top, shares + row * top, num_experts, top);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
