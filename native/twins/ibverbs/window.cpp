// Implements memory windows. The rules are taken from Soft-RoCE (rxe_mw.c), which cites the InfiniBand specification. A
// window of type 2 belongs to the queue pair that bound it (type 2B).

#include "ibverbs/window.hpp"

#include "ibverbs/handle.hpp"
#include "ibverbs/key_table.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr unsigned remote_write_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
constexpr unsigned allowed_window_flags =
    remote_write_flags | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED;

struct WindowHandle {
    ibv_mw public_mw{};
    std::shared_ptr<Window> impl;
};

WindowHandle* get_mw_handle(ibv_mw* mw) {
    return reinterpret_cast<WindowHandle*>(mw);
}

// Unbind the window from its region, if it is bound. The caller holds the lock of the key table.
void unbind(Window* window) {
    if (window->region != nullptr) {
        --window->region->window_count;
        window->region.reset();
    }
}

// Return whether the region permits the binding. The caller holds the lock of the key table.
bool region_permits_binding(const KeyTable& table, const WindowBinding& binding) {
    const Region& region = *binding.region;
    const auto region_entry = table.by_lkey.find(region.lkey);
    return region_entry != table.by_lkey.end() && region_entry->second == binding.region && !region.refuses_windows &&
           is_same_protection_domain(region.domain, binding.window->domain) && region.permits(IBV_ACCESS_MW_BIND) &&
           ((binding.access & remote_write_flags) == 0 || region.permits(IBV_ACCESS_LOCAL_WRITE)) &&
           region.covers(binding.address, binding.length_bytes);
}

// Return whether the window may be bound as the request says. A window of type 1 may be bound again without an
// invalidation, and an empty range unbinds it. A window of type 2 must be invalidated first. The caller holds the lock
// of the key table.
bool is_valid_binding(const KeyTable& table, const WindowBinding& binding, const ProtectionDomain* qp_domain) {
    const Window& window = *binding.window;
    const auto window_entry = table.windows.find(get_window_index(window.rkey));
    if (window_entry == table.windows.end() || window_entry->second != binding.window ||
        get_window_index(binding.rkey) != get_window_index(window.rkey) ||
        (binding.access & ~allowed_window_flags) != 0 || !is_same_protection_domain(window.domain, qp_domain)) {
        return false;
    }
    if (window.type == IBV_MW_TYPE_1) {
        return (binding.access & IBV_ACCESS_ZERO_BASED) == 0 &&
               (binding.length_bytes == 0 || (binding.region != nullptr && region_permits_binding(table, binding)));
    }
    return window.region == nullptr && binding.region != nullptr && binding.length_bytes > 0 &&
           region_permits_binding(table, binding);
}

} // namespace

std::shared_ptr<const WindowBinding> make_binding(ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info& info) {
    if (!is_alive("ibv_mw", mw) || (info.mr != nullptr && !is_alive("ibv_mr", info.mr))) {
        return nullptr;
    }
    return std::make_shared<WindowBinding>(WindowBinding{get_mw_handle(mw)->impl,
                                                         info.mr != nullptr ? get_mr_handle(info.mr)->impl : nullptr,
                                                         rkey, info.addr, info.length, info.mw_access_flags});
}

bool bind_window(const WindowBinding& binding, const ProtectionDomain* qp_domain, std::uint32_t qp_num) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    if (!is_valid_binding(table, binding, qp_domain)) {
        return false;
    }
    Window& window = *binding.window;
    unbind(&window);
    window.rkey = binding.rkey;
    window.address = binding.address;
    window.length_bytes = binding.length_bytes;
    window.access = binding.access;
    window.qp_num = qp_num;
    if (binding.length_bytes > 0) {
        window.region = binding.region;
        ++window.region->window_count;
    }
    return true;
}

bool invalidate_window(std::uint32_t rkey, const ProtectionDomain* qp_domain, std::uint32_t qp_num) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    const auto window_entry = table.windows.find(get_window_index(rkey));
    if (window_entry == table.windows.end()) {
        return false;
    }
    Window& window = *window_entry->second;
    if (window.rkey != rkey || window.type != IBV_MW_TYPE_2 || window.region == nullptr || window.qp_num != qp_num ||
        !is_same_protection_domain(window.domain, qp_domain)) {
        return false;
    }
    unbind(&window);
    return true;
}

