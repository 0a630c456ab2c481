#pragma once

namespace trackbed {

// Instruction levels that kernels are compiled for. `baseline` is what every processor of the
// architecture has (SSE2 on x86-64, NEON on arm64).
enum class Isa { baseline, avx2, avx512 };

// The widest level that this processor and this build have.
Isa best_isa();

}  // namespace trackbed
