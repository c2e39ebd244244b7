// The implementations of ibv_post_send and ibv_post_recv. In verbs.h these are inline functions, which call the
// functions of this file through the context's table of operations.

#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {

int post_list(QueuePairHandle* handle, ibv_send_wr* list, ibv_send_wr** bad_wr) {
    if (handle->builder == nullptr) {
        return handle->impl->post_send(list, bad_wr);
    }
    handle->builder->lock.acquire();
    const int error = handle->impl->post_send(list, bad_wr);
    handle->builder->lock.release();
    return error;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr) {
    static FaultSite site("ibv_post_send");
    const auto fault = find_injected_fault(&site);
    const int error = fault ? *fault : is_alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    return post_list(get_qp_handle(qp), wr, bad_wr);
}

int post_receive(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr) {
    static FaultSite site("ibv_post_recv");
    const auto fault = find_injected_fault(&site);
    int error = fault ? *fault : is_alive("ibv_qp", qp) ? 0 : EINVAL;
    if (error != 0) {
        *bad_wr = wr;
        return error;
    }
    for (QueuePair& pair = *get_qp_handle(qp)->impl; wr != nullptr; wr = wr->next) {
        error = pair.post_receive(*wr);
        if (error != 0) {
            *bad_wr = wr;
            return error;
        }
    }
    return 0;
}

} // namespace gdrkit::twin::verbs
