// ibv_open_device and ibv_close_device, and the tables of operations of a context.

#include "ibverbs/context.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/window.hpp"
#include "ibverbs/xrc_domain.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Fill both tables of operations, in verbs_context and in its ibv_context: unsupported entries fail with EOPNOTSUPP.
void fill_operations(verbs_context* extended_ops) {
    fill_unsupported(extended_ops);
    extended_ops->query_port = query_port_extended;
    extended_ops->query_device_ex = query_device_extended;
    extended_ops->create_qp_ex = create_queue_pair_extended;
    extended_ops->open_qp = open_queue_pair;
    extended_ops->create_srq_ex = create_srq_extended;
    extended_ops->get_srq_num = get_srq_number;
    extended_ops->open_xrcd = open_xrc_domain;
    extended_ops->close_xrcd = close_xrc_domain;
    extended_ops->query_rt_values = query_real_time_values;
    extended_ops->create_cq_ex = create_extended_cq;
    extended_ops->alloc_dm = alloc_device_memory;
    extended_ops->free_dm = free_device_memory;
    extended_ops->reg_dm_mr = register_device_memory;
    extended_ops->alloc_td = alloc_thread_domain;
    extended_ops->dealloc_td = dealloc_thread_domain;
    extended_ops->alloc_parent_domain = alloc_parent_domain;
    extended_ops->sz = sizeof *extended_ops;
    ibv_context_ops& ops = extended_ops->context.ops;
    ops._compat_query_device = ibv_query_device;
    ops._compat_query_port = ibv_query_port;
    ops.alloc_mw = alloc_window;
    ops.dealloc_mw = dealloc_window;
    ops.bind_mw = bind_window_type_1;
    ops.poll_cq = poll_completions;
    ops.req_notify_cq = request_notification;
    ops.post_send = post_send;
    ops.post_recv = post_receive;
    ops.post_srq_recv = post_srq_receive;
}

} // namespace
} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

ibv_context* ibv_open_device(ibv_device* device) {
    if (const auto fault = find_injected_fault("ibv_open_device")) {
        return fail_null(*fault);
    }
    Device* const twin_device = find_device(device);
    if (twin_device == nullptr) {
        return fail_null(ENODEV);
    }
    auto context = std::make_unique<Context>();
    if (const int error = context->events.open(); error != 0) {
        return fail_null(error);
    }
    context->device = twin_device;
    fill_operations(&context->extended_context);
    ibv_context& public_context = context->extended_context.context;
    public_context.device = device;
    public_context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    // With hardware, cmd_fd is an open device file of the kernel driver (/dev/infiniband/uverbs*). The twin has no
    // kernel driver and opens /dev/null: a program can duplicate the descriptor, but a write or an ioctl fails.
    public_context.cmd_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (public_context.cmd_fd < 0) {
        return fail_null(errno);
    }
    public_context.async_fd = context->events.fd();
    public_context.num_comp_vectors = completion_vector_count;
    pthread_mutex_init(&public_context.mutex, nullptr);
    track("ibv_context", context.get());
    return context.release()->public_context();
}

int ibv_close_device(ibv_context* public_context) {
    if (const auto fault = find_injected_fault("ibv_close_device")) {
        return *fault;
    }
    Context* const context = get_context(public_context);
    if (!is_alive("ibv_context", context)) {
        return EINVAL;
    }
    if (!untrack("ibv_context", context)) {
        return EINVAL;
    }
    context->events.close();
    public_context->async_fd = -1;
    close(public_context->cmd_fd);
    public_context->cmd_fd = -1;
    // As in rdma-core, a context can be closed while objects exist that were created in it (man ibv_close_device), and
    // perftest does so. These objects refer to the context, so its memory is then never freed. The ledger
    // (model/ledger.hpp) still lists the objects as live.
    if (context->child_count == 0) {
        quarantine(std::shared_ptr<Context>(context));
    }
    return 0;
}

} // extern "C"