std::shared_ptr<Region> find_window_region(std::uint32_t rkey, const ProtectionDomain* domain, std::uint32_t qp_num,
                                           unsigned required_access, std::uint64_t* address, std::uint64_t size_bytes) {
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    const auto window_entry = table.windows.find(get_window_index(rkey));
    if (window_entry == table.windows.end()) {
        return nullptr;
    }
    const Window& window = *window_entry->second;
    if (window.rkey != rkey || window.region == nullptr || !is_same_protection_domain(window.domain, domain) ||
        (window.type == IBV_MW_TYPE_2 && window.qp_num != qp_num) ||
        (window.access & required_access) != required_access) {
        return nullptr;
    }
    const std::uint64_t window_begin = (window.access & IBV_ACCESS_ZERO_BASED) != 0 ? 0 : window.address;
    if (*address < window_begin || *address - window_begin > window.length_bytes ||
        size_bytes > window.length_bytes - (*address - window_begin)) {
        return nullptr;
    }
    *address = window.address + (*address - window_begin);
    return window.region;
}

ibv_mw* alloc_window(ibv_pd* pd, ibv_mw_type type) {
    if (const auto fault = find_injected_fault("ibv_alloc_mw")) {
        return fail_null(*fault);
    }
    if (!is_alive("ibv_pd", pd) || (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)) {
        return fail_null(EINVAL);
    }
    ProtectionDomain* const domain = get_domain(pd);
    auto* const handle = new WindowHandle;
    handle->impl = std::make_shared<Window>(domain, type);
    {
        KeyTable& table = key_table();
        std::lock_guard lock(table.mutex);
        // An rkey consists of an index (upper 24 bits) and a key byte. A bind request may choose any key byte, so no
        // region may have one of the 256 rkeys with the window's index.
        const auto is_index_used = [&table](std::uint32_t index) {
            for (std::uint32_t low_key_byte = 0; low_key_byte <= 0xff; ++low_key_byte) {
                if (table.by_rkey.contains(index << 8 | low_key_byte)) {
                    return true;
                }
            }
            return false;
        };
        do {
            handle->impl->rkey = draw_unused_key(&table);
        } while (is_index_used(get_window_index(handle->impl->rkey)));
        table.windows[get_window_index(handle->impl->rkey)] = handle->impl;
    }
    handle->public_mw.context = pd->context;
    handle->public_mw.pd = pd;
    handle->public_mw.rkey = handle->impl->rkey;
    handle->public_mw.handle = make_next_handle();
    handle->public_mw.type = type;
    ++domain->child_count;
    track("ibv_mw", handle);
    return &handle->public_mw;
}

int dealloc_window(ibv_mw* mw) {
    if (const auto fault = find_injected_fault("ibv_dealloc_mw")) {
        return *fault;
    }
    WindowHandle* const handle = get_mw_handle(mw);
    if (!is_alive("ibv_mw", handle)) {
        return EINVAL;
    }
    const std::shared_ptr<Window> window = handle->impl;
    if (!retire("ibv_mw", handle)) {
        return EINVAL;
    }
    handle->impl.reset();
    KeyTable& table = key_table();
    std::lock_guard lock(table.mutex);
    table.windows.erase(get_window_index(window->rkey));
    unbind(window.get());
    --window->domain->child_count;
    return 0;
}

// ibv_bind_mw, an inline function in the client's verbs.h, has checked the type and, in recent versions of verbs.h, the
// domain.
int bind_window_type_1(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* bind) {
    if (const auto fault = find_injected_fault("ibv_bind_mw")) {
        return *fault;
    }
    if (!is_alive("ibv_qp", qp) || !is_alive("ibv_mw", mw) ||
        (bind->bind_info.mw_access_flags & IBV_ACCESS_ZERO_BASED) != 0) {
        return EINVAL;
    }
    ibv_send_wr wr{};
    ibv_send_wr* bad_wr = nullptr;
    wr.opcode = IBV_WR_BIND_MW;
    wr.wr_id = bind->wr_id;
    wr.send_flags = bind->send_flags;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info = bind->bind_info;
    const int error = post_list(get_qp_handle(qp), &wr, &bad_wr);
    if (error == 0) {
        mw->rkey = wr.bind_mw.rkey;
    }
    return error;
}

} // namespace gdrkit::twin::verbs
