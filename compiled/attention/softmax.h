// The running softmax: scores become weights, partial results are merged.

#pragma once

#include <cmath>

#include "formats.h"
#include "plan.h"

namespace {

using namespace simd;

// From a product to the exponent of 2: first cap(product), then times factor.
struct Scores {
  bool capped;
  float inner, factor;  // capped: factor * tanh(inner * product)

  explicit Scores(const Problem& p)
      : capped(p.soft_cap > 0),
        inner(capped ? float(p.scale / p.soft_cap) : 1.0f),
        factor(float((capped ? p.soft_cap : p.scale) * M_LOG2E)) {}
  Floats cap(Floats product) const { return capped ? simd::tanh(product * inner) : product; }
};

// One query vector's products in a block become weights, in place, of which only those `from` .. `to` - 1 are not zero;
// `columns` are whole vectors of them. Returns what the vector's earlier sums must be multiplied with: mostly 1.
template <class Format, bool masked>
inline float weigh(const Scores& scores, uint32_t* products, int64_t columns, int64_t from, int64_t to, float* max,
                   float* sum) {
  constexpr int kMost = kBlock / kLanes;
  const int n = masked ? int(columns) : kMost;
  Floats values[kMost], top = splat(-INFINITY);
#pragma GCC unroll 16
  for (int j = 0; j < n; j++) {
    Floats s = scores.cap(load<Floats>(products + j * kLanes));
    if (masked) s = drop_first(keep_first(s, int(to - j * kLanes), -INFINITY), int(from - j * kLanes), -INFINITY);
    values[j] = s;
    top = simd::max(top, s);
  }
  float rescale = 1.0f;
  if (any_greater(top, splat(*max))) {
    const float risen = std::max(*max, reduce_max(top));
    rescale = simd::exp2((*max - risen) * scores.factor);
    *max = risen;
  }
  const Floats base = splat(*max == -INFINITY ? 0.0f : *max * scores.factor);  // all masked: weights are 0, not NaN
  Floats total = load<Floats>(sum) * rescale;
#pragma GCC unroll 16
  for (int j = 0; j < n; j++) {
    const Floats weights = simd::exp2<Format::kRough>(values[j] * scores.factor - base);
    total += weights;
    Format::store_weights(products + j * kLanes / Format::kPack, weights);
  }
  store(sum, total);
  return rescale;
}

inline void clear(State state, int64_t vectors, int64_t columns) {
  std::fill_n(state.max, vectors, -INFINITY);
  std::fill_n(state.sum, vectors * kLanes, 0.0f);
  std::fill_n(state.out, vectors * columns, 0.0f);
}

inline void merge(float factor, int64_t vectors, int64_t columns, State into, State from) {
  for (int64_t m = 0; m < vectors; m++) {
    const float top = std::max(into.max[m], from.max[m]);
    const float a = simd::exp2((into.max[m] - top) * factor), b = simd::exp2((from.max[m] - top) * factor);
    for (int64_t d = m * columns; d < (m + 1) * columns; d++) into.out[d] = into.out[d] * a + from.out[d] * b;
    for (int64_t d = m * kLanes; d < (m + 1) * kLanes; d++) into.sum[d] = into.sum[d] * a + from.sum[d] * b;
    into.max[m] = top;
  }
}

// What the sum of weighted values is multiplied with in the end. A sink is one more score, without a value.
inline float share(float factor, float max, float sum, const float* sink) {
  if (!sink) return 1.0f / sum;
  const float exponent = *sink * float(M_LOG2E), top = std::max(max * factor, exponent);
  const float part = simd::exp2(max * factor - top);
  return part / (sum * part + simd::exp2(exponent - top));
}

}  // namespace
