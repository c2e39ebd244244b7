// Address handles (AH): the path to the destination of a datagram.
#pragma once

#include <memory>

#include "ibverbs/protection_domain.hpp"

namespace gdrkit::twin::verbs {

// The path and the protection domain of an address handle. A posted request has a weak reference to its
// AddressVector. If the address handle is destroyed before the request is sent, the request fails.
struct AddressVector {
    ProtectionDomain* domain = nullptr;
    ibv_ah_attr path{};
};

struct AddressHandle {
    ibv_ah public_ah{};
    std::shared_ptr<const AddressVector> impl;
};

inline AddressHandle* get_address_handle(ibv_ah* ah) {
    return reinterpret_cast<AddressHandle*>(ah);
}

} // namespace gdrkit::twin::verbs
