// Products by tile instructions (AMX). A tile is 16 rows of 64 bytes; TDPBF16PS adds 16 x 16 sums of 32 products and
// TDPBSSD sums of 64. Rows of an operand never meet, so an element has the same bits in any company.
#pragma once
#include "panels.h"

#if defined(__AMX_TILE__)
namespace qwen35 {
namespace QWEN35_ISA {

// Tiles 0-3: sums, 4: the operand that all of them share, 5-7: their own operands.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
  void set(int tile, int64_t rows, int64_t bytes) { num_rows[tile] = uint8_t(rows), row_bytes[tile] = uint16_t(bytes); }
};

struct TileScope {
  explicit TileScope(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~TileScope() { _tile_release(); }
};

#define INLINE_METHOD inline __attribute__((always_inline))

INLINE __m512i signed_codes(__m512i bytes) {
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return _mm512_permutexvar_epi8(bytes, four_times(table));
}

// 64 bytes of codes -> 2 * E2M1 of 16 outputs at 8 positions of K, four neighbours a word; for two digits that times 8
// before, at the places of the first digit.
template <int D>
INLINE void expand_integers(const uint8_t* codes, uint8_t* to) {
  const __m512i bytes = _mm512_loadu_si512(codes);
  const __m512i low = signed_codes(bytes), high = signed_codes(_mm512_srli_epi16(bytes, 4));
  _mm512_store_si512(to + 256 * (D - 1), low);
  _mm512_store_si512(to + 256 * (D - 1) + 64, high);
  if constexpr (D == 2) {
    const __m512i whole = _mm512_set1_epi8(int8_t(0xF8));  // 8 * 12 fits into a signed byte
    _mm512_store_si512(to, _mm512_and_si512(_mm512_slli_epi16(low, 3), whole));
    _mm512_store_si512(to + 64, _mm512_and_si512(_mm512_slli_epi16(high, 3), whole));
  }
}

INLINE void add_integers(const int32_t* sums, const float* weight_scales, const float* row_scales, F16 (&acc)[16]) {
  const F16 weight_scale = load(weight_scales);
#pragma GCC unroll 16
  for (int m = 0; m < 16; ++m) {
    F16 total = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * m))};
    acc[m] = fused(total, mul(weight_scale, set1(row_scales[m])), acc[m]);
  }
}

// A panel of integers as tiles read it: [K / 16][D][4][64] codes, then [K / 16][16] block scales.
template <int D>
struct ExpandedIntegers {
  uint8_t* codes;
  float* scales;
  static int64_t num_bytes(int64_t width) { return width / 16 * (256 * D + 64); }
  ExpandedIntegers(int64_t width, uint8_t* at) : codes(at), scales(reinterpret_cast<float*>(at + width * 16 * D)) {}
  static void fill(const Panel& p, uint8_t* to) {
    const ExpandedIntegers expanded(p.width, to);
    for (int64_t block = 0; block < p.width / 16; ++block) {
      expand_integers<D>(p.codes + block * 128, expanded.codes + block * 256 * D);
      expand_integers<D>(p.codes + block * 128 + 64, expanded.codes + block * 256 * D + 128);
      store(expanded.scales + 16 * block, load_e4m3(p.scales + 16 * block));
    }
  }
};

struct IntegerScope : TileScope {
  static TileShapes shapes(int digits) {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i)
      shapes.set(i, 16, 64), shapes.set(4 + i, 16, 16 * digits), shapes.set(6 + i, 4 * digits, 64);
    return shapes;
  }
  explicit IntegerScope(int digits) : TileScope(shapes(digits)) {}
};

template <int D>
INLINE void even_integer_product(const uint8_t* group, const uint8_t* codes, int32_t* sums) {
  _tile_zero(0);
  _tile_loadd(4, group, 16 * D);
  _tile_loadd(6, codes, 64);
  _tile_dpbssd(0, 4, 6);
  _tile_stored(0, sums, 64);
}

template <int D>
INLINE void odd_integer_product(const uint8_t* group, const uint8_t* codes, int32_t* sums) {
  _tile_zero(1);
  _tile_loadd(5, group, 16 * D);
  _tile_loadd(7, codes, 64);
  _tile_dpbssd(1, 5, 7);
  _tile_stored(1, sums, 64);
}

