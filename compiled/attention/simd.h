// Vectors of 32-bit lanes on GCC's vector extensions, and the three element types as formats on top.
//
// Knows nothing of attention. There are no intrinsics but one pair: the bfloat16 dot product of AVX-512.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BF16__) && defined(__AVX512F__)
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

// Transpose a square of kLanes x kLanes words held in registers: blocks swap at distances 1, 2, 4, ...
template <int Distance = 1>
inline void transpose(Words (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if (!(i & Distance)) exchange<Distance>(square[i], square[i + Distance], Lanes{});
  if constexpr (2 * Distance < kLanes) transpose<2 * Distance>(square);
}

// 2^x for x <= 0 with a relative error below 2e-7; exactly 1 at 0, exactly 0 below -125 and at -inf.
inline Floats exp2(Floats x) {
  const Floats round = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Floats shifted = x + round;
  const Floats f = x - (shifted - round);
  Floats p = splat(0x1.41fbbcp-13f);
  p = p * f + 0x1.5f3e54p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
  const Floats scaled = (Floats)((Words)p + ((Words)shifted << 23));
  return x < splat(-125.0f) ? Floats{} : scaled;
}

// A format says how elements of the KV cache become the operands of a product of 32-bit words:
// one float a word, or two bfloat16 a word where the CPU multiplies pairs. `kPack` is that number.
//   key_words(from)           kLanes words of one key (or query): kLanes * kPack elements of its head
//   value_words(even, odd)    kLanes words of kPack neighbouring values: kLanes columns of the output
//   store_weights(to, p)      kLanes attention weights as the words that multiply value words
//   mad(sum, a, b)            sum + a * b in float32 in each lane
template <class Derived>
struct SingleWords {
  static constexpr int kPack = 1;
  static Words key_words(const void* from) { return (Words)Derived::load(from); }
  static Words value_words(const void* even, const void*) { return (Words)Derived::load(even); }
  static void store_weights(uint32_t* to, Floats p) { simd::store(to, p); }
  static Floats mad(Floats sum, Words a, Words b) { return (Floats)a * (Floats)b + sum; }
};

struct Float32 : SingleWords<Float32> {
  using Element = float;
  static Floats load(const void* from) { return simd::load<Floats>(from); }
  static void store(void* to, Floats v) { simd::store(to, v); }
};

struct Float16 : SingleWords<Float16> {
  using Element = uint16_t;
  static Floats load(const void* from) {
    const Words h = __builtin_convertvector(simd::load<Halves>(from), Words);
    const Words magnitude = (h & 0x7fff) << 13;
    const Floats finite = (Floats)magnitude * splat(0x1p112f);  // moves the exponent's bias, subnormals too
    const Words bits = magnitude >= splat(0x0f800000u) ? magnitude | 0x7f800000 : (Words)finite;
    return (Floats)(bits | (h & 0x8000) << 16);
  }
  static void store(void* to, Floats v) {
    const Words magnitude = (Words)v & 0x7fffffff;
    const Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const Words subnormal = (Words)((Floats)magnitude + splat(0.5f)) - 0x3f000000;
    Words h = magnitude < splat(0x38800000u) ? subnormal : normal;
    h = magnitude >= splat(0x477ff000u) ? splat(0x7c00u) : h;  // 65520 and more round to infinity
    h = magnitude > splat(0x7f800000u) ? splat(0x7e00u) : h;
    h |= (Words)v >> 16 & 0x8000;
    simd::store(to, __builtin_convertvector(h, Halves));
  }
};

struct BFloat16Base {
  using Element = uint16_t;
  static Words bits(const void* from) { return __builtin_convertvector(simd::load<Halves>(from), Words); }
  static Floats load(const void* from) { return (Floats)(bits(from) << 16); }
  static void store(void* to, Floats v) {
    const Words w = (Words)v;
    Words h = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    h = (w & 0x7fffffff) > splat(0x7f800000u) ? splat(0x7fc0u) : h;
    simd::store(to, __builtin_convertvector(h, Halves));
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
struct BFloat16 : BFloat16Base {
  static constexpr int kPack = 2;
  static Words key_words(const void* from) { return simd::load<Words>(from); }
  static Words value_words(const void* even, const void* odd) {
    return interleave(simd::load<__m256i>(even), simd::load<__m256i>(odd), Lanes{});
  }
  template <int... I>
  static Words interleave(__m256i even, __m256i odd, std::integer_sequence<int, I...>) {
    const Words order = {uint32_t(I | (I + 2 * kLanes) << 16)...};  // an element of each in every word
    return (Words)_mm512_permutex2var_epi16(_mm512_castsi256_si512(even), (__m512i)order, _mm512_castsi256_si512(odd));
  }
  static void store_weights(uint32_t* to, Floats p) {
    const __m256bh pairs = _mm512_cvtneps_pbh((__m512)p);
    std::memcpy(to, &pairs, sizeof pairs);
  }
  static Floats mad(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#else
struct BFloat16 : BFloat16Base, SingleWords<BFloat16> {};
#endif

}  // namespace simd
