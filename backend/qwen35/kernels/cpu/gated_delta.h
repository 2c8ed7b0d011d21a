// Causal convolution with silu and the gated delta rule, see qwen35/kernels/reference/gated_delta.py.
// Letters: n rows of one sequence (pending, then new), Cc conv channels, W conv width, Hk/Hv key/value heads, Dk/Dv dims.
//
// One recurrence for prefill, verify and decode. A work item is one head's 16 value columns: its part of the state (Dk
// x 16 floats) stays in the nearest cache over all tokens and is read and written once a step.
#pragma once
#include "linear.h"

namespace qwen35 {
namespace QWEN35_ISA {

struct Rows {
  int64_t first, count, num_pending;  // of the mixed rows of all sequences
  bool is_fresh;
};

// Inputs t of a sequence, in order: W - 1 before, pending, new. Channel c.
static void convolve_row(const GatedDelta& a, const Sequence& s, const Rows& rows, int64_t row, float* mixed) {
  const int64_t before = a.conv_width - 1;
  for (int64_t c = 0; c < a.channels; c += 16) {
    int64_t left = a.channels - c;
    F16 total = zero();
    for (int64_t tap = 0; tap < a.conv_width; ++tap) {
      int64_t t = row + tap;
      F16 value;
      if (t < before) {
        bf16 column[16] = {};
        const bf16* window = a.conv + (s.slot * a.channels + c) * before + t;
        for (int64_t i = 0; i < 16 && i < left && !rows.is_fresh; ++i) column[i] = window[i * before];
        value = load_bf16(column);
      } else if (t < before + rows.num_pending) {
        value = load_bf16_at(a.pending_inputs + (s.slot * a.max_pending + t - before) * a.channels + c, left);
      } else {
        value = load_bf16_at(a.inputs + (s.start + t - before - rows.num_pending) * a.channels + c, left);
      }
      F16 weight = load_at(a.taps + tap * a.channels + c, left);
      total = tap ? fma(value, weight, total) : mul(value, weight);
    }
    F16 open = silu(total);
    if (left >= 16) {
      store(mixed + c, open);
    } else {
      float values[16];
      store(values, open);
      std::memcpy(mixed + c, values, left * 4);
    }
  }
}

// One head's query or key to length 1, times `scale`; Dk a multiple of 16.
static void normalise(float* head, int64_t width, float scale) {
  F16 squares = zero();
  for (int64_t i = 0; i < width; i += 16) squares = fma(load(head + i), load(head + i), squares);
  F16 inverse = set1(scale / __builtin_sqrtf(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < width; i += 16) store(head + i, mul(load(head + i), inverse));
}

// One token on 16 columns of the state [Dk, 16]: decay, read, update; returns S^T q after the update.
INLINE F16 advance(float* state, const float* query, const float* key, F16 value, float decay, float beta, float overlap,
                   int64_t key_width) {
  F16 factor = set1(decay), read[4], seen[4];
  for (int lane = 0; lane < 4; ++lane) read[lane] = seen[lane] = zero();
  for (int64_t i = 0; i < key_width; i += 4) {
    for (int lane = 0; lane < 4; ++lane) {
      F16 s = mul(load(state + (i + lane) * 16), factor);
      store(state + (i + lane) * 16, s);
      read[lane] = fma(s, set1(key[i + lane]), read[lane]);
      seen[lane] = fma(s, set1(query[i + lane]), seen[lane]);
    }
  }
  F16 known = add(add(read[0], read[1]), add(read[2], read[3]));
  F16 update = mul(sub(value, known), set1(beta));
  for (int64_t i = 0; i < key_width; ++i)
    store(state + i * 16, fma(set1(key[i]), update, load(state + i * 16)));
  return fma(update, set1(overlap), add(add(seen[0], seen[1]), add(seen[2], seen[3])));
}

// Sixteen columns of one head of one sequence over all its rows. Uses scratch 0.
static void recur(const GatedDelta& a, const Sequence& s, const Rows& rows, const float* mixed, int64_t head,
                  int64_t column) {
  const int64_t dk = a.key_width, dv = a.value_width, key_dim = (a.channels - a.num_heads * dv) / 2;
  const int64_t shared = head / (a.num_heads / (key_dim / dk)) * dk;
  float* global = a.recurrent + ((s.slot * a.num_heads + head) * dk) * dv + column;
  float* state = static_cast<float*>(scratch(0, dk * 16 * 4));
  for (int64_t i = 0; i < dk; ++i) store(state + i * 16, rows.is_fresh ? zero() : load(global + i * dv));
  const int64_t num_applied = s.defer ? rows.num_pending : rows.count;
  for (int64_t t = 0; t <= rows.count; ++t) {
    if (t == num_applied)
      for (int64_t i = 0; i < dk; ++i) store(global + i * dv, load(state + i * 16));
    if (t == rows.count) break;
    const bool is_new = t >= rows.num_pending;
    const int64_t token = s.start + t - rows.num_pending, place = s.slot * a.max_pending + t;
    const float log_decay = is_new ? a.decay[token * a.num_heads + head] : a.pending_decay[place * a.num_heads + head];
    const float beta = is_new ? a.beta[token * a.num_heads + head] : a.pending_beta[place * a.num_heads + head];
    const float* row = mixed + (rows.first + t) * (a.channels + a.num_heads);
    float decay[16];
    store(decay, exp(set1(log_decay)));
    F16 value = load(row + 2 * key_dim + head * dv + column);
    F16 out = advance(state, row + shared, row + key_dim + shared, value, decay[0], beta,
                      row[a.channels + shared / dk], dk);
    if (is_new) store(a.out + (token * a.num_heads + head) * dv + column, out);
  }
}

// The last W - 1 applied inputs into the window; own inputs into the pending ones.
static void keep(const GatedDelta& a, const Sequence& s, const Rows& rows) {
  const int64_t before = a.conv_width - 1, num_applied = s.defer ? rows.num_pending : rows.count;
  for (int64_t c = 0; c < a.channels; ++c) {
    bf16* window = a.conv + (s.slot * a.channels + c) * before;
    for (int64_t i = 0; i < before; ++i) {
      int64_t t = num_applied + i;  // ascending: an old column is read before it is overwritten
      if (t < before) window[i] = rows.is_fresh ? 0 : window[t];
      else if (t < before + rows.num_pending)
        window[i] = a.pending_inputs[(s.slot * a.max_pending + t - before) * a.channels + c];
      else window[i] = a.inputs[(s.start + t - before - rows.num_pending) * a.channels + c];
    }
  }
  if (!s.defer) return;
  const int64_t count = s.stop - s.start, place = s.slot * a.max_pending;
  std::memcpy(a.pending_inputs + place * a.channels, a.inputs + s.start * a.channels, count * a.channels * 2);
  std::memcpy(a.pending_decay + place * a.num_heads, a.decay + s.start * a.num_heads, count * a.num_heads * 4);
  std::memcpy(a.pending_beta + place * a.num_heads, a.beta + s.start * a.num_heads, count * a.num_heads * 4);
}

// One row: convolution, then queries and keys normalised, q . k behind the channels.
static void prepare_row(const GatedDelta& a, const Sequence& s, const Rows& rows, int64_t row, float* mixed) {
  const int64_t dk = a.key_width, key_dim = (a.channels - a.num_heads * a.value_width) / 2;
  convolve_row(a, s, rows, row, mixed);
  for (int64_t head = 0; head < key_dim; head += dk) {
    normalise(mixed + head, dk, 1.0f / __builtin_sqrtf(float(dk)));
    normalise(mixed + key_dim + head, dk, 1.0f);
    F16 overlap = zero();
    for (int64_t i = 0; i < dk; i += 16)
      overlap = fma(load(mixed + head + i), load(mixed + key_dim + head + i), overlap);
    mixed[a.channels + head / dk] = sum(overlap);
  }
}

static void gated_delta(const GatedDelta* arguments) {
  const GatedDelta& a = *arguments;
  auto* rows = static_cast<Rows*>(scratch(1, a.num_sequences * sizeof(Rows)));
  int64_t total = 0;
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const Sequence& s = a.sequences[i];
    rows[i] = {total, s.num_pending + s.stop - s.start, s.num_pending, s.kv_start == 0 && s.num_pending == 0};
    total += rows[i].count;
  }
  const int64_t stride = a.channels + a.num_heads;
  float* mixed = static_cast<float*>(scratch(3, total * stride * 4));
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    auto prepare = [&](int64_t row) {
      prepare_row(a, a.sequences[i], rows[i], row, mixed + (rows[i].first + row) * stride);
    };
    for_each(rows[i].count, prepare);
  }
  const int64_t per_head = a.value_width / 16, per_sequence = a.num_heads * per_head;
  auto item = [&](int64_t index) {
    int64_t sequence = index / per_sequence, head = index % per_sequence / per_head;
    recur(a, a.sequences[sequence], rows[sequence], mixed, head, index % per_head * 16);
  };
  for_each(a.num_sequences * per_sequence, item);
  for (int64_t i = 0; i < a.num_sequences; ++i) keep(a, a.sequences[i], rows[i]);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
