// One row of logits [V] for the sampler, see qwen35/kernels/scan.py: weights by depth below the peak, tokens of a range of
// depths, and the few tokens that can win. Plain loops that the compiler turns into vectors; a chunk stays in the nearest
// cache. Nothing decides here: bounds are drawn on the safe side, and the sampler computes what is left in full.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

constexpr int64_t kChunk = 256;

// How far a token lies below the peak, in units of the caller; rises as the value falls, whatever is rounded.
template <class T>
INLINE double depth_of(const RowScan& a, T value) {
  return (a.peak - double(value)) * a.rate;
}

// e^x for -700 <= x <= 0, to about 2^-51.
INLINE double exp_of(double x) {
  const double shift = 6755399441055744.0;  // 1.5 * 2^52: the sum's low bits hold the nearest integer
  double turns = x * 1.4426950408889634 + shift;
  double n = turns - shift, r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  const double inverse[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                            1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0, 1.0};
  double p = inverse[0];
  for (int i = 1; i < 13; ++i) p = p * r + inverse[i];
  int64_t bits;
  std::memcpy(&bits, &turns, 8);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, 8);
  return p * power;
}

template <class T>
static void weigh_depths(const RowScan& a, const T* values, int64_t* counts, double* masses) {
  auto* odd_counts = static_cast<int64_t*>(scratch(0, 2 * a.num_depths * 8));  // neighbours often fall into one place
  auto* odd_masses = reinterpret_cast<double*>(odd_counts + a.num_depths);
  for (int64_t i = 0; i < a.num_depths; ++i) counts[i] = odd_counts[i] = 0, masses[i] = odd_masses[i] = 0.0;
  const double last = double(a.num_depths - 1);
  for (int64_t start = 0; start < a.count; start += kChunk) {
    int64_t num = a.count - start < kChunk ? a.count - start : kChunk;
    int32_t places[kChunk];
    double parts[kChunk];
    for (int64_t i = 0; i < num; ++i) {
      double depth = depth_of(a, values[start + i]), below = (double(values[start + i]) - a.peak) * a.inverse;
      places[i] = int32_t(depth < last ? depth : last);
      parts[i] = exp_of(below > -700.0 ? below : -700.0);
    }
    int64_t i = 0;
    for (; i + 2 <= num; i += 2) {
      ++counts[places[i]], masses[places[i]] += parts[i];
      ++odd_counts[places[i + 1]], odd_masses[places[i + 1]] += parts[i + 1];
    }
    if (i < num) ++counts[places[i]], masses[places[i]] += parts[i];
  }
  for (int64_t i = 0; i < a.num_depths; ++i) counts[i] += odd_counts[i], masses[i] += odd_masses[i];
}

template <class T>
static int64_t between(const RowScan& a, const T* values, double low, double high, int64_t* ids) {
  int64_t found = 0;
  for (int64_t start = 0; start < a.count; start += kChunk) {
    int64_t num = a.count - start < kChunk ? a.count - start : kChunk;
    uint8_t is_in[kChunk], any = 0;
    for (int64_t i = 0; i < num; ++i) {
      double depth = depth_of(a, values[start + i]);
      is_in[i] = (depth >= low) & (depth < high);
      any |= is_in[i];
    }
    for (int64_t i = 0; any && i < num; ++i)
      if (is_in[i]) ids[found++] = start + i;
  }
  return found;
}

INLINE uint64_t mix_bits(uint64_t x) {  // as qwen35/engine/noise.py: _mix
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

INLINE uint64_t word_of(uint64_t key, uint64_t id) {
  uint64_t word = mix_bits(key + 0x9E3779B97F4A7C15u * (id + 1)) >> 11;
  return word ? word : 1;
}

// At least the Gumbel noise of `word`: -log(-log u) <= -log(1 - u) = 53 log 2 - log(2^53 - word), and log2 lies above
// the straight line between two powers of two.
INLINE double noise_bound(uint64_t word) {
  double rest = double(int64_t((uint64_t{1} << 53) - word));
  int64_t bits;
  std::memcpy(&bits, &rest, 8);
  return 0.6931471805599453 * (53.0 - (double(bits) * 0x1p-52 - 1023.0));
}

// Tokens less deep than `limit` whose value and noise may reach the highest sum, ids ascending. The best so far rises as
// the row is read, so hardly more than log V sums are computed. Returns -1 when `capacity` does not suffice.
template <class T>
static int64_t contenders(const RowScan& a, const T* values, double limit, uint64_t key, int64_t capacity, int64_t* ids,
                          double* scores) {
  const double slack = 1e-6;  // in nats, far above rounding
  double best = -1e300;
  int64_t found = 0;
  for (int64_t start = 0; start < a.count; start += kChunk) {
    int64_t num = a.count - start < kChunk ? a.count - start : kChunk;
    uint8_t may_win[kChunk], any = 0;
    for (int64_t i = 0; i < num; ++i) {
      double value = double(values[start + i]) * a.inverse;
      double bound = value + noise_bound(word_of(key, uint64_t(start + i)));
      may_win[i] = (depth_of(a, values[start + i]) < limit) & (bound >= best - slack);
      any |= may_win[i];
    }
    for (int64_t i = 0; any && i < num; ++i) {
      if (!may_win[i]) continue;
      double uniform = double(int64_t(word_of(key, uint64_t(start + i)))) * 0x1p-53;
      double score = double(values[start + i]) * a.inverse - __builtin_log(-__builtin_log(uniform));
      if (score < best - slack) continue;
      if (found == capacity) return -1;
      ids[found] = start + i, scores[found++] = score;
      best = score > best ? score : best;
    }
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < found; ++i)
    if (scores[i] >= best - slack) ids[kept++] = ids[i];
  return kept;
}

static void scan_depths(const RowScan* a, int64_t* counts, double* masses) {
  if (a->is_double) weigh_depths(*a, static_cast<const double*>(a->values), counts, masses);
  else weigh_depths(*a, static_cast<const float*>(a->values), counts, masses);
}

static int64_t scan_between(const RowScan* a, double low, double high, int64_t* ids) {
  return a->is_double ? between(*a, static_cast<const double*>(a->values), low, high, ids)
                      : between(*a, static_cast<const float*>(a->values), low, high, ids);
}

static int64_t scan_contenders(const RowScan* a, double limit, uint64_t key, int64_t capacity, int64_t* ids,
                               double* scores) {
  return a->is_double ? contenders(*a, static_cast<const double*>(a->values), limit, key, capacity, ids, scores)
                      : contenders(*a, static_cast<const float*>(a->values), limit, key, capacity, ids, scores);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
