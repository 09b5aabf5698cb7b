// Small matrix products over packed words, with the accumulators held in registers.
//
// The order of additions of one result does not depend on how many rows and columns are computed with it.

#pragma once

#include <algorithm>

#include "formats.h"

namespace {

using namespace simd;

// The right operand [inner, columns] as words that lie in memory; `words(i, j)`: row i, vector j.
struct Packed {
  const uint32_t* from;
  int64_t stride;

  Packed at(int64_t column) const { return {from + column * kLanes, stride}; }
  Words words(int64_t i, int j) const { return load<Words>(from + i * stride + j * kLanes); }
};

// C[R, columns] = C (* scale_of_row, where given; C is 0 where `fresh`) + A[R, begin .. end) B[begin .. end, columns].
template <class Format, int R, int C, bool fresh, class Right>
inline void tile(const uint32_t* a, int64_t a_stride, Right b, int64_t begin, int64_t end, float* c, int64_t c_stride,
                 const float* scale_of_row) {
  Floats sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) sums[r][j] = fresh ? Floats{} : load<Floats>(c + r * c_stride + j * kLanes);
  if (!fresh && scale_of_row) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sums[r][j] *= scale_of_row[r];
  }
  for (int64_t i = begin; i < end; i++) {
    Words words[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) words[j] = b.words(i, j);
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

// The same for any number of columns, in vectors.
template <class Format, int R, bool fresh, class Right>
inline void multiply(int64_t columns, const uint32_t* a, int64_t a_stride, Right b, int64_t begin, int64_t end,
                     float* c, int64_t c_stride, const float* scale_of_row) {
  int64_t j = 0;
  for (; j + kTileColumns <= columns; j += kTileColumns)
    tile<Format, R, kTileColumns, fresh>(a, a_stride, b.at(j), begin, end, c + j * kLanes, c_stride, scale_of_row);
  for (; j + 2 <= columns; j += 2)
    tile<Format, R, 2, fresh>(a, a_stride, b.at(j), begin, end, c + j * kLanes, c_stride, scale_of_row);
  if (j < columns) tile<Format, R, 1, fresh>(a, a_stride, b.at(j), begin, end, c + j * kLanes, c_stride, scale_of_row);
}

}  // namespace
