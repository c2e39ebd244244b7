// Protection domains: a queue pair may only use memory regions of its own domain.
#pragma once

#include <atomic>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct ProtectionDomain {
    ibv_pd public_pd{};
    Context* context = nullptr;
    // Number of live objects of the domain, for example memory regions and queue pairs. A domain with live objects
    // cannot be deallocated.
    std::atomic<int> child_count{0};
    // For a parent domain, the domain from which it was made: the objects of both may be used together. nullptr for
    // other domains.
    ProtectionDomain* base = nullptr;
    // The thread domain of a parent domain, or nullptr.
    ibv_td* thread_domain = nullptr;
};

inline ProtectionDomain* get_domain(ibv_pd* pd) {
    return reinterpret_cast<ProtectionDomain*>(pd);
}

// Return whether an object of one domain may use an object of the other. A parent domain counts as its base domain.
inline bool is_same_protection_domain(const ProtectionDomain* left, const ProtectionDomain* right) {
    return (left->base != nullptr ? left->base : left) == (right->base != nullptr ? right->base : right);
}

// Return whether `pd` is a live parent domain.
bool is_parent_domain(ibv_pd* pd);

} // namespace gdrkit::twin::verbs
