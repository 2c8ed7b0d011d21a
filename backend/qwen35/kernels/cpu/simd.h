// Sixteen floats, and thirty-two bfloat16 as a dot product wants them, for each instruction set.
// Every function is one fixed sequence of IEEE operations a lane: no result depends on where or how often it is inlined
// (the build forbids contraction of a * b + c; `fma` says where one is meant).
#pragma once
#include <cstdint>
#include <cstring>
#ifdef QWEN35_X86
#include <immintrin.h>
#endif
#include "common.h"

namespace qwen35 {
namespace QWEN35_ISA {

#define INLINE static inline __attribute__((always_inline))

// E2M1 by its code: as a value, and as 2 * value + 12, an unsigned byte.
static const float kCodeValues[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                      0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
static const uint8_t kOffsetCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// What follows for each instruction set, beside arithmetic on F16 by its plain name:
//   fused         a * b + c rounded once, whatever the hardware (`fma` rounds twice in portable code)
//   low_codes     64 bytes of code pairs -> 2 * E2M1 + 12 of their low nibbles; high_codes of their high ones
//   dot4          acc[lane] += codes[4 lane + i] * q[i] over i < 4, exact
//   eightfold     codes made ready for dot4_times8, which adds 8 times what dot4 adds
//   load_e4m3     16 positive E4M3 / 256
//   code_values   E2M1 at bit Shift of 16 little-endian words
//   highest_magnitude  of the lanes; NaN where there is one, as it has the highest bits
//   store_int8    lanes rounded to the nearest, ties to even, |x| < 128; returns their sum

#if defined(__AVX512BF16__)
struct F16 { __m512 v; };
struct B32 { __m512bh v; };
INLINE F16 zero() { return {_mm512_setzero_ps()}; }
INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F16 nearest(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
INLINE F16 power_of_two(F16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
INLINE F16 load_bf16(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
INLINE void store_bf16(bf16* p, F16 a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
INLINE B32 load32(const bf16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
INLINE F16 dot(F16 acc, B32 a, B32 b) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }
INLINE F16 fused(F16 a, F16 b, F16 c) { return fma(a, b, c); }

struct I16 { __m512i v; };
struct U64 { __m512i v; };
// vpermb looks at six bits of an index: the table is there four times, so that the upper two may be anything.
INLINE __m512i four_times(__m128i table) { return _mm512_broadcast_i32x4(table); }
INLINE U64 low_codes(const uint8_t* p) {
  return {_mm512_permutexvar_epi8(_mm512_loadu_si512(p), four_times(_mm_loadu_si128((const __m128i*)kOffsetCodes)))};
}
INLINE U64 high_codes(const uint8_t* p) {
  return {_mm512_permutexvar_epi8(_mm512_srli_epi16(_mm512_loadu_si512(p), 4),
                                  four_times(_mm_loadu_si128((const __m128i*)kOffsetCodes)))};
}
INLINE I16 splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE I16 dot4(I16 acc, U64 codes, const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return {_mm512_dpbusd_epi32(acc.v, codes.v, _mm512_set1_epi32(four))};
}
INLINE U64 eightfold(U64 codes) { return {_mm512_slli_epi16(codes.v, 3)}; }  // 8 * 24 fits into a byte
INLINE I16 dot4_times8(I16 acc, U64 eightfold_codes, const int8_t* q) { return dot4(acc, eightfold_codes, q); }
INLINE F16 to_float(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
INLINE F16 load_e4m3(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7))};
}
template <int Shift>
INLINE F16 code_values(const uint8_t* p) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(p), Shift), _mm512_loadu_ps(kCodeValues))};
}
INLINE float highest_magnitude(F16 x) {
  __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(bits)))));
}
INLINE int32_t store_int8(int8_t* p, F16 x) {
  __m512i q = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(q));
  return _mm512_reduce_add_epi32(q);
}
#elif defined(__AVX2__)
struct F16 { __m256 a, b; };
struct B32 { F16 a, b; };
#define BOTH(f, ...) { return {f(x.a, ##__VA_ARGS__), f(x.b, ##__VA_ARGS__)}; }
INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F16 nearest(F16 x) BOTH(_mm256_round_ps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
INLINE __m256 power_of_two8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F16 power_of_two(F16 x) BOTH(power_of_two8)
INLINE __m256 load_bf16_8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F16 load_bf16(const bf16* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
INLINE __m128i to_bf16_8(__m256 x) {
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}
INLINE void store_bf16(bf16* p, F16 x) {
  _mm_storeu_si128((__m128i*)p, to_bf16_8(x.a)), _mm_storeu_si128((__m128i*)(p + 8), to_bf16_8(x.b));
}
INLINE B32 load32(const bf16* p) { return {load_bf16(p), load_bf16(p + 16)}; }
INLINE F16 dot(F16 acc, B32 x, B32 y) { return fma(x.b, y.b, fma(x.a, y.a, acc)); }
INLINE F16 fused(F16 x, F16 y, F16 z) { return fma(x, y, z); }

struct I16 { __m256i a, b; };
struct U64 { __m256i a, b; };
INLINE __m256i codes_of(const uint8_t* p, int shift) {
  __m256i bytes = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)p), shift);
  __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)kOffsetCodes));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, _mm256_set1_epi8(15)));
}
INLINE U64 low_codes(const uint8_t* p) { return {codes_of(p, 0), codes_of(p + 32, 0)}; }
INLINE U64 high_codes(const uint8_t* p) { return {codes_of(p, 4), codes_of(p + 32, 4)}; }
INLINE I16 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE __m256i dot4_8(__m256i acc, __m256i codes, __m256i q) {  // at most 2 * 24 * 127 in 16 bits
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, q), _mm256_set1_epi16(1)));
}
INLINE I16 dot4(I16 acc, U64 codes, const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  __m256i wide = _mm256_set1_epi32(four);
  return {dot4_8(acc.a, codes.a, wide), dot4_8(acc.b, codes.b, wide)};
}
INLINE U64 eightfold(U64 codes) { return codes; }  // 8 * 24 * 127 would not fit into 16 bits
INLINE I16 dot4_times8(I16 acc, U64 codes, const int8_t* q) {
  I16 sums = dot4(splat(0), codes, q);
  return {_mm256_add_epi32(acc.a, _mm256_slli_epi32(sums.a, 3)), _mm256_add_epi32(acc.b, _mm256_slli_epi32(sums.b, 3))};
}
INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE F16 load_e4m3(const uint8_t* p) {
  __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
INLINE __m256 code_values8(__m256i codes) {  // vpermps looks at three bits: the magnitude
  __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(int(0x80000000)));
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(kCodeValues), codes), _mm256_castsi256_ps(sign));
}
template <int Shift>
INLINE F16 code_values(const uint8_t* p) {
  return {code_values8(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i*)p), Shift)),
          code_values8(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i*)(p + 32)), Shift))};
}
#undef BOTH
#else
struct F16 { float v[16]; };
struct B32 { F16 a, b; };
#define EACH(expression) { F16 r; for (int i = 0; i < 16; ++i) r.v[i] = (expression); return r; }
INLINE float float_of(bf16 h) { uint32_t u = uint32_t(h) << 16; float f; std::memcpy(&f, &u, 4); return f; }
INLINE bf16 bf16_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return f != f ? 0x7FC0 : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
INLINE float two_to(float n) { uint32_t u = uint32_t(int32_t(n) + 127) << 23; float f; std::memcpy(&f, &u, 4); return f; }
INLINE F16 zero() EACH(0.0f)
INLINE F16 set1(float x) EACH(x)
INLINE F16 load(const float* p) EACH(p[i])
INLINE void store(float* p, F16 x) { std::memcpy(p, x.v, 64); }
INLINE F16 add(F16 x, F16 y) EACH(x.v[i] + y.v[i])
INLINE F16 sub(F16 x, F16 y) EACH(x.v[i] - y.v[i])
INLINE F16 mul(F16 x, F16 y) EACH(x.v[i] * y.v[i])
INLINE F16 div(F16 x, F16 y) EACH(x.v[i] / y.v[i])
INLINE F16 fma(F16 x, F16 y, F16 z) EACH(x.v[i] * y.v[i] + z.v[i])
INLINE F16 max(F16 x, F16 y) EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i])
INLINE F16 min(F16 x, F16 y) EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i])
INLINE F16 nearest(F16 x) EACH((x.v[i] + 12582912.0f) - 12582912.0f)  // 1.5 * 2^23: right for |x| < 2^22
INLINE F16 power_of_two(F16 n) EACH(two_to(n.v[i]))
INLINE F16 load_bf16(const bf16* p) EACH(float_of(p[i]))
INLINE void store_bf16(bf16* p, F16 x) { for (int i = 0; i < 16; ++i) p[i] = bf16_of(x.v[i]); }
INLINE B32 load32(const bf16* p) { return {load_bf16(p), load_bf16(p + 16)}; }
INLINE F16 dot(F16 acc, B32 x, B32 y) { return fma(x.b, y.b, fma(x.a, y.a, acc)); }
INLINE F16 fused(F16 x, F16 y, F16 z) EACH(__builtin_fmaf(x.v[i], y.v[i], z.v[i]))

