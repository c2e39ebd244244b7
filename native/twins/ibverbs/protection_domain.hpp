// Protection domains: what a queue pair may touch are the regions of its own domain.
#pragma once

#include <atomic>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct ProtectionDomain {
    ibv_pd abi{};
    Context* context = nullptr;
    // Regions and queue pairs: a domain cannot be deallocated under them.
    std::atomic<int> children{0};
};

inline ProtectionDomain* find_domain(ibv_pd* pd) {
    return reinterpret_cast<ProtectionDomain*>(pd);
}

} // namespace gdrkit::twin::verbs
