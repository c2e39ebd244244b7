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

void fill_unsupported(verbs_context* extended) {
    verbs_context& extension = *extended;
    fill_entries(extension.query_port, extension.advise_mr, extension.alloc_null_mr, extension.read_counters,
                 extension.attach_counters_point_flow, extension.create_counters, extension.destroy_counters,
                 extension.reg_dm_mr, extension.alloc_dm, extension.free_dm, extension.modify_flow_action_esp,
                 extension.destroy_flow_action, extension.create_flow_action_esp, extension.modify_qp_rate_limit,
                 extension.alloc_parent_domain, extension.dealloc_td, extension.alloc_td, extension.modify_cq,
                 extension.post_srq_ops, extension.destroy_rwq_ind_table, extension.create_rwq_ind_table,
                 extension.destroy_wq, extension.modify_wq, extension.create_wq, extension.query_rt_values,
                 extension.create_cq_ex, extension.query_device_ex, extension.ibv_destroy_flow,
                 extension.ABI_placeholder2, extension.ibv_create_flow, extension.ABI_placeholder1, extension.open_qp,
                 extension.create_qp_ex, extension.get_srq_num, extension.create_srq_ex, extension.open_xrcd,
                 extension.close_xrcd);
    ibv_context_ops& ops = extension.context.ops;
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
