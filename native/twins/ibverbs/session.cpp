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

constexpr FaultPoint make_errno_point(std::string_view name) {
    return {name, FaultKind::errno_value};
}

constexpr FaultPoint make_status_point(std::string_view name) {
    return {name, FaultKind::status, IBV_WC_TM_RNDV_INCOMPLETE}; // the largest status code
}

// Return the fault point, changed so that a rule can name one NIC (nic=NAME).
constexpr FaultPoint allow_nic_rules(FaultPoint point) {
    point.has_nic = true;
    return point;
}

// Return the fault point, changed so that a rule can have status=0: the request completes with success and moves no
// bytes.
constexpr FaultPoint allow_success(FaultPoint point) {
    point.code_min = IBV_WC_SUCCESS;
    return point;
}

// These are all implemented functions that can fail, and the fault points of a completion (wc.*). The list includes
// functions that are not exported symbols, because clients call them through the tables of function pointers in a
// context. A request checks its point wc.X before the transfer of its bytes, and wc.X.landed after it.
constexpr std::array fault_points = {
    make_errno_point("_ibv_query_gid_ex"),
    make_errno_point("_ibv_query_gid_table"),
    make_errno_point("ibv_alloc_pd"),
    make_errno_point("ibv_attach_mcast"),
    make_errno_point("ibv_close_device"),
    make_errno_point("ibv_create_ah"),
    make_errno_point("ibv_create_ah_from_wc"),
    make_errno_point("ibv_close_xrcd"),
    make_errno_point("ibv_create_comp_channel"),
    make_errno_point("ibv_create_cq"),
    make_errno_point("ibv_create_qp"),
    make_errno_point("ibv_create_qp_ex"),
    make_errno_point("ibv_create_srq"),
    make_errno_point("ibv_create_srq_ex"),
    make_errno_point("ibv_dealloc_pd"),
    make_errno_point("ibv_dereg_mr"),
    make_errno_point("ibv_destroy_ah"),
    make_errno_point("ibv_destroy_comp_channel"),
    make_errno_point("ibv_destroy_cq"),
    make_errno_point("ibv_destroy_qp"),
    make_errno_point("ibv_destroy_srq"),
    make_errno_point("ibv_detach_mcast"),
    make_errno_point("ibv_fork_init"),
    make_errno_point("ibv_get_async_event"),
    make_errno_point("ibv_get_cq_event"),
    make_errno_point("ibv_get_device_list"),
    make_errno_point("ibv_get_pkey_index"),
    make_errno_point("ibv_init_ah_from_wc"),
    make_errno_point("ibv_modify_qp"),
    make_errno_point("ibv_modify_srq"),
    make_errno_point("ibv_open_device"),
    make_errno_point("ibv_open_qp"),
    make_errno_point("ibv_open_xrcd"),
    make_errno_point("ibv_query_device"),
    make_errno_point("ibv_query_gid"),
    make_errno_point("ibv_query_gid_type"),
    make_errno_point("ibv_query_pkey"),
    make_errno_point("ibv_query_port"),
    make_errno_point("ibv_query_qp"),
    make_errno_point("ibv_query_srq"),
    allow_nic_rules(make_errno_point("ibv_reg_dmabuf_mr")),
    allow_nic_rules(make_errno_point("ibv_reg_mr")),
    make_errno_point("ibv_reg_mr_iova"),
    make_errno_point("ibv_reg_mr_iova2"),
    make_errno_point("ibv_resize_cq"),
    make_errno_point("ibv_rereg_mr"),
    make_errno_point("ibv_alloc_dm"),
    make_errno_point("ibv_alloc_mw"),
    make_errno_point("ibv_alloc_parent_domain"),
    make_errno_point("ibv_alloc_td"),
    make_errno_point("ibv_bind_mw"),
    make_errno_point("ibv_create_cq_ex"),
    make_errno_point("ibv_dealloc_mw"),
    make_errno_point("ibv_wr_complete"),
    make_errno_point("ibv_dealloc_td"),
    make_errno_point("ibv_free_dm"),
    make_errno_point("ibv_reg_dm_mr"),
    make_errno_point("ibv_query_device_ex"),
    make_errno_point("ibv_query_rt_values_ex"),
    make_errno_point("ibv_poll_cq"),
    make_errno_point("ibv_post_recv"),
    make_errno_point("ibv_post_send"),
    make_errno_point("ibv_post_srq_recv"),
    make_errno_point("ibv_req_notify_cq"),
    allow_success(allow_nic_rules(make_status_point("wc.rdma_read"))),
    allow_nic_rules(make_status_point("wc.rdma_read.landed")),
    allow_success(allow_nic_rules(make_status_point("wc.rdma_write"))),
    allow_nic_rules(make_status_point("wc.rdma_write.landed")),
    make_status_point("wc.send"),
    make_status_point("wc.send.landed"),
};

// Rules for fault points with these prefixes belong to this twin: it refuses an unknown name, and other twins ignore
// the rules.
constexpr std::array<std::string_view, 3> point_prefixes = {"ibv_", "_ibv_", "wc."};

// Read the configuration and the fault plan. Return an error text, or an empty string if both are valid.
std::string load_session() {
    record_use(UsedApi::verbs);
    const std::string fault_plan_error = load_faults(fault_points, point_prefixes);
    return config().error.empty() ? fault_plan_error : config().error;
}

} // namespace

const std::string& start_session() {
    // The text is never destroyed, because a thread of a queue pair may read it while the process exits.
    static const std::string* const error_text = new std::string(load_session());
    return *error_text;
}

std::optional<int> find_injected_fault(std::string_view point, std::span<const std::string_view> nics) {
    start_session();
    return twin::find_injected_fault(point, nics);
}

std::optional<int> find_injected_fault(FaultSite* site, std::span<const std::string_view> nics) {
    start_session();
    return site->find_injected_fault(nics);
}

} // namespace gdrkit::twin::verbs