struct I16 { int32_t v[16]; };
struct U64 { uint8_t v[64]; };
INLINE U64 low_codes(const uint8_t* p) { U64 r; for (int i = 0; i < 64; ++i) r.v[i] = kOffsetCodes[p[i] & 15]; return r; }
INLINE U64 high_codes(const uint8_t* p) { U64 r; for (int i = 0; i < 64; ++i) r.v[i] = kOffsetCodes[p[i] >> 4]; return r; }
INLINE I16 splat(int32_t x) { I16 r; for (int32_t& one : r.v) one = x; return r; }
INLINE I16 dot4(I16 acc, U64 codes, const int8_t* q) {
  for (int i = 0; i < 64; ++i) acc.v[i / 4] += codes.v[i] * q[i % 4];
  return acc;
}
INLINE U64 eightfold(U64 codes) { return codes; }
INLINE I16 dot4_times8(I16 acc, U64 codes, const int8_t* q) {
  for (int i = 0; i < 64; ++i) acc.v[i / 4] += 8 * codes.v[i] * q[i % 4];
  return acc;
}
INLINE F16 to_float(I16 x) EACH(float(x.v[i]))
INLINE F16 load_e4m3(const uint8_t* p) EACH(float_of(e4m3_values[p[i]]) / 256.0f)
template <int Shift>
INLINE F16 code_values(const uint8_t* p) EACH(kCodeValues[p[4 * i + Shift / 8] >> Shift % 8 & 15])
#undef EACH
#endif

