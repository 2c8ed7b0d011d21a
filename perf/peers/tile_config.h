// Included before every C++ file of llama.cpp: GCC before 13 tells its optimiser that `_tile_loadconfig` reads 8 bytes,
// so that stores to the other 56 are dropped and AMX faults at the first product (seen with GCC 12.2, Q4_0).
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
static inline void whole_tile_loadconfig(const void *config) {
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])config));
}
#undef _tile_loadconfig
#define _tile_loadconfig whole_tile_loadconfig
#endif
