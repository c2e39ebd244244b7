#include "ibverbs/session.hpp"

#include <array>

#include "ibverbs/abi.hpp"
#include "model/config.hpp"
#include "model/fault.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr FaultPoint by_errno(std::string_view name) {
    return {name, FaultKind::errno_value};
}

constexpr FaultPoint by_status(std::string_view name) {
    return {name, FaultKind::status, IBV_WC_TM_RNDV_INCOMPLETE};
}

// Every function that can fail and is implemented. Five of them are no symbols (ibv_query_device_ex, ibv_poll_cq,
// ibv_post_*, ibv_req_notify_cq): clients reach them through the operations of a context.
constexpr std::array points = {
    by_errno("_ibv_query_gid_ex"),
    by_errno("_ibv_query_gid_table"),
    by_errno("ibv_alloc_pd"),
    by_errno("ibv_close_device"),
    by_errno("ibv_create_comp_channel"),
    by_errno("ibv_create_cq"),
    by_errno("ibv_create_qp"),
    by_errno("ibv_dealloc_pd"),
    by_errno("ibv_dereg_mr"),
    by_errno("ibv_destroy_comp_channel"),
    by_errno("ibv_destroy_cq"),
    by_errno("ibv_destroy_qp"),
    by_errno("ibv_fork_init"),
    by_errno("ibv_get_async_event"),
    by_errno("ibv_get_cq_event"),
    by_errno("ibv_get_device_list"),
    by_errno("ibv_get_pkey_index"),
    by_errno("ibv_modify_qp"),
    by_errno("ibv_open_device"),
    by_errno("ibv_query_device"),
    by_errno("ibv_query_gid"),
    by_errno("ibv_query_gid_type"),
    by_errno("ibv_query_pkey"),
    by_errno("ibv_query_port"),
    by_errno("ibv_query_qp"),
    by_errno("ibv_reg_dmabuf_mr"),
    by_errno("ibv_reg_mr"),
    by_errno("ibv_reg_mr_iova"),
    by_errno("ibv_reg_mr_iova2"),
    by_errno("ibv_query_device_ex"),
    by_errno("ibv_poll_cq"),
    by_errno("ibv_post_recv"),
    by_errno("ibv_post_send"),
    by_errno("ibv_req_notify_cq"),
    by_status("wc.rdma_read"),
    by_status("wc.rdma_read.landed"),
    by_status("wc.rdma_write"),
    by_status("wc.rdma_write.landed"),
    by_status("wc.send"),
    by_status("wc.send.landed"),
};

constexpr std::array<std::string_view, 3> prefixes = {"ibv_", "_ibv_", "wc."};

std::string begin() {
    const std::string fault_error = load_faults(points, prefixes);
    return config().error.empty() ? fault_error : config().error;
}

} // namespace

const std::string& session_error() {
    // Never destroyed: a thread of a queue pair may still ask while the process exits.
    static const std::string* const error = new std::string(begin());
    return *error;
}

std::optional<int> call(std::string_view point) {
    session_error();
    return hit(point);
}

std::optional<int> call(FaultSite* site) {
    session_error();
    return site->hit();
}

} // namespace gdrkit::twin::verbs
