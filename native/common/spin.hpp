// A pause for spin loops. A thread that waits for a change in memory calls it between two checks of the memory.
#pragma once

namespace gdrkit {

// Tells the processor that this thread spins, so that the other hardware thread of the core runs faster.
inline void pause_processor() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace gdrkit
