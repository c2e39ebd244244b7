// The fault points of the twin, its control interface (control/control.h), and its ELF note.

#include "rdmacm/session.hpp"

#pragma GCC visibility push(default)
#include "control/control.h"
#pragma GCC visibility pop

#include <array>
#include <cstdio>

#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/ledger.hpp"
#include "model/note.hpp"

GDRKIT_TWIN_NOTE("rdmacm twin of gdrkit")

namespace gdrkit::twin::rdmacm {
namespace {

constexpr FaultPoint point(std::string_view name) {
    return {name, FaultKind::errno_value};
}

// Every function that can fail. rdma_getaddrinfo returns EAI_SYSTEM and sets errno.
constexpr std::array points = {
    point("rdma_accept"),          point("rdma_ack_cm_event"),
    point("rdma_bind_addr"),       point("rdma_connect"),
    point("rdma_create_ep"),       point("rdma_create_event_channel"),
    point("rdma_create_id"),       point("rdma_create_qp"),
    point("rdma_create_qp_ex"),    point("rdma_create_srq"),
    point("rdma_create_srq_ex"),   point("rdma_destroy_id"),
    point("rdma_disconnect"),      point("rdma_establish"),
    point("rdma_get_cm_event"),    point("rdma_get_devices"),
    point("rdma_get_remote_ece"),  point("rdma_get_request"),
    point("rdma_getaddrinfo"),     point("rdma_init_qp_attr"),
    point("rdma_join_multicast"),  point("rdma_join_multicast_ex"),
    point("rdma_leave_multicast"), point("rdma_listen"),
    point("rdma_migrate_id"),      point("rdma_notify"),
    point("rdma_reject"),          point("rdma_reject_ece"),
    point("rdma_resolve_addr"),    point("rdma_resolve_route"),
    point("rdma_set_local_ece"),   point("rdma_set_option"),
};

// The twin counts calls of rsocket functions, but a plan cannot name these functions, because their names have no
// common prefix.
constexpr std::array<std::string_view, 1> prefixes = {"rdma_"};

} // namespace

const std::string& session_error() {
    // Never destroyed, because the thread of the manager may run while the process exits.
    static const auto* const error = [] {
        std::string fault_error = load_faults(points, prefixes);
        return new std::string(config().error.empty() ? std::move(fault_error) : config().error);
    }();
    return *error;
}

int find_injected_error(std::string_view function) {
    return session_error().empty() ? find_injected_fault(function).value_or(0) : EINVAL;
}

} // namespace gdrkit::twin::rdmacm

using namespace gdrkit::twin;

extern "C" {

int gdrkit_twin_ledger(char* buffer, std::size_t size_bytes) {
    rdmacm::session_error();
    const std::string json = "{\"library\":\"rdmacm\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"seed\":" + std::to_string(config().seed) +
                             ",\"delayed\":" + format_delayed_calls_json() + "}";
    return std::snprintf(buffer, size_bytes, "%s", json.c_str());
}

int gdrkit_twin_faults(const char* plan) {
    rdmacm::session_error();
    const std::string error = replace_faults(plan);
    if (error.empty()) {
        return 0;
    }
    std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error.c_str());
    return EINVAL;
}

} // extern "C"