// As `integer_rows` for all rows of a group of 16.
template <int D>
static void integer_tile(const ExpandedIntegers<D>& weight, int64_t num_blocks, const uint8_t* rows, float* out) {
  constexpr int64_t kGroup = 16 * integer_bytes(D), kScales = 256 * D, kCodes = 256 * D;
  alignas(64) int32_t sums[2][256];
  F16 acc[16];
#pragma GCC unroll 16
  for (F16& one : acc) one = zero();
  auto scales = [](const uint8_t* group) { return reinterpret_cast<const float*>(group + kScales); };
  int64_t block = 0;
  for (; block + 2 <= num_blocks; block += 2, rows += 2 * kGroup) {
    even_integer_product<D>(rows, weight.codes + kCodes * block, sums[0]);
    odd_integer_product<D>(rows + kGroup, weight.codes + kCodes * block + kCodes, sums[1]);
    add_integers(sums[0], weight.scales + 16 * block, scales(rows), acc);
    add_integers(sums[1], weight.scales + 16 * block + 16, scales(rows + kGroup), acc);
  }
  if (block < num_blocks) {
    even_integer_product<D>(rows, weight.codes + kCodes * block, sums[0]);
    add_integers(sums[0], weight.scales + 16 * block, scales(rows), acc);
  }
#pragma GCC unroll 16
  for (int m = 0; m < 16; ++m) store(out + 16 * m, acc[m]);
}

// 64 bytes of codes -> 4 rows of a bf16 tile: pairs of K for 16 outputs, block scale included, exact.
INLINE void expand_pairs(const uint8_t* codes, F16 scale, uint8_t* to) {
  auto pair = [&](F16 even, F16 odd, uint8_t* row) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(mul(even, scale).v), 16);
    __m512i high = _mm512_castps_si512(mul(odd, scale).v);
    _mm512_store_si512(row, _mm512_mask_mov_epi16(low, 0xAAAAAAAA, high));
  };
  pair(code_values<0>(codes), code_values<8>(codes), to);
  pair(code_values<16>(codes), code_values<24>(codes), to + 64);
  pair(code_values<4>(codes), code_values<12>(codes), to + 128);
  pair(code_values<20>(codes), code_values<28>(codes), to + 192);
}

// Where 32 of K of 16 outputs lie, or 16 pairs of K of 16 outputs: one tile.
struct TileAt {
  const void* data;
  int64_t stride;
};

constexpr int64_t kSteps = 4;  // of 32 along K that are expanded at a time: their tiles stay in the first cache

// Tiles of a packed weight, expanded when they are asked for in ascending order: `expand(step, to)` writes those of
// kSteps steps. A buffer for all of K keeps them, and they can be asked for again.
template <class Expand>
struct ExpandedTiles {
  Expand expand;
  uint8_t* buffer;
  bool keeps, is_filled;
  INLINE_METHOD TileAt operator()(int64_t step) const {
    uint8_t* at = buffer + (keeps ? step / kSteps * kSteps * 1024 : 0);
    if (step % kSteps == 0 && !is_filled) expand(step, at);
    return {at + step % kSteps * 1024, 64};
  }
};

struct ExpandNVFP4 {
  Panel p;
  void operator()(int64_t step, uint8_t* to) const {
    const int64_t num_blocks = p.width / 16;
    for (int64_t block = 2 * step; block < 2 * (step + kSteps); ++block, to += 512) {
      if (block >= num_blocks) {
        std::memset(to, 0, 512);
        continue;
      }
      const uint8_t* codes = p.codes + block * 128;
      prefetch(codes + kAhead), prefetch(codes + kAhead + 64), prefetch(p.scales + 16 * block + kAhead / 8);
      const F16 scale = load_e4m3(p.scales + 16 * block);
      expand_pairs(codes, scale, to);
      expand_pairs(codes + 64, scale, to + 256);
    }
  }
};

struct ExpandFP8 {
  const uint8_t* values;  // of one panel
  int64_t width, num_rows;
  void operator()(int64_t step, uint8_t* to) const {
    for (int64_t n = 0; n < num_rows; ++n) {
      const uint8_t* row = values + n * width;
      __builtin_prefetch(row + 32 * step + 1024, 0, 2), __builtin_prefetch(row + 32 * step + 1088, 0, 2);
      for (int64_t i = 0; i < kSteps; i += 2) {
        const int64_t k = 32 * (step + i);
        auto* at = reinterpret_cast<bf16*>(to + 1024 * i + 64 * n);
        uint8_t end[64] = {};
        if (k + 64 > width && k < width) std::memcpy(end, row + k, width - k);
        expand_e4m3(k + 64 > width ? end : row + k, at, at + 512);
      }
    }
  }
};

