// The ibv_query_* functions of devices, ports, GIDs and partition keys.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "ibverbs/context.hpp"
#include "ibverbs/datagram_frame.hpp"
#include "ibverbs/device.hpp"
#include "ibverbs/device_clock.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Port attributes in the encoding of the InfiniBand specification (PortInfo): 4 lanes, 25 Gbit/s per lane, and the
// physical state LinkUp.
constexpr std::uint8_t width_4x = 2;
constexpr std::uint8_t speed_edr = 32;
constexpr std::uint8_t link_up = 5;

bool is_valid_port(const ibv_context* context, std::uint32_t port_num) {
    return is_alive("ibv_context", get_context(context)) && port_num == 1;
}

void fill_gid_entry(const Device& device, std::uint32_t index, ibv_gid_entry* entry) {
    *entry = {};
    entry->gid = device.gid;
    entry->gid_index = index;
    entry->port_num = 1;
    entry->gid_type = get_gid_type(index);
}

// Copy an entry to a client whose verbs.h declares ibv_gid_entry with `entry_size` bytes. Fields of a later header,
// which the twin does not know, become zero.
void copy_gid_entry(const ibv_gid_entry& entry, void* client_entry, std::size_t entry_size) {
    std::memset(client_entry, 0, entry_size);
    std::memcpy(client_entry, &entry, std::min(entry_size, sizeof entry));
}

} // namespace

ibv_device_attr make_device_attributes(const Device& device) {
    ibv_device_attr attr{};
    std::snprintf(attr.fw_ver, sizeof attr.fw_ver, "0.1.0");
    std::memcpy(&attr.node_guid, device.guid.data(), device.guid.size());
    std::memcpy(&attr.sys_image_guid, device.guid.data(), device.guid.size());
    attr.max_mr_size = 1ULL << 47;
    attr.page_size_cap = 0xfffff000U; // bit n: pages of 2^n bytes, so all sizes from 4 KiB to 2 GiB
    // No vendor has this vendor id, because the twin is not a vendor's device.
    attr.vendor_id = 0xffffff;
    attr.hw_ver = 1;
    attr.max_qp = 4096;
    attr.max_qp_wr = 16384;
    attr.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN |
                            IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                            IBV_DEVICE_N_NOTIFY_CQ | IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_XRC;
    attr.max_sge = 32;
    attr.max_sge_rd = 32;
    attr.max_cq = 65536;
    attr.max_cqe = 1 << 20;
    attr.max_mr = 1 << 20;
    attr.max_mw = 1 << 16;
    attr.max_pd = 65536;
    attr.max_qp_rd_atom = 16;
    attr.max_res_rd_atom = 65536;
    attr.max_qp_init_rd_atom = 16;
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_srq = 65536;
    attr.max_srq_wr = 16384;
    attr.max_srq_sge = 32;
    // These are the limits of Soft-RoCE (rxe). Soft-RoCE counts the members of a group per device, and the twin counts
    // them per domain (emulated machine).
    attr.max_mcast_grp = 8192;
    attr.max_mcast_qp_attach = max_multicast_members;
    attr.max_total_mcast_qp_attach = 8192 * max_multicast_members;
    attr.max_ah = 1 << 20;
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = 15; // 4.096 us * 2^15 = 134 ms
    attr.phys_port_cnt = 1;
    return attr;
}

ibv_port_attr make_port_attributes() {
    ibv_port_attr attr{};
    attr.state = IBV_PORT_ACTIVE;
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = IBV_MTU_4096;
    attr.gid_tbl_len = gid_table_length;
    attr.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    attr.max_msg_sz = max_message_bytes;
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    attr.active_width = width_4x;
    attr.active_speed = speed_edr;
    attr.phys_state = link_up;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET;
    attr.flags = IBV_QPF_GRH_REQUIRED;
    return attr;
}

int query_port_extended(ibv_context* context, std::uint8_t port_num, ibv_port_attr* port_attr, std::size_t length) {
    if (const auto fault = find_injected_fault("ibv_query_port")) {
        return *fault;
    }
    if (!is_valid_port(context, port_num)) {
        return EINVAL;
    }
    const ibv_port_attr attr = make_port_attributes();
    std::memset(static_cast<void*>(port_attr), 0, length);
    std::memcpy(static_cast<void*>(port_attr), &attr, std::min(length, sizeof attr));
    return 0;
}

int query_device_extended(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attr,
                          std::size_t length) {
    if (const auto fault = find_injected_fault("ibv_query_device_ex")) {
        return *fault;
    }
    if (!is_alive("ibv_context", get_context(context)) || (input != nullptr && input->comp_mask != 0) ||
        length < offsetof(ibv_device_attr_ex, comp_mask) + sizeof attr->comp_mask) {
        return EINVAL;
    }
    ibv_device_attr_ex attributes{};
    attributes.orig_attr = make_device_attributes(*get_context(context)->device);
    attributes.device_cap_flags_ex = attributes.orig_attr.device_cap_flags;
    attributes.completion_timestamp_mask = device_clock_mask;
    attributes.max_dm_size = max_device_memory_bytes;
    attributes.hca_core_clock = device_clock_khz;
    attributes.phys_port_cnt_ex = 1;
    std::memset(static_cast<void*>(attr), 0, length);
    std::memcpy(static_cast<void*>(attr), &attributes, std::min(length, sizeof attributes));
    return 0;
}

