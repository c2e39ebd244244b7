// Protection domains: a queue pair may only use memory regions of its own domain.
#pragma once

#include <atomic>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct ProtectionDomain {
    ibv_pd abi{};
    Context* context = nullptr;
    // Number of live memory regions and queue pairs of the domain. A domain that has any cannot be deallocated.
    std::atomic<int> child_count{0};
};

inline ProtectionDomain* domain_of(ibv_pd* pd) {
    return reinterpret_cast<ProtectionDomain*>(pd);
}

} // namespace gdrkit::twin::verbs
