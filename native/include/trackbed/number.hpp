#pragma once

#include <cstdint>

namespace trackbed {

// Types of floating-point numbers in a buffer.
enum class Number : std::int64_t { float32, float64, bfloat16, float16 };

}  // namespace trackbed
