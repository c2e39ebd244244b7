// rdma_set_option sets options of an rdma_cm_id. RDMA_OPTION_IB_PATH replaces rdma_resolve_route: the program supplies
// the path record.

#include <cstdlib>
#include <cstring>

#include "rdmacm/functions.hpp"
#include "rdmacm/identifier.hpp"
#include "rdmacm/ports.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// Copy the value of an option. Return false if `value` is null or its length is not the size of `Value`.
template <typename Value> bool read_value(const void* value, std::size_t length, Value* typed_value) {
    if (value == nullptr || length != sizeof *typed_value) {
        return false;
    }
    std::memcpy(typed_value, value, sizeof *typed_value);
    return true;
}

int set_id_option(Identifier* id, int option, const void* value, std::size_t length) {
    std::uint8_t ack_timeout = 0;
    int enable = 0;
    switch (option) {
    case option_tos:
        return read_value(value, length, &id->tos) ? 0 : EINVAL;
    case option_reuseaddr:
        if (!read_value(value, length, &enable) || (enable == 0 && id->state != State::idle)) {
            return EINVAL; // as in the kernel, the option can be cleared only before the identifier is bound
        }
        id->reuse_address = enable != 0;
        return 0;
    case option_afonly:
        if (!read_value(value, length, &enable) || (id->state != State::idle && id->state != State::bound)) {
            return EINVAL;
        }
        id->ipv6_only = enable != 0;
        return 0;
    case option_ack_timeout:
        // Only reliable connections have this timeout. Its field in the queue pair has five bits.
        if (!read_value(value, length, &ack_timeout) || is_datagram(*id) || ack_timeout > 31) {
            return EINVAL;
        }
        id->ack_timeout = ack_timeout;
        return 0;
    default:
        return ENOSYS;
    }
}

// Resolve the route with path records that the program got from a subnet administrator. The first record must connect
// the identifier's two GIDs. Everything else in the records is ignored: the route is the same as by rdma_resolve_route.
int set_path_records(Identifier* id, const void* value, std::size_t length) {
    if (value == nullptr || length == 0 || length % sizeof(ibv_path_data) != 0 || id->state != State::addr_resolved) {
        return EINVAL;
    }
    ibv_path_data first_record;
    std::memcpy(&first_record, value, sizeof first_record);
    if (!is_same_gid(first_record.path.dgid, id->remote_gid) ||
        !is_same_gid(first_record.path.sgid, id->local_gid->gid())) {
        return EINVAL;
    }
    if (const int error = resolve_route_now(id); error != 0) {
        return error;
    }
    id->state = State::route_resolved;
    queue_event(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return 0;
}

} // namespace

extern "C" int rdma_set_option(rdma_cm_id* id, int level, int optname, void* optval, std::size_t optlen) {
    return run_entry_with_errno("rdma_set_option", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        std::lock_guard lock(manager_mutex());
        if (level == option_level_id) {
            return set_id_option(identifier, optname, optval, optlen);
        }
        return level == option_level_ib && optname == option_ib_path ? set_path_records(identifier, optval, optlen)
                                                                     : ENOSYS;
    });
}

} // namespace gdrkit::twin::rdmacm
