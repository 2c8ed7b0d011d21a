// Activation rows in the form in which a weight's product reads them. Letters: M rows, K input features.
//
//   integers   (NVFP4 with kInt8 or kFP4) one record a row: q int8 [K], then for each block of 16 its scale (float) and
//              -12 * (sum of q), the correction for codes that are stored with 12 added. kInt8: scale = amax / 127 of the
//              block; kFP4: q = 2 * E2M1, scale = E4M3 * input scale / 2 as in qwen35/nvfp4.py: quantize_activation.
//   floats     (NVFP4 with kBF16, few rows) float [M, K]
//   rows       (NVFP4 with kBF16, many rows, for tiles; dense and FP8 without tiles) bf16 [M, K], zeros up to 32
//   columns    (dense and FP8 with tiles) [M / 16][K / 2][16 rows][2]: pairs of K as the second operand of a tile product
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

INLINE Form form_of(const Weight& w, int64_t count) {
  if (w.kind == kNVFP4 && w.arithmetic != kBF16) return Form::kIntegers;
  if (w.kind == kNVFP4) return count <= kFewRows ? Form::kFloats : Form::kRows;
#if defined(__AMX_TILE__)
  return Form::kColumns;
#else
  return Form::kRows;
#endif
}

// Bytes from one row to the next, of kColumns a row's share. Rows are an odd number of cache lines apart: a power of two
// would put the rows of one tile into one set of the cache.
INLINE int64_t row_bytes(const Weight& w, int64_t count) {
  switch (form_of(w, count)) {
    case Form::kIntegers: return ((w.width + w.width / 2 + 63) & ~int64_t{63}) | 64;
    case Form::kFloats: return padded(w.width) * 4 | 64;
    case Form::kRows: return padded(w.width) * 2 | 64;
    case Form::kColumns: break;
  }
  return padded(w.width) * 2;
}

// Of all rows, zero rows up to a multiple of 16 included.
INLINE int64_t prepared_bytes(const Weight& w, int64_t count) { return padded_rows(count) * row_bytes(w, count); }

INLINE float* scales_of(uint8_t* record, int64_t width) { return reinterpret_cast<float*>(record + width); }
INLINE int32_t* offsets_of(uint8_t* record, int64_t width) {
  return reinterpret_cast<int32_t*>(record + width + width / 4);
}
INLINE const float* scales_of(const uint8_t* record, int64_t width) {
  return reinterpret_cast<const float*>(record + width);
}
INLINE const int32_t* offsets_of(const uint8_t* record, int64_t width) {
  return reinterpret_cast<const int32_t*>(record + width + width / 4);
}

INLINE void put_int8(uint8_t* record, int64_t width, int64_t block, F16 x) {
  float amax = highest_magnitude(x), inverse = amax < 1e-30f ? 0.0f : 127.0f / amax;
  int32_t total = store_int8(reinterpret_cast<int8_t*>(record) + 16 * block, mul(x, set1(inverse)));
  scales_of(record, width)[block] = amax < 1e-30f ? 0.0f : amax / 127.0f;
  offsets_of(record, width)[block] = -12 * total;
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

INLINE void put_fp4(uint8_t* record, int64_t width, int64_t block, F16 x, float input_scale) {
  float scale = highest_magnitude(x) / (6.0f * input_scale), values[16];
  scale = scale == 0.0f ? 1.0f : scale < 0.001953125f ? 0.001953125f : scale > 448.0f ? 448.0f : scale;
  float step = round_e4m3(scale) * input_scale;
  store(values, div(x, set1(step)));
  for (float& value : values) value = value < 0.0f ? -twice_e2m1(-value) : twice_e2m1(value);
  int32_t total = store_int8(reinterpret_cast<int8_t*>(record) + 16 * block, load(values));
  scales_of(record, width)[block] = step * 0.5f;
  offsets_of(record, width)[block] = -12 * total;
}

// Values [16 block, 16 block + 16) of row m (zeros beyond K), of `count` rows for weight[expert] -> `to`.
INLINE void put(const Weight& w, int64_t expert, int64_t count, int64_t m, int64_t block, F16 x, uint8_t* to) {
  const int64_t stride = row_bytes(w, count);
  switch (form_of(w, count)) {
    case Form::kIntegers:
      if (w.arithmetic == kInt8) return put_int8(to + m * stride, w.width, block, x);
      return put_fp4(to + m * stride, w.width, block, x, w.input_scale[expert * w.input_stride]);
    case Form::kFloats: return store(reinterpret_cast<float*>(to + m * stride) + 16 * block, x);
    case Form::kRows: return store_bf16(reinterpret_cast<bf16*>(to + m * stride) + 16 * block, x);
    case Form::kColumns: break;
  }
  uint32_t pairs[8];
  store_bf16(reinterpret_cast<bf16*>(pairs), x);
  auto* column = reinterpret_cast<uint32_t*>(to + m / 16 * 16 * stride) + m % 16;
  for (int i = 0; i < 8; ++i) column[(8 * block + i) * 16] = pairs[i];
}

// Zeros between K and the form's own width, and rows up to a multiple of 16; before or after the rows are put.
static void put_zeros(const Weight& w, int64_t count, uint8_t* to) {
  const int64_t stride = row_bytes(w, count), num_blocks = (w.width + 15) / 16;
  std::memset(to + count * stride, 0, form_of(w, count) == Form::kColumns ? 0 : (padded_rows(count) - count) * stride);
  if (form_of(w, count) == Form::kIntegers) return;
  const int64_t num_rows = form_of(w, count) == Form::kColumns ? padded_rows(count) : count;
  for (int64_t m = 0; m < num_rows; ++m)
    for (int64_t block = m < count ? num_blocks : 0; block < padded(w.width) / 16; ++block)
      put(w, 0, count, m, block, zero(), to);
}

INLINE void put_row(const Weight& w, int64_t expert, int64_t count, int64_t m, const bf16* row, uint8_t* to) {
  int64_t block = 0;
  for (; 16 * block + 16 <= w.width; ++block) put(w, expert, count, m, block, load_bf16(row + 16 * block), to);
  if (16 * block < w.width)
    put(w, expert, count, m, block, load_some_bf16(row + 16 * block, w.width - 16 * block), to);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
