// What grammars bar, in logits: one pass over the bitmask, which touches only logits that are barred. The same memory
// written by fancy indexing takes five times as long once another core holds half of it.

#include <cstdint>
#include <cstring>
#include <limits>

// Rows i with masks[i] >= 0 get -inf where row masks[i] of `bits`, `bytes` wide, has no bit.
extern "C" void bar(float* logits, const int64_t* masks, const uint8_t* bits, int64_t rows, int64_t vocabulary,
                    int64_t bytes) {
#pragma omp parallel for schedule(static) if (rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    if (masks[row] < 0) continue;
    for (int64_t first = 0; first < vocabulary; first += 32) {
      uint32_t allowed;
      std::memcpy(&allowed, bits + masks[row] * bytes + first / 8, sizeof allowed);
      if (allowed == ~uint32_t(0)) continue;
      float* logit = logits + row * vocabulary + first;
      const int64_t count = vocabulary - first < 32 ? vocabulary - first : 32;
      for (int64_t i = 0; i < count; i++)
        logit[i] = allowed >> i & 1 ? logit[i] : -std::numeric_limits<float>::infinity();
    }
  }
}
