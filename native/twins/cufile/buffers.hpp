// The buffers that are registered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cufile/cuda.hpp"

namespace gdrkit::twin::cufile {

// Throws Refused (invalid_mapping_range) when the memory is that of a registered buffer and the range leaves it, and
// (cuda_pointer_invalid) when the buffer's memory was freed meanwhile.
void check_registered(std::uint64_t base, std::uint64_t offset_bytes, std::size_t length_bytes, const Place& place);
// The driver was closed.
void forget_buffers();

} // namespace gdrkit::twin::cufile
