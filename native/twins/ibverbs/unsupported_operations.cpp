// Context operations that the twin does not implement. Clients call them through tables of function pointers of many
// types. A template generates a failing function of the right type for each entry of the tables.
#include <cerrno>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {
namespace {

template <typename Function> struct Unsupported;

template <typename... Arguments> struct Unsupported<int (*)(Arguments...)> {
    static int fail(Arguments...) { return EOPNOTSUPP; }
};

template <typename Object, typename... Arguments> struct Unsupported<Object* (*)(Arguments...)> {
    static Object* fail(Arguments...) {
        errno = EOPNOTSUPP;
        return nullptr;
    }
};

template <typename... Arguments> struct Unsupported<void (*)(Arguments...)> {
    static void fail(Arguments...) { errno = EOPNOTSUPP; }
};

template <typename... Functions> void fill_entries(Functions&... entries) {
    ((entries = Unsupported<Functions>::fail), ...);
}

} // namespace

void fill_unsupported(verbs_context* context) {
    verbs_context& extended_ops = *context;
    fill_entries(
        extended_ops.query_port, extended_ops.advise_mr, extended_ops.alloc_null_mr, extended_ops.read_counters,
        extended_ops.attach_counters_point_flow, extended_ops.create_counters, extended_ops.destroy_counters,
        extended_ops.reg_dm_mr, extended_ops.alloc_dm, extended_ops.free_dm, extended_ops.modify_flow_action_esp,
        extended_ops.destroy_flow_action, extended_ops.create_flow_action_esp, extended_ops.modify_qp_rate_limit,
        extended_ops.alloc_parent_domain, extended_ops.dealloc_td, extended_ops.alloc_td, extended_ops.modify_cq,
        extended_ops.post_srq_ops, extended_ops.destroy_rwq_ind_table, extended_ops.create_rwq_ind_table,
        extended_ops.destroy_wq, extended_ops.modify_wq, extended_ops.create_wq, extended_ops.query_rt_values,
        extended_ops.create_cq_ex, extended_ops.query_device_ex, extended_ops.ibv_destroy_flow,
        extended_ops.ABI_placeholder2, extended_ops.ibv_create_flow, extended_ops.ABI_placeholder1,
        extended_ops.open_qp, extended_ops.create_qp_ex, extended_ops.get_srq_num, extended_ops.create_srq_ex,
        extended_ops.open_xrcd, extended_ops.close_xrcd);
    ibv_context_ops& ops = extended_ops.context.ops;
    fill_entries(ops._compat_query_device, ops._compat_query_port, ops._compat_alloc_pd, ops._compat_dealloc_pd,
                 ops._compat_reg_mr, ops._compat_rereg_mr, ops._compat_dereg_mr, ops.alloc_mw, ops.bind_mw,
                 ops.dealloc_mw, ops._compat_create_cq, ops.poll_cq, ops.req_notify_cq, ops._compat_cq_event,
                 ops._compat_resize_cq, ops._compat_destroy_cq, ops._compat_create_srq, ops._compat_modify_srq,
                 ops._compat_query_srq, ops._compat_destroy_srq, ops.post_srq_recv, ops._compat_create_qp,
                 ops._compat_query_qp, ops._compat_modify_qp, ops._compat_destroy_qp, ops.post_send, ops.post_recv,
                 ops._compat_create_ah, ops._compat_destroy_ah, ops._compat_attach_mcast, ops._compat_detach_mcast,
                 ops._compat_async_event);
}

} // namespace gdrkit::twin::verbs
