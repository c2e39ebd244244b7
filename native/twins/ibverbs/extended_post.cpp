// Implements the extended functions to post send requests (ibv_wr_*). Errors are handled as in mlx5: ibv_wr_complete
// returns the first error of a list, and then posts no request of the list.

#include "ibverbs/extended_post.hpp"

#include <cstdio>
#include <cstdlib>

#include "ibverbs/datagram_frame.hpp"
#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"
#include "ibverbs/window.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Bits of ibv_qp_ex::wr_flags that the twin accepts.
constexpr unsigned supported_wr_flags = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;

// The operations (IBV_QP_EX_WITH_*) that a queue pair can have, by its type: UD (datagram), UC (unreliable), and RC or
// XRC (reliable).
constexpr std::uint64_t datagram_operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
constexpr std::uint64_t unreliable_operations = datagram_operations | IBV_QP_EX_WITH_SEND_WITH_INV |
                                                IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                                                IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
constexpr std::uint64_t reliable_operations = unreliable_operations | IBV_QP_EX_WITH_RDMA_READ |
                                              IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

QueuePairHandle* get_extended_qp_handle(ibv_qp_ex* qp) {
    return get_qp_handle(&qp->qp_base);
}

RequestBuilder* get_builder(ibv_qp_ex* qp, const char* function) {
    RequestBuilder* const builder = get_extended_qp_handle(qp)->builder.get();
    builder->require_started(function);
    return builder;
}

// The next three functions implement ibv_wr_start, ibv_wr_complete and ibv_wr_abort.

void start_list(ibv_qp_ex* qp) {
    if (is_alive("ibv_qp", qp)) {
        get_extended_qp_handle(qp)->builder->start();
    }
}

int complete_list(ibv_qp_ex* qp) {
    RequestBuilder* const builder = get_builder(qp, "ibv_wr_complete");
    QueuePair& pair = *get_extended_qp_handle(qp)->impl;
    const auto fault = find_injected_fault("ibv_wr_complete");
    int error = fault ? *fault : builder->check(pair.type(), pair.count_free_send_slots());
    if (ibv_send_wr* const list = builder->link_requests(); error == 0 && list != nullptr) {
        ibv_send_wr* bad_wr = nullptr;
        error = pair.post_send(list, &bad_wr);
    }
    builder->finish();
    return error;
}

void abort_list(ibv_qp_ex* qp) {
    get_builder(qp, "ibv_wr_abort")->finish();
}

// Append a request to the started list of the queue pair.
ibv_send_wr& add_request(ibv_qp_ex* qp, ibv_wr_opcode opcode) {
    return get_builder(qp, "an ibv_wr_* function")->add(*qp, opcode);
}

void add_rdma(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t remote_address,
              __be32 immediate_data = 0) {
    ibv_send_wr& wr = add_request(qp, opcode);
    wr.wr.rdma.rkey = rkey;
    wr.wr.rdma.remote_addr = remote_address;
    wr.imm_data = immediate_data;
}

void add_atomic(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t remote_address,
                std::uint64_t compare_or_add, std::uint64_t swap) {
    ibv_send_wr& wr = add_request(qp, opcode);
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.remote_addr = remote_address;
    wr.wr.atomic.compare_add = compare_or_add;
    wr.wr.atomic.swap = swap;
}

void add_bind(ibv_qp_ex* qp, ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info* info) {
    ibv_send_wr& wr = add_request(qp, IBV_WR_BIND_MW);
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = *info;
    if (make_binding(mw, rkey, *info) == nullptr) {
        get_extended_qp_handle(qp)->builder->record_error(EINVAL);
    }
}

void add_invalidation(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t rkey) {
    add_request(qp, opcode).invalidate_rkey = rkey;
}

void set_datagram_address(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t remote_qpn, std::uint32_t remote_qkey) {
    RequestBuilder* const builder = get_builder(qp, "ibv_wr_set_ud_addr");
    if (!is_alive("ibv_ah", ah)) {
        builder->record_error(EINVAL);
    } else if (ibv_send_wr* const wr = builder->last_request()) {
        wr->wr.ud = {ah, remote_qpn, remote_qkey};
    }
}

void set_xrc_srq_number(ibv_qp_ex* qp, std::uint32_t remote_srqn) {
    if (ibv_send_wr* const wr = get_builder(qp, "ibv_wr_set_xrc_srqn")->last_request()) {
        wr->qp_type.xrc.remote_srqn = remote_srqn;
    }
}

void set_sges(ibv_qp_ex* qp, std::size_t count, const ibv_sge* sges) {
    get_builder(qp, "ibv_wr_set_sge_list")
        ->set_sges(sges, count, get_extended_qp_handle(qp)->impl->capacity().max_send_sge);
}

