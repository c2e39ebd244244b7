// Protection domains: a queue pair may only use memory regions of its own domain.
#pragma once

#include <atomic>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct ProtectionDomain {
    ibv_pd abi{};
    Context* context = nullptr;
    // Number of regions and queue pairs. A domain with children cannot be deallocated.
    std::atomic<int> children{0};
};

inline ProtectionDomain* domain_of(ibv_pd* pd) {
    return reinterpret_cast<ProtectionDomain*>(pd);
}

} // namespace gdrkit::twin::verbs
