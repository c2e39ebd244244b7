// The table of registered buffers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cufile/cuda.hpp"

namespace gdrkit::twin::cufile {

// Return whether a buffer is registered at `base`. If so, check that the range of a transfer is within this buffer.
// `location` is the memory that is at `base` now. Throw CufileError: invalid_mapping_range if the range exceeds the
// buffer, cuda_pointer_invalid if the memory was freed after the registration.
bool check_registered(std::uint64_t base, std::uint64_t offset_bytes, std::size_t length_bytes,
                      const MemoryLocation& location);
// Drop all registrations. cuFileDriverClose calls this function.
void drop_buffers();

} // namespace gdrkit::twin::cufile
