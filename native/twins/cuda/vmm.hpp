// Lookup of address ranges that cuMemAddressReserve has reserved.
#pragma once

#include <cstdint>

namespace gdrkit::twin::cuda {

// Find the reserved range that contains this address, and store its base and length. Return false if there is none.
bool find_reservation(std::uint64_t address, std::uint64_t* base, std::uint64_t* length_bytes);

} // namespace gdrkit::twin::cuda
