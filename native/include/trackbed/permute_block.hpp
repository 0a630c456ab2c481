#pragma once

#include <cstddef>
#include <cstdint>

#include "trackbed/isa.hpp"
#include "trackbed/permutation.hpp"

namespace trackbed {

// permute(permutation, positions[i]) for `count` positions; `images` may be `positions`.
// Requires: positions in [0, size).
using PermuteBlock = void (*)(const Permutation& permutation, const std::int64_t* positions, std::int64_t* images,
                              std::size_t count);

// Implementation for `level`; levels not in this build fall back to the baseline.
PermuteBlock permute_block_at(Isa level);

}  // namespace trackbed
