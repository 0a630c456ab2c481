// Compiled once per instruction level, into the namespace TRACKBED_LEVEL. Must not use inline library code: the linker
// could pick a copy that was compiled here at a high level for all callers.

#include "trackbed/draw_targets.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace trackbed::TRACKBED_LEVEL {

namespace {

constexpr std::size_t kWords = MersenneTwister::kWords;
constexpr std::size_t kShift = 397;

// The recurrence of MT19937, from the highest bit of one word and the lower bits of the next.
std::uint32_t twist(std::uint32_t high, std::uint32_t low) {
  const std::uint32_t joined = (high & 0x80000000U) | (low & 0x7fffffffU);
  return joined >> 1 ^ ((0U - (low & 1U)) & 0x9908b0dfU);
}

}  // namespace

// Regenerates all words, in branch-free loops that the compiler vectorizes.
void regenerate(MersenneTwister& twister) {
  std::uint32_t* const words = twister.words;
  for (std::size_t i = 0; i < kWords - kShift; ++i) {
    words[i] = words[i + kShift] ^ twist(words[i], words[i + 1]);
  }
  for (std::size_t i = kWords - kShift; i < kWords - 1; ++i) {
    words[i] = words[i + kShift - kWords] ^ twist(words[i], words[i + 1]);
  }
  words[kWords - 1] = words[kShift - 1] ^ twist(words[kWords - 1], words[0]);
  twister.next = 0;
}

namespace {

std::uint32_t temper(std::uint32_t word) {
  word ^= word >> 11;
  word ^= word << 7 & 0x9d2c5680U;
  word ^= word << 15 & 0xefc60000U;
  return word ^ word >> 18;
}

std::uint64_t draw32(MersenneTwister& twister) {
  if (twister.next == kWords) {
    regenerate(twister);
  }
  return temper(twister.words[twister.next++]);
}

// Mask of ones up to the highest set bit of `number`, which is above 0.
std::uint64_t mask_of(std::uint64_t number) { return ~std::uint64_t{0} >> __builtin_clzll(number); }

}  // namespace

std::size_t draw_narrow(MersenneTwister& twister, std::uint64_t last, std::uint32_t* targets) {
  if (twister.next == kWords) {
    regenerate(twister);
  }
  std::uint32_t tempered[kWords];
  for (std::size_t word = twister.next; word < kWords; ++word) {
    tempered[word] = temper(twister.words[word]);
  }
  std::size_t count = 0;
  std::size_t word = twister.next;
  while (word < kWords && last > 0) {
    const auto mask = static_cast<std::uint32_t>(mask_of(last));
    const std::uint64_t lowest = mask / 2 + std::uint64_t{1};  // lowest element with this mask
#if defined(__AVX512F__)
    // Sixteen tries at once, while each is accepted or rejected alike for all of the next sixteen elements.
    const __m512i masks = _mm512_set1_epi32(static_cast<int>(mask));
    while (word + 16 <= kWords && last >= lowest + 16) {
      const __m512i tries = _mm512_and_si512(_mm512_loadu_si512(tempered + word), masks);
      const __mmask16 small = _mm512_cmple_epu32_mask(tries, _mm512_set1_epi32(static_cast<int>(last - 16)));
      if (_mm512_cmple_epu32_mask(tries, _mm512_set1_epi32(static_cast<int>(last))) != small) {
        break;
      }
      _mm512_storeu_si512(targets + count, _mm512_maskz_compress_epi32(small, tries));
      const auto kept = static_cast<unsigned>(__builtin_popcount(small));
      count += kept;
      last -= kept;
      word += 16;
    }
    const std::size_t stop = word + 16 <= kWords && last >= lowest + 16 ? word + 16 : kWords;
#else
    const std::size_t stop = kWords;
#endif
    // Every try is stored, but kept only if it is small enough: no branch to mispredict.
    for (; word < stop && last >= lowest; ++word) {
      const std::uint32_t target = tempered[word] & mask;
      targets[count] = target;
      const std::uint64_t kept = target <= last ? 1 : 0;
      count += kept;
      last -= kept;
    }
  }
  twister.next = static_cast<std::uint32_t>(word);
  return count;
}

void draw_wide(MersenneTwister& twister, std::uint64_t last, std::uint64_t* targets, std::size_t count) {
  for (std::size_t k = 0; k < count; ++k, --last) {
    const std::uint64_t mask = mask_of(last);
    do {
      const std::uint64_t high = draw32(twister);
      targets[k] = (high << 32 | draw32(twister)) & mask;
    } while (targets[k] > last);
  }
}

}  // namespace trackbed::TRACKBED_LEVEL
