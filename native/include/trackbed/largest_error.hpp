#pragma once

#include <cstddef>

#include "trackbed/isa.hpp"

namespace trackbed {

// Which dataset is furthest behind its share after `step` samples: the first d for which
// weights[d] * step - counts[d] is largest, in doubles, product and difference rounded apart.
// Requires: `size` weights and counts, size >= 1, no NaN. O(K).
using LargestError = std::size_t (*)(const double* weights, const double* counts, std::size_t size, double step);

// The implementation for `level`; a level that this build lacks falls back to the baseline.
LargestError largest_error_at(Isa level);

}  // namespace trackbed
