// The element types of the KV cache as formats: how they become the operands of a product of 32-bit words.
//
// A word is one float, or two bfloat16 where the CPU multiplies pairs; `kPack` is that number.
//   key_words(from)           kLanes words of one key (or query): kLanes * kPack elements of its head
//   value_words(even, odd)    kLanes words of kPack neighbouring values: kLanes columns of the output
//   ..., n)                   only n elements are there to be read: the rest are zero
//   store_weights(to, p)      kLanes attention weights as the words that multiply value words
//   mad(sum, a, b)            sum + a * b in float32 in each lane
//   kRough                    weights are rounded to bfloat16

#pragma once

#include "simd.h"

namespace simd {

template <class Derived>
struct SingleWords {
  static constexpr int kPack = 1;
  static constexpr bool kRough = false;
  template <class... N>
  static Words key_words(const void* from, N... n) {
    return (Words)Derived::load(from, n...);
  }
  template <class... N>
  static Words value_words(const void* even, const void*, N... n) {
    return (Words)Derived::load(even, n...);
  }
  static void store_weights(uint32_t* to, Floats p) { simd::store(to, p); }
  static Floats mad(Floats sum, Words a, Words b) { return (Floats)a * (Floats)b + sum; }
};

struct Float32 : SingleWords<Float32> {
  using Element = float;
  static Floats load(const void* from) { return simd::load<Floats>(from); }
  static Floats load(const void* from, int64_t n) { return load_bytes<Floats>(from, n * 4); }
  static void store(void* to, Floats v, int64_t n) { store_first(to, v, n * 4); }
};

// Two bytes that widen to a float and narrow to the nearest.
template <class Derived>
struct TwoBytes {
  using Element = uint16_t;
  static Floats load(const void* from) { return Derived::widen(simd::load<Halves>(from)); }
  static Floats load(const void* from, int64_t n) { return Derived::widen(load_bytes<Halves>(from, n * 2)); }
  static void store(void* to, Floats v, int64_t n) {
    store_first(to, Derived::narrow(v), n * 2);
  }
};

struct Float16 : TwoBytes<Float16>, SingleWords<Float16> {
#if defined(__AVX512F__)
  static Floats widen(Halves h) { return (Floats)_mm512_cvtph_ps((__m256i)h); }
  static Halves narrow(Floats v) { return (Halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
  static Floats widen(Halves h) { return (Floats)_mm256_cvtph_ps((__m128i)h); }
  static Halves narrow(Floats v) { return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
  static Floats widen(Halves half) {
    const Words h = __builtin_convertvector(half, Words);
    const Words magnitude = (h & 0x7fff) << 13;
    const Floats finite = (Floats)magnitude * splat(0x1p112f);  // moves the exponent's bias, subnormals too
    const Words bits = magnitude >= splat(0x0f800000u) ? magnitude | 0x7f800000 : (Words)finite;
    return (Floats)(bits | (h & 0x8000) << 16);
  }
  static Halves narrow(Floats v) {
    const Words magnitude = (Words)v & 0x7fffffff;
    const Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const Words subnormal = (Words)((Floats)magnitude + splat(0.5f)) - 0x3f000000;
    Words h = magnitude < splat(0x38800000u) ? subnormal : normal;
    h = magnitude >= splat(0x477ff000u) ? splat(0x7c00u) : h;  // 65520 and more round to infinity
    h = magnitude > splat(0x7f800000u) ? splat(0x7e00u) : h;
    return __builtin_convertvector(h | ((Words)v >> 16 & 0x8000), Halves);
  }
#endif
};

struct BFloat16Base : TwoBytes<BFloat16Base> {
  static Floats widen(Halves h) { return (Floats)(__builtin_convertvector(h, Words) << 16); }
  static Halves narrow(Floats v) {
    const Words w = (Words)v;
    Words h = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    h = (w & 0x7fffffff) > splat(0x7f800000u) ? splat(0x7fc0u) : h;
    return __builtin_convertvector(h, Halves);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
struct BFloat16 : BFloat16Base {
  static constexpr int kPack = 2;
  static constexpr bool kRough = true;
  static Words key_words(const void* from) { return simd::load<Words>(from); }
  static Words key_words(const void* from, int64_t n) { return load_bytes<Words>(from, n * 2); }
  static Words value_words(const void* even, const void* odd) {
    return interleave(simd::load<Halves>(even), simd::load<Halves>(odd), Lanes{});
  }
  static Words value_words(const void* even, const void* odd, int64_t n) {
    return interleave(load_bytes<Halves>(even, n * 2), load_bytes<Halves>(odd, n * 2), Lanes{});
  }
  template <int... I>
  static Words interleave(Halves even, Halves odd, std::integer_sequence<int, I...>) {
    const Words order = {uint32_t(I | (I + 2 * kLanes) << 16)...};  // an element of each in every word
    return (Words)_mm512_permutex2var_epi16(_mm512_castsi256_si512((__m256i)even), (__m512i)order,
                                            _mm512_castsi256_si512((__m256i)odd));
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
struct BFloat16 : BFloat16Base, SingleWords<BFloat16> {
  using BFloat16Base::load;
};
#endif

}  // namespace simd
