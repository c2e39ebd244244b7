// Memory windows (MW): remotely accessible parts of memory regions. Requests of a queue pair bind and invalidate them.
#pragma once

#include <cstdint>
#include <memory>

#include "ibverbs/protection_domain.hpp"
#include "ibverbs/region.hpp"

namespace gdrkit::twin::verbs {

struct Window {
    Window(ProtectionDomain* domain, ibv_mw_type type) : domain(domain), type(type) {}

    ProtectionDomain* const domain;
    const ibv_mw_type type;

    // The lock of the key table protects the following members.
    std::uint32_t rkey = 0;
    // The region to which the window is bound, or nullptr.
    std::shared_ptr<Region> region;
    // Address of the window's first byte in the region.
    std::uint64_t address = 0;
    std::uint64_t length_bytes = 0;
    unsigned access = 0; // IBV_ACCESS_* flags
    // The queue pair that bound a window of type 2. Only requests to this queue pair may use the window.
    std::uint32_t qp_num = 0;
};

// The arguments of a bind request.
struct WindowBinding {
    std::shared_ptr<Window> window;
    std::shared_ptr<Region> region; // nullptr: unbind a window of type 1
    std::uint32_t rkey = 0;         // the new key, which has the upper 24 bits of the old key
    std::uint64_t address = 0;
    std::uint64_t length_bytes = 0;
    unsigned access = 0;
};

// Return the upper 24 bits of the key, which a bind request cannot change.
inline std::uint32_t get_window_index(std::uint32_t rkey) {
    return rkey >> 8;
}

// Copy the arguments of a bind request. Return nullptr if the window or the region is not alive.
std::shared_ptr<const WindowBinding> make_binding(ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info& info);

// Carry out a bind or invalidate request of the queue pair `qp_num`. Return false if the request is not allowed.
bool bind_window(const WindowBinding& binding, const ProtectionDomain* qp_domain, std::uint32_t qp_num);
bool invalidate_window(std::uint32_t rkey, const ProtectionDomain* qp_domain, std::uint32_t qp_num);

// Find the bound window with the key `rkey`. If a request to the queue pair `qp_num` may access `size_bytes` bytes from
// *address on in this window, return the region of the window, and replace *address, which counts from 0 in a
// zero-based window, by the address in the region. Else return nullptr.
std::shared_ptr<Region> find_window_region(std::uint32_t rkey, const ProtectionDomain* domain, std::uint32_t qp_num,
                                           unsigned required_access, std::uint64_t* address, std::uint64_t size_bytes);

// Functions for the tables of operations in a context.
ibv_mw* alloc_window(ibv_pd* pd, ibv_mw_type type);
int dealloc_window(ibv_mw* mw);
int bind_window_type_1(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind);

} // namespace gdrkit::twin::verbs
