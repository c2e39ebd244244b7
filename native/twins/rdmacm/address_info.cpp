// rdma_getaddrinfo translates host and service names to addresses for rdma_create_ep, with getaddrinfo of the C
// library.

#include <netdb.h>

#include <cstdlib>
#include <cstring>

#include "rdmacm/address.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Return a copy that rdma_freeaddrinfo frees, or nullptr if no memory is left.
sockaddr* copy_address(const sockaddr* address, socklen_t length) {
    auto* const copy = static_cast<sockaddr*>(std::malloc(length));
    if (copy != nullptr) {
        std::memcpy(copy, address, length);
    }
    return copy;
}

// Convert the hints of rdma_getaddrinfo to hints for getaddrinfo.
addrinfo make_hints(const rdma_addrinfo* hints) {
    addrinfo socket_hints{};
    if (hints == nullptr) {
        return socket_hints;
    }
    socket_hints.ai_flags = ((hints->ai_flags & rai_passive) != 0 ? AI_PASSIVE : 0) |
                            ((hints->ai_flags & rai_numeric_host) != 0 ? AI_NUMERICHOST : 0);
    socket_hints.ai_family = (hints->ai_flags & rai_family) != 0 || hints->ai_family != 0 ? hints->ai_family : 0;
    const bool is_datagram =
        hints->ai_qp_type == IBV_QPT_UD || hints->ai_port_space == RDMA_PS_UDP || hints->ai_port_space == RDMA_PS_IPOIB;
    const bool has_type = hints->ai_qp_type != 0 || hints->ai_port_space != 0;
    socket_hints.ai_socktype = is_datagram ? SOCK_DGRAM : (has_type ? SOCK_STREAM : 0);
    return socket_hints;
}

// Set the queue pair type and the port space of the entry as in the hints. If the hints have none, derive them from the
// socket type.
void fill_types(rdma_addrinfo* entry, const rdma_addrinfo* hints, int socket_type) {
    const bool is_datagram = socket_type == SOCK_DGRAM;
    entry->ai_qp_type =
        hints != nullptr && hints->ai_qp_type != 0 ? hints->ai_qp_type : (is_datagram ? IBV_QPT_UD : IBV_QPT_RC);
    entry->ai_port_space = hints != nullptr && hints->ai_port_space != 0
                               ? hints->ai_port_space
                               : static_cast<int>(is_datagram ? RDMA_PS_UDP : RDMA_PS_TCP);
}

// Store the resolved address: as the source of a passive entry (RAI_PASSIVE, for a listener), as the destination of an
// active one. An active entry also gets the source address of the hints. Return false if no memory is left.
bool fill_addresses(rdma_addrinfo* entry, const rdma_addrinfo* hints, const sockaddr* address, socklen_t length) {
    const bool is_passive = (entry->ai_flags & rai_passive) != 0;
    (is_passive ? entry->ai_src_len : entry->ai_dst_len) = length;
    sockaddr*& resolved_address = is_passive ? entry->ai_src_addr : entry->ai_dst_addr;
    resolved_address = copy_address(address, length);
    if (!is_passive && hints != nullptr && hints->ai_src_len != 0 && hints->ai_src_addr != nullptr) {
        entry->ai_src_len = hints->ai_src_len;
        entry->ai_src_addr = copy_address(hints->ai_src_addr, hints->ai_src_len);
        return resolved_address != nullptr && entry->ai_src_addr != nullptr;
    }
    return resolved_address != nullptr;
}

// Make one entry of the result list. Return nullptr if no memory is left.
rdma_addrinfo* make_entry(const rdma_addrinfo* hints, const sockaddr* address, socklen_t length, int socket_type,
                          const char* canonical_name) {
    auto* const entry = static_cast<rdma_addrinfo*>(std::calloc(1, sizeof(rdma_addrinfo)));
    if (entry == nullptr) {
        return nullptr;
    }
    entry->ai_flags = hints == nullptr ? 0 : hints->ai_flags;
    entry->ai_family = address->sa_family;
    fill_types(entry, hints, socket_type);
    const bool is_passive = (entry->ai_flags & rai_passive) != 0;
    char*& entry_name = is_passive ? entry->ai_src_canonname : entry->ai_dst_canonname;
    entry_name = canonical_name == nullptr ? nullptr : strdup(canonical_name);
    if (!fill_addresses(entry, hints, address, length)) {
        rdma_freeaddrinfo(entry);
        return nullptr;
    }
    return entry;
}

