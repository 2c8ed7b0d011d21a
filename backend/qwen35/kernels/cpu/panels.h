// Products with NVFP4 weights in panels: lanes run over 16 output features, so one element is one lane's fixed sequence.
//
// Integers: for each block of 16 along K an exact integer dot product (any order), then
//     acc = fused(float(dot), weight scale * activation scale, acc)
// in ascending K. Every instruction set has the same bits.
//
// bf16: the order of the tile instruction TDPBF16PS, so that vectors and tiles agree. E2M1 * E4M3 is exact. In each step
// of 32 along K the even and the odd positions make one chain of fused multiply-adds each, from zero; then
//     acc = acc + (even + odd)
// with subnormals taken as zeros.
//
// Both leave out the constant 2^-8 of `load_e4m3` (and 2 of the integer codes), see `factor_of`.
#pragma once
#include "activations.h"

namespace qwen35 {
namespace QWEN35_ISA {

struct Panel {
  const uint8_t *codes, *scales;
  int64_t width;
};

INLINE Panel panel_of(const Weight& w, int64_t expert, int64_t panel) {
  int64_t at = (expert * ((w.num_rows + 15) / 16) + panel) * (w.width / 16);
  return {static_cast<const uint8_t*>(w.values) + at * 128, w.scales + at * 16, w.width};
}

// 64 bytes of E4M3 -> bf16, exact: the first 32 to `to`, the others to `behind`.
#if defined(__AVX512BF16__)
INLINE void expand_e4m3(const uint8_t* from, bf16* to, bf16* behind) {
  const uint8_t *low_table = e4m3_bytes[0], *high_table = e4m3_bytes[1];
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what unpacking by lanes of 128 bits undoes
  const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
  // vpermi2b looks at seven bits of an index: the magnitude.
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(low_table), bytes, _mm512_load_si512(low_table + 64));
  const __m512i high =
      _mm512_permutex2var_epi8(_mm512_load_si512(high_table), bytes, _mm512_load_si512(high_table + 64));
  const __m512i with_sign = _mm512_ternarylogic_epi64(high, bytes, _mm512_set1_epi8(int8_t(0x80)), 0xF8);  // a | b & c
  _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, with_sign));
  _mm512_storeu_si512(behind, _mm512_unpackhi_epi8(low, with_sign));
}
#else
INLINE void expand_e4m3(const uint8_t* from, bf16* to, bf16* behind) {
  for (int i = 0; i < 32; ++i) to[i] = e4m3_values[from[i]], behind[i] = e4m3_values[from[i + 32]];
}
#endif

INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }
constexpr int64_t kAhead = 2048;  // bytes of codes

// out[m * 16 + n] of one panel for rows first:first + M of a group of G of form kIntegers with D digits.
template <int D, int M, int G>
static void integer_rows(const Panel& p, const uint8_t* rows, float* out, int64_t first = 0) {
  const uint8_t *codes = p.codes, *scales = p.scales;
  F16 acc[M];
  for (F16& one : acc) one = zero();
  for (int64_t block = 0; block < p.width / 16; ++block, codes += 128, scales += 16, rows += G * integer_bytes(D)) {
    prefetch(codes + kAhead), prefetch(codes + kAhead + 64);
    if (block % 4 == 0) prefetch(scales + kAhead / 8);
    const auto* digits = reinterpret_cast<const int8_t*>(rows) + 16 * D * first;
    const auto* row_scales = reinterpret_cast<const float*>(rows + 16 * D * G) + first;
    const auto* corrections = reinterpret_cast<const int32_t*>(rows + (16 * D + 4) * G) + first;
    const F16 weight_scale = load_e4m3(scales);
    const U64 w[4] = {low_codes(codes), high_codes(codes), low_codes(codes + 64), high_codes(codes + 64)};
    const U64 w8[4] = {eightfold(w[0]), eightfold(w[1]), eightfold(w[2]), eightfold(w[3])};
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      I16 total = splat(corrections[m]);
      const int8_t* q = digits + 16 * D * m;
      if (D == 2)
        for (int i = 0; i < 4; ++i) total = dot4_times8(total, w8[i], q + 4 * i);
      for (int i = 0; i < 4; ++i) total = dot4(total, w[i], q + 16 * (D - 1) + 4 * i);
      acc[m] = fused(to_float(total), mul(weight_scale, set1(row_scales[m])), acc[m]);
    }
  }
  for (int m = 0; m < M; ++m) store(out + 16 * m, acc[m]);
}

