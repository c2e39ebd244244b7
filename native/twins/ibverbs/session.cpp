// The start-up of the verbs twin at its first call, and its fault points: the functions and completions that a fault
// plan (a file of rules) can make fail.

#include "ibverbs/session.hpp"

#include <array>

#include "ibverbs/abi.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"
#include "model/usage.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr FaultPoint errno_point(std::string_view name) {
    return {name, FaultKind::errno_value};
}

constexpr FaultPoint status_point(std::string_view name) {
    return {name, FaultKind::status, IBV_WC_TM_RNDV_INCOMPLETE};
}

// Return the fault point, changed so that a rule can name one NIC (nic=NAME).
constexpr FaultPoint of_nic(FaultPoint point) {
    point.has_nic = true;
    return point;
}

// Every implemented function that can fail, and the points of a completion (wc.*). The list includes functions that are
// not exported symbols, because clients call them through the tables of function pointers in a context.
constexpr std::array points = {
    errno_point("_ibv_query_gid_ex"),
    errno_point("_ibv_query_gid_table"),
    errno_point("ibv_alloc_pd"),
    errno_point("ibv_attach_mcast"),
    errno_point("ibv_close_device"),
    errno_point("ibv_create_ah"),
    errno_point("ibv_create_ah_from_wc"),
    errno_point("ibv_close_xrcd"),
    errno_point("ibv_create_comp_channel"),
    errno_point("ibv_create_cq"),
    errno_point("ibv_create_qp"),
    errno_point("ibv_create_qp_ex"),
    errno_point("ibv_create_srq"),
    errno_point("ibv_create_srq_ex"),
    errno_point("ibv_dealloc_pd"),
    errno_point("ibv_dereg_mr"),
    errno_point("ibv_destroy_ah"),
    errno_point("ibv_destroy_comp_channel"),
    errno_point("ibv_destroy_cq"),
    errno_point("ibv_destroy_qp"),
    errno_point("ibv_destroy_srq"),
    errno_point("ibv_detach_mcast"),
    errno_point("ibv_fork_init"),
    errno_point("ibv_get_async_event"),
    errno_point("ibv_get_cq_event"),
    errno_point("ibv_get_device_list"),
    errno_point("ibv_get_pkey_index"),
    errno_point("ibv_init_ah_from_wc"),
    errno_point("ibv_modify_qp"),
    errno_point("ibv_modify_srq"),
    errno_point("ibv_open_device"),
    errno_point("ibv_open_qp"),
    errno_point("ibv_open_xrcd"),
    errno_point("ibv_query_device"),
    errno_point("ibv_query_gid"),
    errno_point("ibv_query_gid_type"),
    errno_point("ibv_query_pkey"),
    errno_point("ibv_query_port"),
    errno_point("ibv_query_qp"),
    errno_point("ibv_query_srq"),
    of_nic(errno_point("ibv_reg_dmabuf_mr")),
    of_nic(errno_point("ibv_reg_mr")),
    errno_point("ibv_reg_mr_iova"),
    errno_point("ibv_reg_mr_iova2"),
    errno_point("ibv_resize_cq"),
    errno_point("ibv_rereg_mr"),
    errno_point("ibv_alloc_dm"),
    errno_point("ibv_alloc_mw"),
    errno_point("ibv_alloc_parent_domain"),
    errno_point("ibv_alloc_td"),
    errno_point("ibv_bind_mw"),
    errno_point("ibv_create_cq_ex"),
    errno_point("ibv_dealloc_mw"),
    errno_point("ibv_wr_complete"),
    errno_point("ibv_dealloc_td"),
    errno_point("ibv_free_dm"),
    errno_point("ibv_reg_dm_mr"),
    errno_point("ibv_query_device_ex"),
    errno_point("ibv_query_rt_values_ex"),
    errno_point("ibv_poll_cq"),
    errno_point("ibv_post_recv"),
    errno_point("ibv_post_send"),
    errno_point("ibv_post_srq_recv"),
    errno_point("ibv_req_notify_cq"),
    of_nic(status_point("wc.rdma_read")),
    of_nic(status_point("wc.rdma_read.landed")),
    of_nic(status_point("wc.rdma_write")),
    of_nic(status_point("wc.rdma_write.landed")),
    status_point("wc.send"),
    status_point("wc.send.landed"),
};

constexpr std::array<std::string_view, 3> prefixes = {"ibv_", "_ibv_", "wc."};

std::string load_session() {
    record_use(UsedApi::verbs);
    const std::string fault_error = load_faults(points, prefixes);
    return config().error.empty() ? fault_error : config().error;
}

} // namespace

const std::string& session_error() {
    // Never destroyed, because a thread of a queue pair may read it while the process exits.
    static const std::string* const error = new std::string(load_session());
    return *error;
}

std::optional<int> injected_fault(std::string_view point, std::span<const std::string_view> nics) {
    session_error();
    return twin::injected_fault(point, nics);
}

std::optional<int> injected_fault(FaultSite* site, std::span<const std::string_view> nics) {
    session_error();
    return site->injected_fault(nics);
}

} // namespace gdrkit::twin::verbs
