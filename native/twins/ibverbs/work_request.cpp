// Checks work requests, and translates them from the client's structures.

#include "ibverbs/work_request.hpp"

#include <cstring>

#include "ibverbs/window.hpp"

namespace gdrkit::twin::verbs {
namespace {

std::vector<std::byte> copy_inline_data(const ibv_send_wr& wr, std::uint64_t length_bytes) {
    std::vector<std::byte> data(length_bytes);
    std::size_t offset = 0;
    for (int index = 0; index < wr.num_sge; ++index) {
        const ibv_sge& sge = wr.sg_list[index];
        if (sge.length > 0) {
            std::memcpy(data.data() + offset, reinterpret_cast<const void*>(sge.addr), sge.length);
            offset += sge.length;
        }
    }
    return data;
}

} // namespace

bool is_atomic(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

bool carries_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_SEND_WITH_INV ||
           opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

bool changes_keys(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}

std::uint64_t count_total_bytes(const ibv_sge* sges, int count) {
    std::uint64_t length_bytes = 0;
    for (int index = 0; index < count; ++index) {
        length_bytes += sges[index].length;
    }
    return length_bytes;
}

bool is_valid_sge_list(const ibv_sge* sges, int count, std::uint32_t max_count) {
    return count >= 0 && static_cast<std::uint32_t>(count) <= max_count && (count == 0 || sges != nullptr);
}

SendWork to_send_work(const ibv_send_wr& wr, bool all_signaled, std::uint64_t length_bytes) {
    SendWork work;
    work.wr_id = wr.wr_id;
    work.opcode = wr.opcode;
    work.is_fenced = (wr.send_flags & IBV_SEND_FENCE) != 0;
    work.is_signaled = all_signaled || (wr.send_flags & IBV_SEND_SIGNALED) != 0;
    work.is_solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
    work.is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
    work.immediate_data = wr.imm_data;
    if (changes_keys(wr.opcode)) {
        if (wr.opcode == IBV_WR_BIND_MW) {
            work.binding = make_binding(wr.bind_mw.mw, wr.bind_mw.rkey, wr.bind_mw.bind_info);
        }
        return work;
    }
    work.length_bytes = length_bytes;
    if (is_atomic(wr.opcode)) {
        work.remote_address = wr.wr.atomic.remote_addr;
        work.rkey = wr.wr.atomic.rkey;
        work.compare_or_add = wr.wr.atomic.compare_add;
        work.swap = wr.wr.atomic.swap;
    } else {
        work.remote_address = wr.wr.rdma.remote_addr;
        work.rkey = wr.wr.rdma.rkey;
    }
    if (work.is_inline) {
        work.inline_data = copy_inline_data(wr, length_bytes);
    } else {
        work.sges.assign(wr.sg_list, static_cast<std::size_t>(wr.num_sge));
    }
    return work;
}

ReceiveWork to_receive_work(const ibv_recv_wr& wr) {
    ReceiveWork work;
    work.wr_id = wr.wr_id;
    work.length_bytes = count_total_bytes(wr.sg_list, wr.num_sge);
    work.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
    return work;
}

} // namespace gdrkit::twin::verbs
