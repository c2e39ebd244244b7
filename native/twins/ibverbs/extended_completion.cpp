// Extended completion queues: ibv_create_cq_ex, and the functions in ibv_cq_ex that poll the queue and read
// completions.
#include <cstdio>
#include <cstdlib>

#include "ibverbs/completion.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

constexpr std::uint64_t timestamp_flags =
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
// Flags for VLAN tags, flow tags and tag matching are missing, because the device does not have these features.
constexpr std::uint64_t supported_wc_flags = IBV_WC_STANDARD_FLAGS | timestamp_flags;
constexpr std::uint32_t supported_comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
constexpr std::uint32_t supported_creation_flags =
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;

CompletionQueueHandle* get_extended_cq_handle(ibv_cq_ex* cq) {
    return get_cq_handle(ibv_cq_ex_to_cq(cq));
}

const Completion& get_current_completion(ibv_cq_ex* cq) {
    return get_extended_cq_handle(cq)->current_completion;
}

// Take the next completion from the queue. The ibv_wc_read_* functions then return its fields. Return 0, ENOENT (the
// queue is empty) or EIO (overrun).
int take_next_completion(ibv_cq_ex* cq) {
    CompletionQueueHandle* const handle = get_extended_cq_handle(cq);
    const int error = handle->impl->take(&handle->current_completion);
    if (error == 0) {
        cq->status = handle->current_completion.wc.status;
        cq->wr_id = handle->current_completion.wc.wr_id;
    }
    return error;
}

int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr* attr) {
    if (!is_alive("ibv_cq", cq) || attr->comp_mask != 0) {
        return EINVAL;
    }
    CompletionQueueHandle* const handle = get_extended_cq_handle(cq);
    handle->poll_lock.acquire();
    const int error = take_next_completion(cq);
    // A client must not call ibv_end_poll after a start that failed.
    handle->is_in_extended_poll = error == 0;
    if (error != 0) {
        handle->poll_lock.release();
    }
    return error;
}

// End the process if no poll was started: the functions of real providers would then read an undefined entry, or unlock
// a lock that is not held.
void require_started_poll(const CompletionQueueHandle& handle, const char* function) {
    if (!handle.is_in_extended_poll) {
        std::fprintf(stderr, "gdrkit twin: %s was called without a successful ibv_start_poll\n", function);
        std::abort();
    }
}

int next_poll(ibv_cq_ex* cq) {
    require_started_poll(*get_extended_cq_handle(cq), "ibv_next_poll");
    return take_next_completion(cq);
}

void end_poll(ibv_cq_ex* cq) {
    CompletionQueueHandle* const handle = get_extended_cq_handle(cq);
    require_started_poll(*handle, "ibv_end_poll");
    handle->is_in_extended_poll = false;
    handle->poll_lock.release();
}

// Set the functions that read a completion. As with real providers, the functions for fields that the client has not
// requested stay null.
void fill_read_functions(ibv_cq_ex* cq, std::uint64_t wc_flags) {
    cq->read_opcode = [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.opcode; };
    cq->read_vendor_err = [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.vendor_err; };
    cq->read_wc_flags = [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.wc_flags; };
    const auto set_if_requested = [wc_flags](std::uint64_t flag, auto* function, auto implementation) {
        if ((wc_flags & flag) != 0) {
            *function = implementation;
        }
    };
    set_if_requested(IBV_WC_EX_WITH_BYTE_LEN, &cq->read_byte_len,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.byte_len; });
    set_if_requested(IBV_WC_EX_WITH_IMM, &cq->read_imm_data,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.imm_data; });
    set_if_requested(IBV_WC_EX_WITH_QP_NUM, &cq->read_qp_num,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.qp_num; });
    set_if_requested(IBV_WC_EX_WITH_SRC_QP, &cq->read_src_qp,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.src_qp; });
    set_if_requested(IBV_WC_EX_WITH_SLID, &cq->read_slid,
                     [](ibv_cq_ex* queue) { return std::uint32_t{get_current_completion(queue).wc.slid}; });
    set_if_requested(IBV_WC_EX_WITH_SL, &cq->read_sl,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.sl; });
    set_if_requested(IBV_WC_EX_WITH_DLID_PATH_BITS, &cq->read_dlid_path_bits,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wc.dlid_path_bits; });
    set_if_requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, &cq->read_completion_ts,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).device_cycles; });
    set_if_requested(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, &cq->read_completion_wallclock_ns,
                     [](ibv_cq_ex* queue) { return get_current_completion(queue).wallclock_ns; });
}

// Return 0, EOPNOTSUPP or EINVAL, as mlx5_create_cq_ex does for the same arguments.
int check_extended_attributes(const ibv_cq_init_attr_ex& attr) {
    if ((attr.wc_flags & ~supported_wc_flags) != 0) {
        return EOPNOTSUPP;
    }
    const bool has_flags = (attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0;
    const bool has_parent_domain = (attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) != 0;
    const bool is_valid = (attr.comp_mask & ~supported_comp_mask) == 0 &&
                          (!has_flags || (attr.flags & ~supported_creation_flags) == 0) &&
                          (!has_parent_domain || is_parent_domain(attr.parent_domain));
    return is_valid ? 0 : EINVAL;
}

} // namespace

ibv_cq_ex* create_extended_cq(ibv_context* context, ibv_cq_init_attr_ex* attr) {
    if (const auto fault = find_injected_fault("ibv_create_cq_ex")) {
        return fail_null(*fault);
    }
    if (const int error = check_extended_attributes(*attr); error != 0) {
        return fail_null(error);
    }
    CompletionQueueRequest request{attr->cqe, attr->cq_context, attr->channel, attr->comp_vector, {}, nullptr};
    request.options.has_timestamps = (attr->wc_flags & timestamp_flags) != 0;
    if ((attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0) {
        request.options.ignores_overrun = (attr->flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0;
    }
    if ((attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) != 0) {
        request.parent_domain = get_domain(attr->parent_domain);
    }
    CompletionQueueHandle* const handle = create_completion_queue(context, request);
    if (handle == nullptr) {
        return nullptr;
    }
    ibv_cq_ex* const cq = &handle->public_cq;
    cq->start_poll = start_poll;
    cq->next_poll = next_poll;
    cq->end_poll = end_poll;
    fill_read_functions(cq, attr->wc_flags);
    return cq;
}

} // namespace gdrkit::twin::verbs
