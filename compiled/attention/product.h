// Small matrix products over packed words, with the accumulators held in registers.
//
// The order of additions of one result does not depend on how many rows and columns are computed with it.

#pragma once

#include <algorithm>

#include "simd.h"

namespace {

using namespace simd;

constexpr int kTileRows = kLanes == 8 ? 4 : 6;  // a tile's accumulators fit the 16 or 32 registers
constexpr int kTileColumns = kLanes == 8 ? 2 : 4;

// C[R, columns] = C * scale_of_row + A[R, inner] B[inner, columns], columns in vectors.
template <class Format, int R, int C>
void tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t inner, float* c,
          int64_t c_stride, const float* scale_of_row) {
  Floats sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++)
      sums[r][j] = scale_of_row ? load<Floats>(c + r * c_stride + j * kLanes) * scale_of_row[r] : Floats{};
  for (int64_t i = 0; i < inner; i++) {
    Words words[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) words[j] = load<Words>(b + i * b_stride + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Words x = splat(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sums[r][j] = Format::mad(sums[r][j], x, words[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) store(c + r * c_stride + j * kLanes, sums[r][j]);
}

template <class Format, int... I>
auto tile_for(int64_t rows, int64_t columns, std::integer_sequence<int, I...>) {
  constexpr decltype(&tile<Format, 1, 1>) tiles[] = {
      tile<Format, I / kTileColumns + 1, I % kTileColumns + 1>...};
  return tiles[(rows - 1) * kTileColumns + columns - 1];
}

template <class Format>
void multiply(int64_t rows, int64_t columns, const uint32_t* a, int64_t a_stride, const uint32_t* b,
              int64_t b_stride, int64_t inner, float* c, int64_t c_stride, const float* scale_of_row) {
  constexpr std::make_integer_sequence<int, kTileRows * kTileColumns> shapes;
  for (int64_t j = 0; j < columns; j += kTileColumns)
    for (int64_t i = 0; i < rows; i += kTileRows)
      tile_for<Format>(std::min<int64_t>(kTileRows, rows - i), std::min<int64_t>(kTileColumns, columns - j), shapes)(
          a + i * a_stride, a_stride, b + j * kLanes, b_stride, inner, c + i * c_stride + j * kLanes, c_stride,
          scale_of_row ? scale_of_row + i : nullptr);
}

}  // namespace
