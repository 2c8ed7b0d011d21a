// Activation rows in the form in which a weight's product reads them. Letters: M rows, K input features, G rows a group.
//
//   integers   (NVFP4 with kInt8, kInt11 or kFP4) [M / G][K / 16] blocks of: digits int8 [G][D][16], scale float [G],
//              and the correction for codes that are stored with 12 added, -12 * (sum of q), int32 [G].
//              kInt8: one digit q, scale = amax / 127 of the 16 values; kInt11: two digits, q = 8 * first + second,
//              scale = amax / 1019; kFP4: q = 2 * E2M1, scale = E4M3 * input scale / 2 as in qwen35/nvfp4.py:
//              quantize_activation. G = M up to 8 rows, else 16.
//   floats     (NVFP4 with kBF16, few rows) float [M, K]
//   rows       (NVFP4 with kBF16, many rows, for tiles; dense and FP8 without tiles) bf16 [M, K], zeros up to 32
//   columns    (dense and FP8 with tiles) [M / G][K / 2][G rows][2]: pairs of K as the second operand of a tile product;
//              G = M up to 16 rows, else 16
// Each row's numbers depend on that row alone. Rows are written a block of 16 values at a time, so that whoever computes
// an activation can put it where its product reads it.
#pragma once
#include "simd.h"

