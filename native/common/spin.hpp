// The function that a thread calls between two checks of memory for which it spins.
#pragma once

namespace gdrkit {

// Tells the processor that this thread spins, so that its other hardware thread runs faster.
inline void pause_processor() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace gdrkit
