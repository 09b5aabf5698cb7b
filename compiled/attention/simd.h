// Vectors of 32-bit lanes on GCC's vector extensions. Knows nothing of attention.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Rows and vectors of a product whose sums fit the 16 or 32 registers.
constexpr int kTileRows = kLanes == 8 ? 4 : 6;
constexpr int kTileColumns = kLanes == 8 ? 2 : 4;

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

template <class Vector>
inline Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector>
inline void store(void* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

inline Words splat(uint32_t x) { return Words{} + x; }
inline Floats splat(float x) { return x - Floats{}; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int... I>
inline Ints lane_numbers(std::integer_sequence<int, I...>) {
  return Ints{I...};
}

// Lanes `count` and up become `fill`.
inline Floats keep_first(Floats v, int count, float fill) {
  return lane_numbers(Lanes{}) < count - Ints{} ? v : splat(fill);
}

// Lanes below `count` become `fill`.
inline Floats drop_first(Floats v, int count, float fill) {
  return lane_numbers(Lanes{}) < count - Ints{} ? splat(fill) : v;
}

template <int Distance, int... I>
inline Words across(Words v, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(v, Words{uint32_t(I ^ Distance)...});
}

template <int Distance = kLanes / 2>
inline float reduce_max(Floats v) {
  v = max(v, (Floats)across<Distance>((Words)v, Lanes{}));
  if constexpr (Distance > 1) return reduce_max<Distance / 2>(v);
  return v[0];
}

template <int Distance = kLanes / 2>
inline float reduce_sum(Floats v) {
  v += (Floats)across<Distance>((Words)v, Lanes{});
  if constexpr (Distance > 1) return reduce_sum<Distance / 2>(v);
  return v[0];
}

template <int Distance, int... I>
inline void exchange(Words& a, Words& b, std::integer_sequence<int, I...>) {
  const Words low = {uint32_t(I & Distance ? kLanes + I - Distance : I)...};
  const Words high = {uint32_t(I & Distance ? kLanes + I : I + Distance)...};
  const Words first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}

// The first `bytes` of a vector, zeros after them, of which nothing is read.
template <class Vector>
inline Vector load_bytes(const void* from, int64_t bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint64_t mask = ~uint64_t{0} >> (64 - (bytes < int64_t(sizeof(Vector)) ? bytes : sizeof(Vector)));
  if constexpr (sizeof(Vector) == 64) return (Vector)_mm512_maskz_loadu_epi8(mask, from);
  if constexpr (sizeof(Vector) == 32) return (Vector)_mm256_maskz_loadu_epi8(uint32_t(mask), from);
#endif
  Vector v{};
  std::memcpy(&v, from, bytes < int64_t(sizeof v) ? bytes : sizeof v);
  return v;
}

// The first `bytes` of a vector, or all of it: mostly all, which is one instruction where a size that is not known is a
// call of memcpy.
template <class Vector>
inline void store_first(void* to, Vector v, int64_t bytes) {
  if (bytes >= int64_t(sizeof v))
    store(to, v);
  else
    std::memcpy(to, &v, bytes);
}

// Transpose a square of kLanes x kLanes words held in registers: blocks swap at distances 1, 2, 4, ...
template <int Distance = 1>
inline void transpose(Words (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if (!(i & Distance)) exchange<Distance>(square[i], square[i + Distance], Lanes{});
  if constexpr (2 * Distance < kLanes) transpose<2 * Distance>(square);
}

inline bool any_greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#else
  return reduce_max(a) > reduce_max(b);  // b is the same in all lanes
#endif
}

// 2^x for x <= 0; exactly 1 at 0, exactly 0 below -125 and at -inf. The relative error is below 2e-7, or 1.1e-4 where
// `rough`, which is a twentieth of a bfloat16's.
template <bool rough = false>
inline Floats exp2(Floats x) {
  const Floats round = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats shifted = x + round;
  const Floats f = x - (shifted - round);
  Floats p;
  if constexpr (rough) {
    p = splat(0x1.c2a218p-5f);
    p = p * f + 0x1.f00c4ep-3f;
    p = p * f + 0x1.62f5fap-1f;
  } else {
    p = splat(0x1.41fbbcp-13f);
    p = p * f + 0x1.5f3e54p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
  }
  p = p * f + 1.0f;
  const Floats scaled = (Floats)((Words)p + ((Words)shifted << 23));
  return x < splat(-125.0f) ? Floats{} : scaled;
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// tanh with a relative error below 5e-7: its series near 0, where (1 - t) / (1 + t) would cancel.
inline Floats tanh(Floats x) {
  const Floats size = (Floats)((Words)x & 0x7fffffff), square = x * x;
  const Floats t = exp2(size * -0x1.715476p+1f);
  const Words far = (Words)((1.0f - t) / (1.0f + t)) | ((Words)x & 0x80000000);
  Floats near = splat(0x1.664f48p-6f);
  near = near * square + -0x1.ba1ba2p-5f;
  near = near * square + 0x1.111112p-3f;
  near = near * square + -0x1.555556p-2f;
  near = near * square + 1.0f;
  return size < splat(0.25f) ? near * x : (Floats)far;
}

}  // namespace simd