// even, odd += the 8 positions of K whose codes are the 64 bytes at `codes`.
template <int M>
INLINE void float_half(const uint8_t* codes, F16 scale, const float* x, int64_t stride, F16 (&even)[M], F16 (&odd)[M]) {
  const F16 w[8] = {mul(code_values<0>(codes), scale),  mul(code_values<8>(codes), scale),
                    mul(code_values<16>(codes), scale), mul(code_values<24>(codes), scale),
                    mul(code_values<4>(codes), scale),  mul(code_values<12>(codes), scale),
                    mul(code_values<20>(codes), scale), mul(code_values<28>(codes), scale)};
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < 8; i += 2) {
      even[m] = fma(w[i], set1(x[m * stride + i]), even[m]);
      odd[m] = fma(w[i + 1], set1(x[m * stride + i + 1]), odd[m]);
    }
}

// The same for M rows of form kFloats, `stride` floats apart.
template <int M>
static void float_rows(const uint8_t* codes, const uint8_t* scales, int64_t width, const float* x, int64_t stride,
                       float* out) {
  F16 acc[M], even[M], odd[M];
  for (F16& one : acc) one = zero();
  for (int64_t k = 0; k < width; k += 32) {
    for (int m = 0; m < M; ++m) even[m] = odd[m] = zero();
    for (int64_t block = k / 16; block < k / 16 + 2 && 16 * block < width; ++block) {
      const uint8_t* at = codes + block * 128;
      prefetch(at + kAhead), prefetch(at + kAhead + 64);
      const F16 scale = load_e4m3(scales + block * 16);
      float_half<M>(at, scale, x + 16 * block, stride, even, odd);
      float_half<M>(at + 64, scale, x + 16 * block + 8, stride, even, odd);
    }
    prefetch(scales + k + kAhead / 8);
    for (int m = 0; m < M; ++m) acc[m] = add(acc[m], add(even[m], odd[m]));
  }
  for (int m = 0; m < M; ++m) store(out + 16 * m, acc[m]);
}

// A group of up to 8 rows.
template <int D>
static void integer_group(const Panel& p, const uint8_t* rows, int64_t count, float* out) {
  switch (count) {
    case 1: return integer_rows<D, 1, 1>(p, rows, out);
    case 2: return integer_rows<D, 2, 2>(p, rows, out);
    case 3: return integer_rows<D, 3, 3>(p, rows, out);
    case 4: return integer_rows<D, 4, 4>(p, rows, out);
    case 5: return integer_rows<D, 5, 5>(p, rows, out);
    case 6: return integer_rows<D, 6, 6>(p, rows, out);
    case 7: return integer_rows<D, 7, 7>(p, rows, out);
    default: return integer_rows<D, 8, 8>(p, rows, out);
  }
}

// The first `count` rows of a group of 16, and perhaps more.
template <int D>
static void integer_rows_of_16(const Panel& p, const uint8_t* rows, int64_t count, float* out) {
  count > 4 ? integer_rows<D, 8, 16>(p, rows, out) : integer_rows<D, 4, 16>(p, rows, out);
  if (count > 12) integer_rows<D, 8, 16>(p, rows, out + 128, 8);
  else if (count > 8) integer_rows<D, 4, 16>(p, rows, out + 128, 8);
}

// Up to 4 rows.
static void float_panel(const Panel& p, const uint8_t* rows, int64_t stride, int64_t count, float* out) {
  const auto* x = reinterpret_cast<const float*>(rows);
  switch (count) {
    case 1: return float_rows<1>(p.codes, p.scales, p.width, x, stride / 4, out);
    case 2: return float_rows<2>(p.codes, p.scales, p.width, x, stride / 4, out);
    case 3: return float_rows<3>(p.codes, p.scales, p.width, x, stride / 4, out);
    default: return float_rows<4>(p.codes, p.scales, p.width, x, stride / 4, out);
  }
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