void set_inline(ibv_qp_ex* qp, std::size_t count, const ibv_data_buf* buffers) {
    get_builder(qp, "ibv_wr_set_inline_data_list")
        ->set_inline(buffers, count, get_extended_qp_handle(qp)->impl->capacity().max_inline_data);
}

void fill_send_functions(ibv_qp_ex* qp, std::uint64_t operations) {
    const auto set_if_requested = [operations](std::uint64_t operation, auto* function, auto implementation) {
        if ((operations & operation) != 0) {
            *function = implementation;
        }
    };
    set_if_requested(IBV_QP_EX_WITH_SEND, &qp->wr_send, [](ibv_qp_ex* pair) { add_request(pair, IBV_WR_SEND); });
    set_if_requested(IBV_QP_EX_WITH_SEND_WITH_IMM, &qp->wr_send_imm, [](ibv_qp_ex* pair, __be32 immediate_data) {
        add_request(pair, IBV_WR_SEND_WITH_IMM).imm_data = immediate_data;
    });
    set_if_requested(IBV_QP_EX_WITH_SEND_WITH_INV, &qp->wr_send_inv,
                     [](ibv_qp_ex* pair, std::uint32_t rkey) { add_invalidation(pair, IBV_WR_SEND_WITH_INV, rkey); });
    set_if_requested(IBV_QP_EX_WITH_LOCAL_INV, &qp->wr_local_inv,
                     [](ibv_qp_ex* pair, std::uint32_t rkey) { add_invalidation(pair, IBV_WR_LOCAL_INV, rkey); });
    set_if_requested(IBV_QP_EX_WITH_BIND_MW, &qp->wr_bind_mw, add_bind);
}

void fill_rdma_functions(ibv_qp_ex* qp, std::uint64_t operations) {
    const auto set_if_requested = [operations](std::uint64_t operation, auto* function, auto implementation) {
        if ((operations & operation) != 0) {
            *function = implementation;
        }
    };
    set_if_requested(IBV_QP_EX_WITH_RDMA_WRITE, &qp->wr_rdma_write,
                     [](ibv_qp_ex* pair, std::uint32_t rkey, std::uint64_t remote_address) {
                         add_rdma(pair, IBV_WR_RDMA_WRITE, rkey, remote_address);
                     });
    set_if_requested(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, &qp->wr_rdma_write_imm,
                     [](ibv_qp_ex* pair, std::uint32_t rkey, std::uint64_t remote_address, __be32 immediate_data) {
                         add_rdma(pair, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, remote_address, immediate_data);
                     });
    set_if_requested(IBV_QP_EX_WITH_RDMA_READ, &qp->wr_rdma_read,
                     [](ibv_qp_ex* pair, std::uint32_t rkey, std::uint64_t remote_address) {
                         add_rdma(pair, IBV_WR_RDMA_READ, rkey, remote_address);
                     });
    set_if_requested(
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, &qp->wr_atomic_cmp_swp,
        [](ibv_qp_ex* pair, std::uint32_t rkey, std::uint64_t remote_address, std::uint64_t compare,
           std::uint64_t swap) { add_atomic(pair, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, remote_address, compare, swap); });
    set_if_requested(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, &qp->wr_atomic_fetch_add,
                     [](ibv_qp_ex* pair, std::uint32_t rkey, std::uint64_t remote_address, std::uint64_t addend) {
                         add_atomic(pair, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, remote_address, addend, 0);
                     });
}

} // namespace

void RequestBuilder::start() {
    lock.acquire();
    requests_.clear();
    error_ = 0;
    is_started_ = true;
}

void RequestBuilder::finish() {
    requests_.clear();
    is_started_ = false;
    lock.release();
}

void RequestBuilder::require_started(const char* function) const {
    if (!is_started_) {
        std::fprintf(stderr, "gdrkit twin: %s was called without ibv_wr_start\n", function);
        std::abort();
    }
}

ibv_send_wr& RequestBuilder::add(const ibv_qp_ex& qp, ibv_wr_opcode opcode) {
    // The inline flag of the client is ignored: only ibv_wr_set_inline_data makes a request inline.
    const unsigned flags = qp.wr_flags & ~IBV_SEND_INLINE;
    if ((flags & ~supported_wr_flags) != 0) {
        record_error(EINVAL);
    }
    ibv_send_wr& wr = requests_.emplace_back().wr;
    wr.wr_id = qp.wr_id;
    wr.opcode = opcode;
    wr.send_flags = flags;
    return wr;
}

ibv_send_wr* RequestBuilder::last_request() {
    if (requests_.empty()) {
        record_error(EINVAL);
        return nullptr;
    }
    return &requests_.back().wr;
}

