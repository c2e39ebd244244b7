// Opens an RDMA device, and chooses its port and the GID of its connections.
#include "verbs/device.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>

#include "verbs/error.hpp"

namespace gdrkit::verbs {

namespace {

// The result of ibv_get_device_list(). The destructor frees it.
struct DeviceList {
    int count = 0;
    ibv_device** devices = ibv_get_device_list(&count);
    DeviceList() {
        if (devices == nullptr) {
            throw Error("ibv_get_device_list", last_errno());
        }
    }
    DeviceList(const DeviceList&) = delete;
    DeviceList& operator=(const DeviceList&) = delete;
    ~DeviceList() { ibv_free_device_list(devices); }
};

bool gid_starts_with(const ibv_gid& gid, std::initializer_list<std::uint8_t> bytes) {
    return std::equal(bytes.begin(), bytes.end(), gid.raw);
}

} // namespace

std::string format_gid(const ibv_gid& gid) {
    static constexpr char digits[] = "0123456789abcdef";
    std::string text;
    for (std::size_t index = 0; index < sizeof gid.raw; ++index) {
        if (index != 0 && index % 2 == 0) {
            text += ':';
        }
        text += digits[gid.raw[index] >> 4];
        text += digits[gid.raw[index] & 15];
    }
    return text;
}

bool parse_gid(const std::string& text, ibv_gid& gid) {
    if (text.size() != 39) { // 32 digits and 7 colons.
        return false;
    }
    std::size_t digit_index = 0;
    for (std::size_t index = 0; index < text.size(); ++index) {
        const char character = text[index];
        if (index % 5 == 4) {
            if (character != ':') {
                return false;
            }
            continue;
        }
        const int digit_value = character >= '0' && character <= '9'   ? character - '0'
                                : character >= 'a' && character <= 'f' ? character - 'a' + 10
                                                                       : -1;
        if (digit_value < 0) {
            return false;
        }
        auto& byte = gid.raw[digit_index / 2];
        byte = static_cast<std::uint8_t>(digit_index % 2 == 0 ? digit_value << 4 : byte | digit_value);
        ++digit_index;
    }
    return true;
}

std::vector<std::string> Device::list_names() {
    const DeviceList device_list;
    std::vector<std::string> names;
    for (int index = 0; index < device_list.count; ++index) {
        names.emplace_back(ibv_get_device_name(device_list.devices[index]));
    }
    return names;
}

Device::Device(const std::string& name) : name_(name) {
    const DeviceList device_list;
    ibv_device** const list_end = device_list.devices + device_list.count;
    ibv_device** const matching_device = std::find_if(
        device_list.devices, list_end, [&](ibv_device* device) { return name == ibv_get_device_name(device); });
    if (matching_device == list_end) {
        throw Error("no such RDMA device", ENODEV, name);
    }
    context_.reset(ibv_open_device(*matching_device));
    if (!context_) {
        throw Error("ibv_open_device", last_errno(), name);
    }
    choose_port();
    choose_gid();
    domain_.reset(ibv_alloc_pd(context_.get()));
    if (!domain_) {
        throw Error("ibv_alloc_pd", last_errno(), name);
    }
}

void Device::choose_port() {
    ibv_device_attr device_attributes{};
    if (const int error_number = ibv_query_device(context_.get(), &device_attributes); error_number != 0) {
        throw Error("ibv_query_device", error_number, name_);
    }
    reads_max_ = static_cast<std::uint8_t>(std::clamp(device_attributes.max_qp_init_rd_atom, 1, 16));
    for (int port = 1; port <= device_attributes.phys_port_cnt; ++port) {
        if (ibv_query_port(context_.get(), static_cast<std::uint8_t>(port), &port_attributes_) == 0 &&
            port_attributes_.state == IBV_PORT_ACTIVE) {
            port_ = static_cast<std::uint8_t>(port);
            return;
        }
    }
    throw Error("no active port", ENETDOWN, name_);
}

// Chooses the GID in the same way as gdrkit.verbs.Nic. On Ethernet the order of preference is: RoCE v2 with an IPv4
// address, with an IPv6 address, with a link-local address, then RoCE v1. On InfiniBand the first GID is chosen.
void Device::choose_gid() {
    // The elements are three flags (not RoCE v2, not IPv4, link-local) and the index. The smallest rank is the best.
    using Rank = std::tuple<bool, bool, bool, int>;
    bool has_gid = false;
    Rank best_rank;
    for (int index = 0; index < port_attributes_.gid_tbl_len; ++index) {
        ibv_gid_entry entry{};
        if (ibv_query_gid_ex(context_.get(), port_, static_cast<std::uint32_t>(index), &entry, 0) != 0) {
            continue; // This entry of the GID table is empty.
        }
        Rank rank{false, false, false, index};
        if (port_attributes_.link_layer == IBV_LINK_LAYER_ETHERNET) {
            // An IPv4 address is in the GID ::ffff:a.b.c.d. A link-local address begins with fe80.
            const bool is_ipv4 = gid_starts_with(entry.gid, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff});
            rank = {entry.gid_type != IBV_GID_TYPE_ROCE_V2, !is_ipv4, gid_starts_with(entry.gid, {0xfe, 0x80}), index};
        }
        if (!has_gid || rank < best_rank) {
            has_gid = true;
            best_rank = rank;
            gid_index_ = index;
            gid_ = entry.gid;
        }
    }
    if (!has_gid) {
        throw Error("the port has no GID", ENODATA, name_);
    }
}

} // namespace gdrkit::verbs