namespace qwen35 {
namespace QWEN35_ISA {

#if defined(__AMX_TILE__)
constexpr int64_t kFewRows = 2;  // up to here vectors beat tiles
#else
constexpr int64_t kFewRows = INT64_MAX;
#endif

enum class Form { kIntegers, kFloats, kRows, kColumns };

INLINE int64_t padded(int64_t width) { return (width + 31) & ~int64_t{31}; }
INLINE int64_t padded_rows(int64_t count) { return (count + 15) & ~int64_t{15}; }

constexpr int64_t kIntegerRows = 8;  // the most that share the unpacking of a weight in registers

INLINE int64_t group_rows(Form form, int64_t count) {
  const int64_t most = form == Form::kIntegers ? kIntegerRows : form == Form::kColumns ? 16 : 1;
  return count <= most ? count : most == 1 ? 1 : 16;
}

INLINE Form form_of(const Weight& w, int64_t count) {
  if (w.kind == kNVFP4 && w.arithmetic != kBF16) return Form::kIntegers;
  if (w.kind == kNVFP4) return count <= kFewRows ? Form::kFloats : Form::kRows;
#if defined(__AMX_TILE__)
  return Form::kColumns;
#else
  return Form::kRows;
#endif
}

INLINE int64_t num_digits(const Weight& w) { return w.arithmetic == kInt11 ? 2 : 1; }

// Of 16 values of one row: digits, scale, correction.
constexpr int64_t integer_bytes(int64_t digits) { return 16 * digits + 8; }

// Bytes from one row to the next, or a row's share of its group. Rows are an odd number of cache lines apart: a power of
// two would put the rows of one tile into one set of the cache.
INLINE int64_t row_bytes(const Weight& w, int64_t count) {
  switch (form_of(w, count)) {
    case Form::kIntegers: return w.width / 16 * integer_bytes(num_digits(w));
    case Form::kFloats: return padded(w.width) * 4 | 64;
    case Form::kRows: return padded(w.width) * 2 | 64;
    case Form::kColumns: break;
  }
  return padded(w.width) * 2;
}

// Of all rows; where many rows make groups or tiles of 16, zero rows up to a multiple of 16 included.
INLINE int64_t prepared_bytes(const Weight& w, int64_t count) {
  const bool is_whole = group_rows(form_of(w, count), count) == count;
  return ((is_whole ? count : padded_rows(count)) * row_bytes(w, count) + 63) & ~int64_t{63};
}

// Where one row's 16 values lie.
struct IntegerBlock {
  int8_t* q;
  float* scale;
  int32_t* correction;
  IntegerBlock(const Weight& w, uint8_t* to, int64_t count, int64_t m, int64_t block) {
    const int64_t group = group_rows(Form::kIntegers, count), digits = num_digits(w);
    uint8_t* at = to + (m / group * (w.width / 16) + block) * group * integer_bytes(digits);
    q = reinterpret_cast<int8_t*>(at) + m % group * 16 * digits;
    scale = reinterpret_cast<float*>(at + group * 16 * digits) + m % group;
    correction = reinterpret_cast<int32_t*>(at + group * (16 * digits + 4)) + m % group;
  }
};

constexpr float kLeastAmax = 1e-30f;  // blocks below are zero: their inverse might overflow
INLINE float most_level(int64_t digits) { return digits == 2 ? 1019.0f : 127.0f; }

INLINE void put_integers(const IntegerBlock& to, int64_t digits, F16 x) {
  const float amax = highest_magnitude(x), most = most_level(digits);
  const F16 q = mul(x, set1(amax < kLeastAmax ? 0.0f : most / amax));
  int32_t total;
  if (digits == 1) {
    total = store_int8(to.q, q);
  } else {
    const F16 whole = nearest(q), first = nearest(mul(whole, set1(0.125f)));
    total = 8 * store_int8(to.q, first) + store_int8(to.q + 16, sub(whole, mul(first, set1(8.0f))));
  }
  *to.correction = -12 * total;
  *to.scale = amax < kLeastAmax ? 0.0f : amax / most;
}

// x in [2^-9, 448] rounded to E4M3; ties to even.
INLINE float round_e4m3(float x) {
  uint32_t bits;
  if (x < 0.015625f) return (x * 512.0f + 12582912.0f - 12582912.0f) / 512.0f;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000;
  std::memcpy(&x, &bits, 4);
  return x;
}

// |x| rounded to 2 * E2M1: steps of 1 below 4, of 2 below 8, of 4 above; ties to the even code, at most 12.
INLINE float twice_e2m1(float x) {
  const float whole = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to an integer
  float fine = 2.0f * x + whole - whole, middle = 2.0f * (x + whole - whole), coarse = 4.0f * (0.5f * x + whole - whole);
  float value = x < 2.0f ? fine : x < 4.0f ? middle : coarse;
  return value < 12.0f ? value : 12.0f;
}

INLINE void put_fp4(const IntegerBlock& to, F16 x, float input_scale) {
  float scale = highest_magnitude(x) / (6.0f * input_scale), values[16];
  scale = scale == 0.0f ? 1.0f : scale < 0.001953125f ? 0.001953125f : scale > 448.0f ? 448.0f : scale;
  float step = round_e4m3(scale) * input_scale;
  store(values, div(x, set1(step)));
  for (float& value : values) value = value < 0.0f ? -twice_e2m1(-value) : twice_e2m1(value);
  *to.correction = -12 * store_int8(to.q, load(values));
  *to.scale = step * 0.5f;
}

#if defined(__AMX_TILE__)
// to[column][row] = rows[row][column], 16 x 16 words.
INLINE void transpose(__m512 (&a)[16], float* to) {
  __m512 b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // a[4 q + c]: rows 4 q .. 4 q + 3 of columns c, c + 4, c + 8, c + 12
    const int at = i / 2 * 4, odd = i % 2;
    __m512d low = _mm512_castps_pd(b[at + odd]), high = _mm512_castps_pd(b[at + odd + 2]);
    a[at + 2 * odd] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    a[at + 2 * odd + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 low = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
    __m512 low2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xDD);
    _mm512_storeu_ps(to + 16 * i, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_storeu_ps(to + 16 * (i + 8), _mm512_shuffle_f32x4(low, low2, 0xDD));
    _mm512_storeu_ps(to + 16 * (i + 4), _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_storeu_ps(to + 16 * (i + 12), _mm512_shuffle_f32x4(high, high2, 0xDD));
  }
}

// 32 values of 16 rows -> one tile of form kColumns.
template <class Row>
INLINE void put_columns(Row&& row, uint8_t* to) {
  __m512 words[16];
#pragma GCC unroll 16
  for (int m = 0; m < 16; ++m) words[m] = _mm512_loadu_ps(row(m));
  transpose(words, reinterpret_cast<float*>(to));
}
#endif

// Values [16 block, 16 block + 16) of row m (zeros beyond K), of `count` rows for weight[expert] -> `to`.
INLINE void put(const Weight& w, int64_t expert, int64_t count, int64_t m, int64_t block, F16 x, uint8_t* to) {
  const int64_t stride = row_bytes(w, count);
  const Form form = form_of(w, count);
  if (form == Form::kFloats) return store(reinterpret_cast<float*>(to + m * stride) + 16 * block, x);
  if (form == Form::kRows) return store_bf16(reinterpret_cast<bf16*>(to + m * stride) + 16 * block, x);
  if (form == Form::kIntegers) {
    const IntegerBlock at(w, to, count, m, block);
    if (w.arithmetic == kFP4) return put_fp4(at, x, w.input_scale[expert * w.input_stride]);
    return put_integers(at, num_digits(w), x);
  }
  const int64_t group = group_rows(form, count);
  uint32_t pairs[8];
  store_bf16(reinterpret_cast<bf16*>(pairs), x);
  auto* column = reinterpret_cast<uint32_t*>(to + m / group * group * stride) + m % group;
  for (int i = 0; i < 8; ++i) column[(8 * block + i) * group] = pairs[i];
}

// Zeros between K and the form's own width, and rows up to a multiple of 16; to be called before the rows are put.
static void put_zeros(const Weight& w, int64_t count, uint8_t* to) {
  const Form form = form_of(w, count);
  const int64_t stride = row_bytes(w, count), group = group_rows(form, count), used = count / group * group * stride;
  std::memset(to + used, 0, prepared_bytes(w, count) - used);  // a last group that is not full, or what follows
  if (form == Form::kIntegers || padded(w.width) - w.width < 16) return;
  for (int64_t m = 0; m < count; ++m) put(w, 0, count, m, padded(w.width) / 16 - 1, zero(), to);
}

#if defined(__AVX512BF16__)
// 16 levels -> one byte each; returns their sum.
INLINE int32_t store_digit(int8_t* to, __m512i levels) {
  const __m128i bytes = _mm512_cvtepi32_epi8(levels);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(int8_t(0x80))), _mm_setzero_si128());
  _mm_storeu_si128((__m128i*)to, bytes);
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

// `put_integers` for the first blocks of a row, 16 at a time; returns how many.
template <int Digits>
static int64_t put_integer_row(const Weight& w, const bf16* row, int64_t count, int64_t m, uint8_t* to) {
  const int64_t num_blocks = w.width / 256 * 16, distance = group_rows(Form::kIntegers, count) * integer_bytes(Digits);
  for (int64_t start = 0; start < num_blocks; start += 16) {
    const bf16* x = row + 16 * start;
    uint32_t bits[16];
    for (int i = 0; i < 16; ++i) {  // the least of 0x7FFF - magnitude
      __m256i rest = _mm256_andnot_si256(_mm256_loadu_si256((const __m256i*)(x + 16 * i)), _mm256_set1_epi16(0x7FFF));
      __m128i least = _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(rest), _mm256_extracti128_si256(rest, 1)));
      bits[i] = uint32_t(0x7FFF - uint16_t(_mm_extract_epi16(least, 0))) << 16;
    }
    const __m512 amax = _mm512_castsi512_ps(_mm512_loadu_si512(bits)), most = _mm512_set1_ps(most_level(Digits));
    const __mmask16 is_some = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(kLeastAmax), _CMP_NLT_UQ);
    float inverses[16], scales[16];
    _mm512_storeu_ps(inverses, _mm512_maskz_div_ps(is_some, most, amax));
    _mm512_storeu_ps(scales, _mm512_maskz_div_ps(is_some, amax, most));
    const IntegerBlock at(w, to, count, m, start);
    for (int i = 0; i < 16; ++i) {
      const __m512i q = _mm512_cvtps_epi32(mul(load_bf16(x + 16 * i), set1(inverses[i])).v);
      int8_t* digits = at.q + i * distance;
      int32_t total;
      if constexpr (Digits == 1) {
        total = store_digit(digits, q);
      } else {
        const __m512i first = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(4)), 3);
        const __m512i second = _mm512_sub_epi32(q, _mm512_slli_epi32(first, 3));
        total = 8 * store_digit(digits, first) + store_digit(digits + 16, second);
      }
      const int32_t correction = -12 * total;
      std::memcpy(reinterpret_cast<uint8_t*>(at.scale) + i * distance, &scales[i], 4);
      std::memcpy(reinterpret_cast<uint8_t*>(at.correction) + i * distance, &correction, 4);
    }
  }
  return num_blocks;
}
#endif

// Rows [16 part, 16 part + 16) of `count` for weight[expert] -> `to`; row(m): where row m comes from.
template <class Row>
static void put_part(const Weight& w, int64_t expert, int64_t count, int64_t part, Row&& row, uint8_t* to) {
  const int64_t first = 16 * part, stop = first + 16 < count ? first + 16 : count;
  int64_t k = 0;
#if defined(__AMX_TILE__)
  if (form_of(w, count) == Form::kColumns && stop - first == 16)
    for (; k + 32 <= w.width; k += 32) put_columns([&](int64_t m) { return row(first + m) + k; }, to + first * row_bytes(w, count) + k * 32);
#endif
  for (int64_t m = first; m < stop; ++m) {
#if defined(__AVX512BF16__)
    if (w.kind == kNVFP4 && w.arithmetic == kInt8) k = 16 * put_integer_row<1>(w, row(m), count, m, to);
    if (w.kind == kNVFP4 && w.arithmetic == kInt11) k = 16 * put_integer_row<2>(w, row(m), count, m, to);
#endif
    for (int64_t at = k; at < w.width; at += 16)
      put(w, expert, count, m, at / 16, load_bf16_at(row(m) + at, w.width - at), to);
  }
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
