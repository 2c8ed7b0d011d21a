// Router and routed experts. Letters: T tokens, k experts a token, H hidden, I expert width.
//
// Rows are grouped by expert. One pass makes gate, up and their activation, a panel of the expert width at a time, and
// puts it where the next pass reads it; that one makes a panel of H for all experts, adding a token's in ascending id,
// the order in which `choose` leaves them.
#pragma once
#include "linear.h"

namespace qwen35 {
namespace QWEN35_ISA {

// Rows first:first + count of the sorted choices; `rows`, `up_rows` and `inner`: where their activations lie.
struct Group {
  int64_t expert, first, count;
  uint8_t *rows, *up_rows, *inner;
};

// Choices (token * k + rank) sorted by expert, and the groups; returns their number.
static int64_t group_by_expert(const Experts& a, int64_t num_experts, int64_t* sorted, int64_t* starts, Group* groups) {
  int64_t num_choices = a.num_tokens * a.top, num_groups = 0, first = 0;
  std::memset(starts, 0, num_experts * sizeof(int64_t));
  for (int64_t i = 0; i < num_choices; ++i) ++starts[a.ids[i]];
  for (int64_t e = 0; e < num_experts; ++e) {
    int64_t count = starts[e];
    if (count) groups[num_groups++] = {e, first, count, nullptr, nullptr, nullptr};
    starts[e] = first;
    first += count;
  }
  for (int64_t i = 0; i < num_choices; ++i) sorted[starts[a.ids[i]]++] = i;
  return num_groups;
}

// Whether up reads what was prepared for gate: not with FP4, whose scale belongs to the weight.
INLINE bool shares_rows(const Experts& a) {
  return a.gate->kind == a.up->kind && a.gate->arithmetic == a.up->arithmetic && a.gate->arithmetic != kFP4;
}

static size_t group_bytes(const Experts& a, int64_t count) {
  size_t num_bytes = prepared_bytes(*a.gate, count) + prepared_bytes(*a.down, count);
  return shares_rows(a) ? num_bytes : num_bytes + prepared_bytes(*a.up, count);
}

static void place_groups(const Experts& a, Group* groups, int64_t num_groups) {
  size_t total = 0;
  for (int64_t i = 0; i < num_groups; ++i) total += group_bytes(a, groups[i].count);
  auto* at = static_cast<uint8_t*>(scratch(3, total));
  for (int64_t i = 0; i < num_groups; ++i) {
    Group& group = groups[i];
    group.rows = group.up_rows = at;
    if (!shares_rows(a)) group.up_rows = at + prepared_bytes(*a.gate, group.count);
    group.inner = group.up_rows + prepared_bytes(*a.up, group.count);
    at += group_bytes(a, group.count);
  }
}

static void prepare_group(const Experts& a, const Group& group, const int64_t* sorted) {
  put_zeros(*a.gate, group.count, group.rows);
  put_zeros(*a.down, group.count, group.inner);
  if (!shares_rows(a)) put_zeros(*a.up, group.count, group.up_rows);
  auto row = [&](int64_t m) { return a.x + sorted[group.first + m] / a.top * a.gate->width; };
  for (int64_t part = 0; 16 * part < group.count; ++part) {
    put_part(*a.gate, group.expert, group.count, part, row, group.rows);
    if (!shares_rows(a)) put_part(*a.up, group.expert, group.count, part, row, group.up_rows);
  }
}

// One token's row is the same for all of its experts, but for FP4.
static void prepare_groups(const Experts& a, Group* groups, int64_t num_groups, const int64_t* sorted) {
  if (a.num_tokens == 1 && shares_rows(a)) {
    prepare_group(a, groups[0], sorted);
    for (int64_t i = 1; i < num_groups; ++i) {
      groups[i].rows = groups[i].up_rows = groups[0].rows;
      put_zeros(*a.down, 1, groups[i].inner);
    }
    return;
  }
  auto item = [&](int64_t index) { prepare_group(a, groups[index], sorted); };
  for_each(num_groups, item);
}

INLINE F16 rounded(F16 x) {
  bf16 values[16];
  store_bf16(values, x);
  return load_bf16(values);
}

// silu(gate) * up of some panels of the expert width for all rows of a group.
static void gate_and_up(const Experts& a, const Group& group, const Panels& panels) {
  const int64_t stride = padded_rows(group.count) * 16, num_sums = (panels.stop - panels.first) * stride;
  auto* gates = static_cast<float*>(scratch(2, 2 * num_sums * 4));
  float* ups = gates + num_sums;
  product({*a.gate, group.expert, panels.first, panels.stop, group.rows, group.count, gates, stride});
  product({*a.up, group.expert, panels.first, panels.stop, group.up_rows, group.count, ups, stride});
  const F16 gate_factor = set1(factor_of(*a.gate, group.expert)), up_factor = set1(factor_of(*a.up, group.expert));
  for (int64_t panel = panels.first; panel < panels.stop; ++panel)
    for (int64_t m = 0; m < group.count; ++m) {
      const int64_t left = a.gate->num_rows - 16 * panel, at = (panel - panels.first) * stride + 16 * m;
      F16 gate = mul(load_at(gates + at, left), gate_factor), up = mul(load_at(ups + at, left), up_factor);
      put(*a.down, group.expert, group.count, m, panel, rounded(mul(silu(gate), up)), group.inner);
    }
}

// Some panels of H: down of every group, added up for each token.
static void down_and_add(const Experts& a, const Group* groups, int64_t num_groups, const int64_t* sorted,
                         const Panels& panels) {
  const int64_t num_panels = panels.stop - panels.first, stride = padded_rows(a.num_tokens) * 16;
  auto* totals = static_cast<float*>(scratch(2, 2 * num_panels * stride * 4));
  float* sums = totals + num_panels * stride;
  std::memset(totals, 0, num_panels * stride * 4);
  for (const Group* group = groups; group < groups + num_groups; ++group) {
    product({*a.down, group->expert, panels.first, panels.stop, group->inner, group->count, sums, stride});
    const F16 factor = set1(factor_of(*a.down, group->expert));
    for (int64_t m = 0; m < group->count; ++m) {
      const int64_t choice = sorted[group->first + m], token = choice / a.top;
      const F16 share = set1(a.shares[choice]);
      for (int64_t i = 0; i < num_panels; ++i) {
        float* total = totals + i * stride + 16 * token;
        store(total, fma(mul(load(sums + i * stride + 16 * m), factor), share, load(total)));
      }
    }
  }
  for (int64_t token = 0; token < a.num_tokens; ++token)
    for (int64_t i = 0; i < num_panels; ++i) {
      const int64_t first = 16 * (panels.first + i), hidden = a.down->num_rows;
      store_bf16_at(a.out + token * hidden + first, load(totals + i * stride + 16 * token), hidden - first);
    }
}

static void experts(const Experts* arguments) {
  const Experts& a = *arguments;
  const int64_t num_experts = a.gate->num_experts, num_choices = a.num_tokens * a.top;
  auto* sorted = static_cast<int64_t*>(
      scratch(1, (num_choices + num_experts) * sizeof(int64_t) + num_experts * sizeof(Group)));
  int64_t* starts = sorted + num_choices;
  auto* groups = reinterpret_cast<Group*>(starts + num_experts);
  const int64_t num_groups = group_by_expert(a, num_experts, sorted, starts, groups);
  place_groups(a, groups, num_groups);
  prepare_groups(a, groups, num_groups, sorted);
  const int64_t items = num_items(*a.gate);
  auto first_pass = [&](int64_t index) { gate_and_up(a, groups[index / items], Panels(*a.gate, index % items)); };
  for_each(num_groups * items, first_pass);
  auto second_pass = [&](int64_t index) { down_and_add(a, groups, num_groups, sorted, Panels(*a.down, index)); };
  for_each(num_items(*a.down), second_pass);
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