struct DenseTiles {
  const bf16* values;  // of one panel
  int64_t width, num_rows;
  bool reads_ahead;  // into the next panel, a line after the other: rows at their distance would be 16 streams
  bf16 (*end)[32];
  INLINE_METHOD TileAt operator()(int64_t step) const {
    const int64_t k = 32 * step;
    if (reads_ahead) {
      const auto* next = reinterpret_cast<const uint8_t*>(values + 16 * width) + step * 1024;
      for (int i = 0; i < 16; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
    }
    if (k + 32 <= width) return {values + k, width * 2};
    std::memset(end, 0, 1024);
    for (int64_t n = 0; n < num_rows; ++n) std::memcpy(end[n], values + n * width + k, (width - k) * 2);
    return {end, 64};
  }
};

template <int Sums, int First, int Second>
INLINE void add_bf16_product() {  // the compiler's intrinsic takes digits only
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(First), "i"(Second));
}

// Tile `Sums` += product of the shared operand (tile 4) and its own; IsFirst: the shared one has the rows of the sums.
template <int Sums, bool IsFirst>
INLINE void add_product(const uint8_t* own, int64_t stride) {
  if constexpr (Sums % 2) {
    _tile_loadd(6, own, stride);
    IsFirst ? add_bf16_product<Sums, 4, 6>() : add_bf16_product<Sums, 6, 4>();
  } else {
    _tile_loadd(5, own, stride);
    IsFirst ? add_bf16_product<Sums, 4, 5>() : add_bf16_product<Sums, 5, 4>();
  }
}

INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <int Count, bool IsFirst>
INLINE void add_products(const uint8_t* own, int64_t stride, int64_t distance) {
  add_product<0, IsFirst>(own, stride);
  if constexpr (Count > 1) add_product<1, IsFirst>(own + distance, stride);
  if constexpr (Count > 2) add_product<2, IsFirst>(own + 2 * distance, stride);
  if constexpr (Count > 3) add_product<3, IsFirst>(own + 3 * distance, stride);
}

template <int Count>
INLINE void store_sums(float* out) {
  _tile_stored(0, out, 64);
  if constexpr (Count > 1) _tile_stored(1, out + 256, 64);
  if constexpr (Count > 2) _tile_stored(2, out + 512, 64);
  if constexpr (Count > 3) _tile_stored(3, out + 768, 64);
}

// Where the operands of up to 4 tiles of activations lie.
struct Operands {
  const uint8_t* data;
  int64_t stride, step_bytes, distance;  // bytes from row to row of a tile, from step to step, from tile to tile
};

template <int Count, bool IsFirst, class Tiles>
INLINE void multiply(const Tiles& weight, const Operands& own, int64_t num_steps, float* sums) {
  clear_sums();
  for (int64_t step = 0; step < num_steps; ++step) {
    const TileAt at = weight(step);
    _tile_loadd(4, at.data, at.stride);
    add_products<Count, IsFirst>(own.data + step * own.step_bytes, own.stride, own.distance);
  }
  store_sums<Count>(sums);
}

// sums[i * 256 + row * 16 + column] of `count` activation tiles against one panel. IsFirst: the weight's tile has the
// rows of the sums (outputs), else the activations' has.
template <bool IsFirst, class Tiles>
static void multiply_tiles(int64_t count, const Tiles& weight, const Operands& own, int64_t num_steps, float* sums) {
  switch (count) {
    case 1: return multiply<1, IsFirst>(weight, own, num_steps, sums);
    case 2: return multiply<2, IsFirst>(weight, own, num_steps, sums);
    case 3: return multiply<3, IsFirst>(weight, own, num_steps, sums);
    default: return multiply<4, IsFirst>(weight, own, num_steps, sums);
  }
}

// out[column * 16 + row] = tile[row * 16 + column].
INLINE void store_transposed(const float* tile, float* out) {
  __m512 rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_ps(tile + 16 * i);
  transpose(rows, out);
}

struct Bf16Scope : TileScope {
  // Sums of `num_rows` x `num_columns`; IsFirst as above.
  static TileShapes shapes(bool is_first, int64_t num_rows, int64_t num_columns) {
    TileShapes shapes;
    for (int tile = 0; tile < 4; ++tile) shapes.set(tile, num_rows, 4 * num_columns);
    for (int tile = 4; tile < 7; ++tile) {
      const bool has_rows = (tile == 4) == is_first;
      shapes.set(tile, has_rows ? num_rows : 16, has_rows ? 64 : 4 * num_columns);
    }
    return shapes;
  }
  Bf16Scope(bool is_first, int64_t num_rows, int64_t num_columns)
      : TileScope(shapes(is_first, num_rows, num_columns)) {}
};

}  // namespace QWEN35_ISA
}  // namespace qwen35
#endif