#if !defined(__AVX512BF16__)
INLINE float highest_magnitude(F16 x) {
  uint32_t words[16], highest = 0;
  store(reinterpret_cast<float*>(words), x);
  for (uint32_t word : words) highest = (word & 0x7FFFFFFF) > highest ? word & 0x7FFFFFFF : highest;
  float value;
  std::memcpy(&value, &highest, 4);
  return value;
}
INLINE int32_t store_int8(int8_t* p, F16 x) {
  float values[16];
  int32_t total = 0;
  store(values, nearest(x));
  for (int i = 0; i < 16; ++i) total += p[i] = int8_t(int32_t(values[i]));
  return total;
}
#endif

// Sum of the lanes, always in the order of one halving tree.
INLINE float sum(F16 x) {
#if defined(__AVX512BF16__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#elif defined(__AVX2__)
  __m256 eight = _mm256_add_ps(x.a, x.b);
#endif
#ifdef __AVX2__
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float v[16];
  store(v, x);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  return v[0];
#endif
}

INLINE float highest(F16 x) {
  float v[16], r;
  store(v, x);
  r = v[0];
  for (int i = 1; i < 16; ++i) r = v[i] > r ? v[i] : r;
  return r;
}

// exp to about 1 ulp: 2^n * p(x - n ln 2), p by Taylor to x^7 on |x| <= 0.35; 0 below -87, 2^127 * 1.7 above 88.
INLINE F16 exp(F16 x) {
  x = min(max(x, set1(-87.3f)), set1(88.3f));
  F16 n = nearest(mul(x, set1(1.44269504f)));
  F16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.98412698e-4f);
  const float coefficients[] = {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f};
  for (float coefficient : coefficients) p = fma(p, r, set1(coefficient));
  return mul(p, power_of_two(n));
}

INLINE F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }
INLINE F16 silu(F16 x) { return mul(x, sigmoid(x)); }

// The first `count` < 16 values, zeros behind.
INLINE F16 load_some(const float* p, int64_t count) {
  float v[16] = {};
  std::memcpy(v, p, count * 4);
  return load(v);
}
INLINE F16 load_some_bf16(const bf16* p, int64_t count) {
  bf16 v[16] = {};
  std::memcpy(v, p, count * 2);
  return load_bf16(v);
}
INLINE void store_some_bf16(bf16* p, F16 x, int64_t count) {
  bf16 v[16];
  store_bf16(v, x);
  std::memcpy(p, v, count * 2);
}
INLINE F16 load_bf16_at(const bf16* p, int64_t left) { return left >= 16 ? load_bf16(p) : load_some_bf16(p, left); }
INLINE void store_at(float* p, F16 x, int64_t left) {
  float v[16];
  if (left >= 16) return store(p, x);
  store(v, x);
  std::memcpy(p, v, left * 4);
}
INLINE F16 load_at(const float* p, int64_t left) { return left >= 16 ? load(p) : load_some(p, left); }
INLINE void store_bf16_at(bf16* p, F16 x, int64_t left) { left >= 16 ? store_bf16(p, x) : store_some_bf16(p, x, left); }

// Subnormal floats count as zeros while it lives: what a tile instruction does whatever MXCSR says.
struct FlushSubnormals {
#ifdef QWEN35_X86
  unsigned int before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

template <class Function>
static void for_each(int64_t count, Function& function) {
  parallel(count, [](void* f, int64_t i) { (*static_cast<Function*>(f))(i); }, &function);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
