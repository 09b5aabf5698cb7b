// out[rows, N] = x[rows, K] weight[N, K]^T + bias on weights that were packed for it. Knows no torch.
//
// Packed: panels of 32 outputs; in a panel one step after the other along K; in a step the 32 outputs' words of
// 32 bits, each one float or two neighbouring bfloat16. K is padded to whole words and N to whole panels by zeros.
//
//   panel 0:  [step 0: w0 w1 ... w31] [step 1: w0 ... w31] ...      panel 1: ...
//
// So a panel is read from its first byte to its last, and 16 outputs take one load and one multiplication with
// a word of x in all lanes. Each result is one chain of float32 additions in the order of K, whatever the number of
// rows, the blocks and the threads: a row alone has the same bits as among others.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "../attention/formats.h"

namespace linear {

using namespace simd;

constexpr int kPanel = 32;
constexpr int kPanelBytes = kPanel * 4;                   // of one step
constexpr int kVectors = 2;                               // of outputs in one tile
constexpr int kTileRows = kLanes == 16 ? 14 : 5;          // its sums fill the 32 or 16 registers
constexpr int64_t kBlockSteps = 1024;                     // of a panel, which then stay in L2 for all rows
constexpr int64_t kChunkBytes = 256 << 10;                // of x, which stay in L2 for all panels
constexpr int64_t kChunkRows = 256;
constexpr int64_t kAhead = 4 << 10;                       // bytes that are fetched ahead from memory
constexpr int64_t kAlone = 32 << 10;                      // multiplications that are not worth a second thread

using simd::Float32;

// Two elements a word on every CPU, so that the packed layout is one.
struct BFloat16 : BFloat16Base {
  static Floats mad(Floats sum, Words a, Words b) {
    if constexpr (simd::BFloat16::kPack == 2) return simd::BFloat16::mad(sum, a, b);
    sum += (Floats)(a << 16) * (Floats)(b << 16);
    return sum + (Floats)(a & 0xffff0000) * (Floats)(b & 0xffff0000);
  }
};

struct Problem {
  const char* x;  // whole words, rows `x_stride` bytes apart
  int64_t rows, steps, x_stride;
  const char* weight;
  const char* bias;  // N elements or null
  int64_t outputs;
  char* out;  // contiguous
};

// One row block times one block of a panel's steps, from `sums` [R, kPanel] on, or from zero.
template <class Format, int R>
void multiply(const char* x, int64_t x_stride, const char* weight, int64_t steps, bool first, float* sums,
              const char* ahead, int64_t ahead_stride) {
  for (int side = 0; side < kPanel; side += kVectors * kLanes) {
    Floats s[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++)
        s[r][v] = first ? Floats{} : load<Floats>(sums + r * kPanel + side + v * kLanes);
    const char* w = weight + side * 4;
    // Rows are found from every third one. Of what the compiler makes of x + r * x_stride by itself it keeps some in
    // vector registers, and moving those back costs a fourteenth of all multiplications.
    constexpr int kThirds = (R + 2) / 3;
    const char* third[kThirds];
#pragma GCC unroll 5
    for (int t = 0; t < kThirds; t++) third[t] = x + 3 * t * x_stride;
    for (int64_t i = 0; i < steps; i++, w += kPanelBytes, ahead += ahead_stride) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      Words words[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) words[v] = load<Words>(w + v * kLanes * 4);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const Words a = splat(load<uint32_t>(third[r / 3] + r % 3 * x_stride));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) s[r][v] = Format::mad(s[r][v], a, words[v]);
      }
#pragma GCC unroll 5
      for (int t = 0; t < kThirds; t++) {
        third[t] += 4;
        asm("" : "+r"(third[t]));  // each is a register of its own
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) store(sums + r * kPanel + side + v * kLanes, s[r][v]);
  }
}

template <class Format, int... I>
auto multiply_for(int64_t rows, std::integer_sequence<int, I...>) {
  constexpr decltype(&multiply<Format, 1>) of_rows[] = {multiply<Format, I + 1>...};
  return of_rows[rows - 1];
}

template <class Format>
class Product {
  using Element = typename Format::Element;

 public:
  explicit Product(const Problem& problem)
      : p_(problem), panels_((p_.outputs + kPanel - 1) / kPanel), panel_bytes_(p_.steps * kPanelBytes) {
    const int64_t rows = std::clamp(kChunkBytes / std::max<int64_t>(1, p_.steps * 4), int64_t{kTileRows}, kChunkRows);
    chunks_ = (p_.rows + rows - 1) / rows;
  }

  void run() const {
    const int64_t items = chunks_ * panels_;
    const bool alone = items < 2 || p_.rows * panels_ * kPanel * p_.steps < kAlone;
#pragma omp parallel if (!alone)
    {
      const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
      for (int64_t item = items * me / threads; item < items * (me + 1) / threads; item++)
        cell(p_.rows * (item / panels_) / chunks_, p_.rows * (item / panels_ + 1) / chunks_, item % panels_);
    }
  }

 private:
  // Rows begin .. end - 1 of one panel's outputs.
  void cell(int64_t begin, int64_t end, int64_t panel) const {
    alignas(64) float sums[kChunkRows * kPanel];
    const int64_t rows = end - begin, tiles = (rows + kTileRows - 1) / kTileRows;
    const int64_t blocks = tiles == 1 ? 1 : (p_.steps + kBlockSteps - 1) / kBlockSteps;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t step = p_.steps * block / blocks, steps = p_.steps * (block + 1) / blocks - step;
      const char* weight = p_.weight + panel * panel_bytes_ + step * kPanelBytes;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
        // One tile fetches what it will need itself; several share in fetching the next panel.
        const char* ahead = weight + (tiles == 1 ? kAhead : panel_bytes_ + steps * tile / tiles * kPanelBytes);
        multiply_for<Format>(count, std::make_integer_sequence<int, kTileRows>{})(
            p_.x + (begin + first) * p_.x_stride + step * 4, p_.x_stride, weight, steps, block == 0,
            sums + first * kPanel, ahead, kPanelBytes / tiles);
        if (block + 1 == blocks) write(begin + first, count, panel, sums + first * kPanel);
      }
    }
  }

  void write(int64_t row, int64_t rows, int64_t panel, const float* sums) const {
    const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, p_.outputs - column);
    alignas(64) Element bias[kPanel] = {};
    if (p_.bias) std::memcpy(bias, p_.bias + column * sizeof(Element), width * sizeof(Element));
    for (int64_t r = 0; r < rows; r++) {
      char* out = p_.out + ((row + r) * p_.outputs + column) * sizeof(Element);
      for (int v = 0; v < width; v += kLanes) {
        const Floats sum = load<Floats>(sums + r * kPanel + v);
        Format::store(out + v * sizeof(Element), p_.bias ? sum + Format::load(bias + v) : sum, width - v);
      }
    }
  }

  const Problem& p_;
  int64_t panels_, panel_bytes_, chunks_;
};

}  // namespace linear