int query_real_time_values(ibv_context* context, ibv_values_ex* values) {
    if (const auto fault = find_injected_fault("ibv_query_rt_values_ex")) {
        return *fault;
    }
    if (!is_alive("ibv_context", get_context(context))) {
        return EINVAL;
    }
    // As with mlx5, the mask on return tells which values were read, and the clock is in cycles.
    values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
    if (values->comp_mask != 0) {
        values->raw_clock = {0, static_cast<long>(read_device_cycles())};
    }
    return 0;
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

int ibv_query_device(ibv_context* context, ibv_device_attr* device_attr) {
    if (const auto fault = find_injected_fault("ibv_query_device")) {
        return *fault;
    }
    if (!is_alive("ibv_context", get_context(context))) {
        return EINVAL;
    }
    *device_attr = make_device_attributes(*get_context(context)->device);
    return 0;
}

int ibv_query_port(ibv_context* context, std::uint8_t port_num, _compat_ibv_port_attr* port_attr) {
    return query_port_extended(context, port_num, reinterpret_cast<ibv_port_attr*>(port_attr), compat_port_attr_bytes);
}

int ibv_query_gid(ibv_context* context, std::uint8_t port_num, int index, ibv_gid* gid) {
    if (const auto fault = find_injected_fault("ibv_query_gid")) {
        return fail_minus1(*fault);
    }
    if (!is_valid_port(context, port_num) || index < 0 || index >= gid_table_length) {
        return fail_minus1(EINVAL);
    }
    // As in libibverbs, an empty entry is a GID of zeros.
    *gid = index < gid_count ? get_context(context)->device->gid : ibv_gid{};
    return 0;
}

int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port_num, std::uint32_t gid_index, ibv_gid_entry* entry,
                      std::uint32_t flags, std::size_t entry_size) {
    if (const auto fault = find_injected_fault("_ibv_query_gid_ex")) {
        return *fault;
    }
    if (!is_valid_port(context, port_num) || gid_index >= gid_table_length || flags != 0 || entry_size == 0) {
        return EINVAL;
    }
    if (gid_index >= gid_count) {
        return ENODATA;
    }
    ibv_gid_entry gid_entry;
    fill_gid_entry(*get_context(context)->device, gid_index, &gid_entry);
    copy_gid_entry(gid_entry, entry, entry_size);
    return 0;
}

ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t max_entries, std::uint32_t flags,
                             std::size_t entry_size) {
    if (const auto fault = find_injected_fault("_ibv_query_gid_table")) {
        return -*fault;
    }
    if (!is_valid_port(context, 1) || flags != 0 || entry_size == 0 || max_entries < gid_count) {
        return -EINVAL;
    }
    for (std::uint32_t index = 0; index < gid_count; ++index) {
        ibv_gid_entry gid_entry;
        fill_gid_entry(*get_context(context)->device, index, &gid_entry);
        copy_gid_entry(gid_entry, reinterpret_cast<char*>(entries) + index * entry_size, entry_size);
    }
    return gid_count;
}

int ibv_query_pkey(ibv_context* context, std::uint8_t port_num, int index, __be16* pkey) {
    if (const auto fault = find_injected_fault("ibv_query_pkey")) {
        return fail_minus1(*fault);
    }
    if (!is_valid_port(context, port_num) || index != 0) {
        return fail_minus1(EINVAL);
    }
    *pkey = default_pkey;
    return 0;
}

int ibv_get_pkey_index(ibv_context* context, std::uint8_t port_num, __be16 pkey) {
    if (const auto fault = find_injected_fault("ibv_get_pkey_index")) {
        return fail_minus1(*fault);
    }
    return is_valid_port(context, port_num) && pkey == default_pkey ? 0 : fail_minus1(EINVAL);
}

// Implements ibv_query_gid_type. The function is not in the public header, but pyverbs and the rdma-core tools import
// it under the private symbol version of their rdma-core release. The type is 0 for RoCE v1 (and InfiniBand) and 1 for
// RoCE v2, as in sysfs.
[[gnu::visibility("default")]] int gdrkit_query_gid_type(ibv_context* context, std::uint8_t port_num,
                                                         unsigned int index, int* type) {
    if (const auto fault = find_injected_fault("ibv_query_gid_type")) {
        return fail_minus1(*fault);
    }
    if (!is_valid_port(context, port_num) || index >= gid_table_length) {
        return fail_minus1(EINVAL);
    }
    // As in libibverbs, an empty entry has the type 0.
    *type = index < gid_count && get_gid_type(index) == IBV_GID_TYPE_ROCE_V2 ? 1 : 0;
    return 0;
}

// Export gdrkit_query_gid_type as ibv_query_gid_type with the version IBVERBS_PRIVATE_<number>. `separator` is "@@" for
// the default version and "@" for the others. The included file, which the build generates, uses the macro once for
// each number.
#define GDRKIT_PRIVATE_VERSION(number, separator)                                                                      \
    [[gnu::alias("gdrkit_query_gid_type"), gnu::visibility("default")]] int gdrkit_query_gid_type_##number(            \
        ibv_context*, std::uint8_t, unsigned int, int*);                                                               \
    __asm__(".symver gdrkit_query_gid_type_" #number ", ibv_query_gid_type" separator "IBVERBS_PRIVATE_" #number)

#include "private_numbers.inc"

} // extern "C"
