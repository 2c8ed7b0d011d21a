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
#undef EACH
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
INLINE F16 load_at(const float* p, int64_t left) { return left >= 16 ? load(p) : load_some(p, left); }
INLINE void store_bf16_at(bf16* p, F16 x, int64_t left) { left >= 16 ? store_bf16(p, x) : store_some_bf16(p, x, left); }

template <class Function>
static void for_each(int64_t count, Function& function) {
  parallel(count, [](void* f, int64_t i) { (*static_cast<Function*>(f))(i); }, &function);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
