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

constexpr FaultPoint make_fault_point(std::string_view name) {
    return {name, FaultKind::errno_value};
}

// The rdma_* functions that can fail. A plan names the errno that the function reports. rdma_getaddrinfo then returns
// EAI_SYSTEM and sets errno.
constexpr std::array fault_points = {
    make_fault_point("rdma_accept"),          make_fault_point("rdma_ack_cm_event"),
    make_fault_point("rdma_bind_addr"),       make_fault_point("rdma_connect"),
    make_fault_point("rdma_create_ep"),       make_fault_point("rdma_create_event_channel"),
    make_fault_point("rdma_create_id"),       make_fault_point("rdma_create_qp"),
    make_fault_point("rdma_create_qp_ex"),    make_fault_point("rdma_create_srq"),
    make_fault_point("rdma_create_srq_ex"),   make_fault_point("rdma_destroy_id"),
    make_fault_point("rdma_disconnect"),      make_fault_point("rdma_establish"),
    make_fault_point("rdma_get_cm_event"),    make_fault_point("rdma_get_devices"),
    make_fault_point("rdma_get_remote_ece"),  make_fault_point("rdma_get_request"),
    make_fault_point("rdma_getaddrinfo"),     make_fault_point("rdma_init_qp_attr"),
    make_fault_point("rdma_join_multicast"),  make_fault_point("rdma_join_multicast_ex"),
    make_fault_point("rdma_leave_multicast"), make_fault_point("rdma_listen"),
    make_fault_point("rdma_migrate_id"),      make_fault_point("rdma_notify"),
    make_fault_point("rdma_reject"),          make_fault_point("rdma_reject_ece"),
    make_fault_point("rdma_resolve_addr"),    make_fault_point("rdma_resolve_route"),
    make_fault_point("rdma_set_local_ece"),   make_fault_point("rdma_set_option"),
};

// Every name with this prefix in a plan must be a fault point of this twin. rsocket functions (rsend, rpoll, ...) have
// no common prefix that the other twins could skip, so a plan cannot name them; the twin only counts their calls.
constexpr std::array<std::string_view, 1> point_prefixes = {"rdma_"};

} // namespace

const std::string& start_session() {
    // The text is never destroyed, because the thread of the connection manager may still read it while the process
    // exits.
    static const auto* const error_text = [] {
        std::string fault_error = load_faults(fault_points, point_prefixes);
        return new std::string(config().error.empty() ? std::move(fault_error) : config().error);
    }();
    return *error_text;
}

int find_injected_error(std::string_view function_name) {
    return start_session().empty() ? find_injected_fault(function_name).value_or(0) : EINVAL;
}

} // namespace gdrkit::twin::rdmacm

using namespace gdrkit::twin;

extern "C" {

int gdrkit_twin_ledger(char* buffer, std::size_t size_bytes) {
    rdmacm::start_session();
    const std::string json = "{\"library\":\"rdmacm\",\"handles\":" + ledger_json() +
                             ",\"calls\":" + format_calls_json() + ",\"seed\":" + std::to_string(config().seed) +
                             ",\"delayed\":" + format_delayed_calls_json() + "}";
    return std::snprintf(buffer, size_bytes, "%s", json.c_str());
}

int gdrkit_twin_faults(const char* plan) {
    rdmacm::start_session();
    const std::string error_text = replace_faults(plan);
    if (error_text.empty()) {
        return 0;
    }
    std::fprintf(stderr, "gdrkit twin: fault plan: %s\n", error_text.c_str());
    return EINVAL;
}

} // extern "C"