// Look up the names with getaddrinfo, and store a list with an entry for each address. Return 0 or an error code of
// getaddrinfo.
int look_up_names(const char* node, const char* service, const rdma_addrinfo* hints, rdma_addrinfo** result) {
    const addrinfo converted_hints = make_hints(hints);
    addrinfo* addresses = nullptr;
    if (const int error = getaddrinfo(node, service, &converted_hints, &addresses); error != 0) {
        return error;
    }
    // Leave out addresses for other socket types, for example raw sockets, because the connection manager has no such
    // port space.
    rdma_addrinfo** list_end = result; // the null pointer that ends the list
    int error = 0;
    for (const addrinfo* item = addresses; item != nullptr && error == 0; item = item->ai_next) {
        if (item->ai_socktype != SOCK_STREAM && item->ai_socktype != SOCK_DGRAM) {
            continue;
        }
        *list_end = make_entry(hints, item->ai_addr, item->ai_addrlen, item->ai_socktype, item->ai_canonname);
        error = *list_end == nullptr ? EAI_MEMORY : 0;
        list_end = *list_end == nullptr ? list_end : &(*list_end)->ai_next;
    }
    freeaddrinfo(addresses);
    if (error != 0) {
        rdma_freeaddrinfo(*result);
        *result = nullptr;
    }
    return error;
}

} // namespace

extern "C" {

int rdma_getaddrinfo(const char* node, const char* service, const rdma_addrinfo* hints, rdma_addrinfo** res) {
    if (const int fault = find_injected_error("rdma_getaddrinfo"); fault != 0) {
        errno = fault;
        return EAI_SYSTEM;
    }
    if (res == nullptr || (node == nullptr && service == nullptr && hints == nullptr)) {
        errno = EINVAL;
        return -1;
    }
    *res = nullptr;
    if (node != nullptr || service != nullptr) {
        return look_up_names(node, service, hints, res);
    }
    // If the program gives no names, return one entry with the addresses of the hints.
    auto* const entry = static_cast<rdma_addrinfo*>(std::calloc(1, sizeof(rdma_addrinfo)));
    if (entry == nullptr) {
        return EAI_MEMORY;
    }
    entry->ai_flags = hints->ai_flags;
    entry->ai_family = hints->ai_family;
    fill_types(entry, hints, make_hints(hints).ai_socktype);
    const auto copy_if_set = [](const sockaddr* hint_address, socklen_t hint_length, sockaddr** entry_address,
                                socklen_t* entry_length) {
        if (hint_address == nullptr || hint_length == 0) {
            return true;
        }
        *entry_length = hint_length;
        *entry_address = copy_address(hint_address, hint_length);
        return *entry_address != nullptr;
    };
    if (!copy_if_set(hints->ai_src_addr, hints->ai_src_len, &entry->ai_src_addr, &entry->ai_src_len) ||
        !copy_if_set(hints->ai_dst_addr, hints->ai_dst_len, &entry->ai_dst_addr, &entry->ai_dst_len)) {
        rdma_freeaddrinfo(entry);
        return EAI_MEMORY;
    }
    *res = entry;
    return 0;
}

void rdma_freeaddrinfo(rdma_addrinfo* res) {
    while (res != nullptr) {
        rdma_addrinfo* const next = res->ai_next;
        std::free(res->ai_src_addr);
        std::free(res->ai_dst_addr);
        std::free(res->ai_src_canonname);
        std::free(res->ai_dst_canonname);
        std::free(res->ai_route);
        std::free(res->ai_connect);
        std::free(res);
        res = next;
    }
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
