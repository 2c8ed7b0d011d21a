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

INLINE __m512i signed_codes(__m512i bytes) {
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  return _mm512_permutexvar_epi8(bytes, four_times(table));
}

// 64 bytes of codes -> 2 * E2M1 of 16 outputs at 8 positions of K, four neighbours a word.
INLINE void expand_integers(const uint8_t* codes, uint8_t* to) {
  __m512i bytes = _mm512_loadu_si512(codes);
  _mm512_store_si512(to, signed_codes(bytes));
  _mm512_store_si512(to + 64, signed_codes(_mm512_srli_epi16(bytes, 4)));
}

INLINE void add_integers(const int32_t* sums, F16 weight_scale, const float* scales, int64_t stride, F16 (&acc)[16]) {
  for (int m = 0; m < 16; ++m) {
    F16 total = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * m))};
    acc[m] = fused(total, mul(weight_scale, set1(scales[m * stride])), acc[m]);
  }
}

// A panel of integers as tiles read it: [K / 16][4][64] codes, then [K / 16][16] block scales.
struct ExpandedIntegers {
  uint8_t* codes;
  float* scales;
  static int64_t num_bytes(int64_t width) { return width / 16 * 320; }
  // Expands into `to`, or finds it there.
  ExpandedIntegers(const Panel& p, uint8_t* to, bool is_first) : codes(to), scales(reinterpret_cast<float*>(to + p.width * 16)) {
    if (!is_first) return;
    for (int64_t block = 0; block < p.width / 16; ++block) {
      expand_integers(p.codes + block * 128, codes + block * 256);
      expand_integers(p.codes + block * 128 + 64, codes + block * 256 + 128);
      store(scales + 16 * block, load_e4m3(p.scales + 16 * block));
    }
  }
};

template <int Tile>
INLINE void add_integer_product(const uint8_t* rows, int64_t stride, const uint8_t* codes, int32_t* sums) {
  static_assert(Tile < 2);
  if constexpr (Tile == 0) {
    _tile_zero(0);
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, sums, 64);
  } else {
    _tile_zero(1);
    _tile_loadd(5, rows, stride);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, sums, 64);
  }
}

struct IntegerScope : TileScope {
  static TileShapes shapes() {
    TileShapes shapes;
    for (int i = 0; i < 2; ++i) shapes.set(i, 16, 64), shapes.set(4 + i, 16, 16), shapes.set(6 + i, 4, 64);
    return shapes;
  }
  IntegerScope() : TileScope(shapes()) {}
};

// As `integer_rows` for 16 rows.
static void integer_tile(const ExpandedIntegers& weight, int64_t width, const uint8_t* rows, int64_t stride, float* out) {
  alignas(64) int32_t sums[2][256];
  const float* scales = scales_of(rows, width);
  const int64_t num_blocks = width / 16;
  F16 acc[16];
  for (F16& one : acc) one = zero();
  int64_t block = 0;
  for (; block + 2 <= num_blocks; block += 2) {
    add_integer_product<0>(rows + 16 * block, stride, weight.codes + 256 * block, sums[0]);
    add_integer_product<1>(rows + 16 * block + 16, stride, weight.codes + 256 * block + 256, sums[1]);
    add_integers(sums[0], load(weight.scales + 16 * block), scales + block, stride / 4, acc);
    add_integers(sums[1], load(weight.scales + 16 * block + 16), scales + block + 1, stride / 4, acc);
  }
  if (block < num_blocks) {
    add_integer_product<0>(rows + 16 * block, stride, weight.codes + 256 * block, sums[0]);
    add_integers(sums[0], load(weight.scales + 16 * block), scales + block, stride / 4, acc);
  }
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

// 16 * Count activation rows (form kRows) against 16 outputs, expanded to [K / 32][16 pairs][16][2].
template <int Count>
static void rows_by_tiles(const uint8_t* expanded, const uint8_t* rows, int64_t stride, int64_t num_steps, float* out) {
  clear_sums();
  for (int64_t step = 0; step < num_steps; ++step) {
    _tile_loadd(4, expanded + step * 1024, 64);
    add_products<Count, false>(rows + step * 64, stride, 16 * stride);
  }
  store_sums<Count>(out);
}

// A panel as bf16 tiles: [K / 32][16 pairs][16][2].
static void expand_panel(const Panel& p, uint8_t* to) {
  const int64_t num_blocks = p.width / 16;
  if (num_blocks % 2) std::memset(to + num_blocks * 512, 0, 512);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const uint8_t* codes = p.codes + block * 128;
    prefetch(codes + kAhead), prefetch(codes + kAhead + 64), prefetch(p.scales + 16 * block + kAhead / 8);
    const F16 scale = load_e4m3(p.scales + 16 * block);
    expand_pairs(codes, scale, to + block * 512);
    expand_pairs(codes + 64, scale, to + block * 512 + 256);
  }
}

struct Bf16Scope : TileScope {
  static TileShapes shapes(int64_t num_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, num_rows, 64);
    shapes.set(5, 16, 64), shapes.set(6, 16, 64);
    return shapes;
  }
  explicit Bf16Scope(int64_t num_rows = 16) : TileScope(shapes(num_rows)) {}
};

// out[column * 16 + row] = tile[row * 16 + column].
INLINE void store_transposed(const float* tile, float* out) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_ps(tile + 16 * i);
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; ++i) {  // a[4 q + i]: rows 4 q .. 4 q + 3 of columns i, i + 4, i + 8, i + 12
    __m512 low = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
    __m512 low2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xDD);
    _mm512_storeu_ps(out + 16 * i, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_storeu_ps(out + 16 * (i + 8), _mm512_shuffle_f32x4(low, low2, 0xDD));
    _mm512_storeu_ps(out + 16 * (i + 4), _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_storeu_ps(out + 16 * (i + 12), _mm512_shuffle_f32x4(high, high2, 0xDD));
  }
}

// 16 outputs (weight rows ldw elements apart) against 16 * Count activation rows of form kColumns.
template <int Count>
static void columns_by_tiles(const bf16* w, int64_t ldw, int64_t width, int64_t num_rows, const uint8_t* columns,
                             int64_t distance, float* out) {
  alignas(64) bf16 end[16][32] = {};
  alignas(64) float sums[256 * Count];
  const int64_t whole = width & ~int64_t{31};
  clear_sums();
  for (int64_t k = 0; k < whole; k += 32) {
    if constexpr (Count == 1)
      for (int64_t n = 0; n < num_rows; ++n) _mm_prefetch(w + n * ldw + k + 512, _MM_HINT_T1);
    _tile_loadd(4, w + k, ldw * 2);
    add_products<Count, true>(columns + k * 32, 64, distance);
  }
  if (whole < width) {
    for (int64_t n = 0; n < num_rows; ++n) std::memcpy(end[n], w + n * ldw + whole, (width - whole) * 2);
    _tile_loadd(4, end, 64);
    add_products<Count, true>(columns + whole * 32, 64, distance);
  }
  store_sums<Count>(sums);
  for (int i = 0; i < Count; ++i) store_transposed(sums + 256 * i, out + 256 * i);
}

}  // namespace QWEN35_ISA
}  // namespace qwen35
#endif
