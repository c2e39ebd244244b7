// Context operations that the twin does not implement. Clients call them through tables of function pointers, so each
// needs a function of its own type; templates generate it from the type of the table's entry.
#include <cerrno>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {
namespace {

template <typename Function> struct Unsupported;

template <typename... Arguments> struct Unsupported<int (*)(Arguments...)> {
    static int function(Arguments...) { return EOPNOTSUPP; }
};

template <typename Object, typename... Arguments> struct Unsupported<Object* (*)(Arguments...)> {
    static Object* function(Arguments...) {
        errno = EOPNOTSUPP;
        return nullptr;
    }
};

template <typename... Arguments> struct Unsupported<void (*)(Arguments...)> {
    static void function(Arguments...) { errno = EOPNOTSUPP; }
};

template <typename... Functions> void fill(Functions&... entries) {
    ((entries = Unsupported<Functions>::function), ...);
}

} // namespace

void fill_unsupported(verbs_context* extended) {
    verbs_context& x = *extended;
    fill(x.query_port, x.advise_mr, x.alloc_null_mr, x.read_counters, x.attach_counters_point_flow, x.create_counters,
         x.destroy_counters, x.reg_dm_mr, x.alloc_dm, x.free_dm, x.modify_flow_action_esp, x.destroy_flow_action,
         x.create_flow_action_esp, x.modify_qp_rate_limit, x.alloc_parent_domain, x.dealloc_td, x.alloc_td, x.modify_cq,
         x.post_srq_ops, x.destroy_rwq_ind_table, x.create_rwq_ind_table, x.destroy_wq, x.modify_wq, x.create_wq,
         x.query_rt_values, x.create_cq_ex, x.query_device_ex, x.ibv_destroy_flow, x.ABI_placeholder2,
         x.ibv_create_flow, x.ABI_placeholder1, x.open_qp, x.create_qp_ex, x.get_srq_num, x.create_srq_ex, x.open_xrcd,
         x.close_xrcd);
    ibv_context_ops& ops = x.context.ops;
    fill(ops._compat_query_device, ops._compat_query_port, ops._compat_alloc_pd, ops._compat_dealloc_pd,
         ops._compat_reg_mr, ops._compat_rereg_mr, ops._compat_dereg_mr, ops.alloc_mw, ops.bind_mw, ops.dealloc_mw,
         ops._compat_create_cq, ops.poll_cq, ops.req_notify_cq, ops._compat_cq_event, ops._compat_resize_cq,
         ops._compat_destroy_cq, ops._compat_create_srq, ops._compat_modify_srq, ops._compat_query_srq,
         ops._compat_destroy_srq, ops.post_srq_recv, ops._compat_create_qp, ops._compat_query_qp, ops._compat_modify_qp,
         ops._compat_destroy_qp, ops.post_send, ops.post_recv, ops._compat_create_ah, ops._compat_destroy_ah,
         ops._compat_attach_mcast, ops._compat_detach_mcast, ops._compat_async_event);
}

} // namespace gdrkit::twin::verbs
