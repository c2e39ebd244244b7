// Virtual memory management: address ranges, physical allocations and the mappings between them.
#pragma once

#include <cstdint>

namespace gdrkit::twin::cuda {

// The reserved range that holds this address. False when there is none.
bool find_reservation(std::uint64_t address, std::uint64_t* base, std::uint64_t* length_bytes);

} // namespace gdrkit::twin::cuda