void RequestBuilder::set_sges(const ibv_sge* sges, std::size_t count, std::uint32_t max_count) {
    if (last_request() == nullptr) {
        return;
    }
    if (count > max_count) {
        record_error(ENOMEM);
        return;
    }
    requests_.back().sges.assign(sges, sges + count);
}

void RequestBuilder::set_inline(const ibv_data_buf* buffers, std::size_t count, std::uint32_t max_bytes) {
    if (last_request() == nullptr) {
        return;
    }
    std::vector<std::byte>& inline_data = requests_.back().inline_data;
    inline_data.clear();
    for (const ibv_data_buf* buffer = buffers; buffer != buffers + count; ++buffer) {
        if (buffer->length > max_bytes - inline_data.size()) {
            record_error(ENOMEM);
            return;
        }
        const auto* const bytes = static_cast<const std::byte*>(buffer->addr);
        inline_data.insert(inline_data.end(), bytes, bytes + buffer->length);
    }
    if (!carries_data(requests_.back().wr.opcode)) {
        record_error(EINVAL);
    }
    requests_.back().wr.send_flags |= IBV_SEND_INLINE;
}

int RequestBuilder::check(ibv_qp_type type, std::uint32_t free_slot_count) const {
    if (error_ != 0) {
        return error_;
    }
    for (const auto& [wr, sges, inline_data] : requests_) {
        // An atomic operation returns 8 bytes.
        const bool is_valid_atomic =
            !is_atomic(wr.opcode) || count_total_bytes(sges.data(), static_cast<int>(sges.size())) == 8;
        const bool is_valid_datagram =
            type != IBV_QPT_UD || (is_alive("ibv_ah", wr.wr.ud.ah) && wr.wr.ud.remote_qpn <= multicast_qpn &&
                                   (wr.send_flags & IBV_SEND_FENCE) == 0);
        if (!is_valid_atomic || !is_valid_datagram) {
            return EINVAL;
        }
    }
    return requests_.size() > free_slot_count ? ENOMEM : 0;
}

ibv_send_wr* RequestBuilder::link_requests() {
    ibv_send_wr* next = nullptr;
    for (auto request = requests_.rbegin(); request != requests_.rend(); ++request) {
        ibv_send_wr& wr = request->wr;
        // The list for ibv_post_send refers to inline data by one SGE.
        if ((wr.send_flags & IBV_SEND_INLINE) != 0) {
            request->sges.assign(1, {reinterpret_cast<std::uint64_t>(request->inline_data.data()),
                                     static_cast<std::uint32_t>(request->inline_data.size()), 0});
        }
        wr.sg_list = request->sges.data();
        wr.num_sge = static_cast<int>(request->sges.size());
        wr.next = next;
        next = &wr;
    }
    return next;
}

bool supports_send_operations(ibv_qp_type type, std::uint64_t operations) {
    switch (type) {
    case IBV_QPT_RC:
    case IBV_QPT_XRC_SEND:
        return (operations & ~reliable_operations) == 0;
    case IBV_QPT_UC:
        return (operations & ~unreliable_operations) == 0;
    case IBV_QPT_UD:
        return (operations & ~datagram_operations) == 0;
    default:
        return false;
    }
}

void enable_extended_posts(QueuePairHandle* handle, std::uint64_t operations) {
    handle->builder = std::make_unique<RequestBuilder>();
    ibv_qp_ex* const qp = &handle->public_qp_ex;
    qp->wr_start = start_list;
    qp->wr_complete = complete_list;
    qp->wr_abort = abort_list;
    fill_send_functions(qp, operations);
    fill_rdma_functions(qp, operations);
    if (qp->qp_base.qp_type == IBV_QPT_UD) {
        qp->wr_set_ud_addr = set_datagram_address;
    } else if (qp->qp_base.qp_type == IBV_QPT_XRC_SEND) {
        qp->wr_set_xrc_srqn = set_xrc_srq_number;
    }
    qp->wr_set_sge_list = set_sges;
    qp->wr_set_sge = [](ibv_qp_ex* pair, std::uint32_t lkey, std::uint64_t address, std::uint32_t length) {
        const ibv_sge sge{address, length, lkey};
        set_sges(pair, 1, &sge);
    };
    qp->wr_set_inline_data_list = set_inline;
    qp->wr_set_inline_data = [](ibv_qp_ex* pair, void* address, std::size_t length) {
        const ibv_data_buf buffer{address, length};
        set_inline(pair, 1, &buffer);
    };
}

} // namespace gdrkit::twin::verbs

using namespace gdrkit::twin::verbs;

extern "C" {

// Return NULL for a queue pair that was made without IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
    const bool is_extended = is_alive("ibv_qp", qp) && get_qp_handle(qp)->builder != nullptr;
    return is_extended ? &get_qp_handle(qp)->public_qp_ex : nullptr;
}

} // extern "C"
