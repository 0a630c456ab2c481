#pragma once

namespace trackbed {

// Instruction levels for which kernels are compiled. Every processor of the architecture supports `baseline` (SSE2 on
// x86-64, NEON on arm64).
enum class Isa { baseline, avx2, avx512 };

// The widest level that both this processor and this build support.
Isa best_isa();

}  // namespace trackbed
