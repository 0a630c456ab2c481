#include "trackbed/isa.hpp"

#include "trackbed/largest_error.hpp"

namespace trackbed {

namespace baseline {
std::size_t largest_error(const double*, const double*, std::size_t, double);
}
#if defined(__x86_64__)
namespace avx2 {
std::size_t largest_error(const double*, const double*, std::size_t, double);
}
namespace avx512 {
std::size_t largest_error(const double*, const double*, std::size_t, double);
}
#endif

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2")) {
    return Isa::avx2;
  }
#endif
  return Isa::baseline;
}

LargestError largest_error_at([[maybe_unused]] Isa level) {
#if defined(__x86_64__)
  if (level == Isa::avx512) {
    return avx512::largest_error;
  }
  if (level == Isa::avx2) {
    return avx2::largest_error;
  }
#endif
  return baseline::largest_error;
}

}  // namespace trackbed
