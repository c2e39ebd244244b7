// The thread of a queue pair that takes its send requests in order, and flushes both queues when the pair is in error.
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"
#include "model/config.hpp"

namespace gdrkit::twin::verbs {
namespace {

using Clock = std::chrono::steady_clock;

// A peer that is stopped, not dead, is given up after this time; one that is dead is seen at once.
constexpr timeval longest_silence{30, 0};
constexpr std::uint64_t longest_retry_us = 2'000'000;
constexpr std::uint64_t pause_between_tries_us = 1000;

// The waiting times that the codes of min_rnr_timer stand for, in microseconds.
constexpr std::uint32_t rnr_time_us[32] = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

// How long a request is tried again before it is given up; 0: for ever.
std::uint64_t retry_time_us(const ibv_qp_attr& attr) {
    if (attr.timeout == 0) {
        return 0;
    }
    const std::uint64_t once_us = (4096ULL << attr.timeout) / 1000;
    return std::clamp<std::uint64_t>(once_us * (attr.retry_cnt + 1U), 1, longest_retry_us);
}

const char* fault_point(ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        return "wc.send";
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return "wc.rdma_write";
    case IBV_WR_RDMA_READ:
        return "wc.rdma_read";
    default:
        return nullptr;
    }
}

bool answers_with_data(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

wire::Opcode wire_opcode(ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return wire::Opcode::write;
    case IBV_WR_RDMA_READ:
        return wire::Opcode::read;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return wire::Opcode::compare_and_swap;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return wire::Opcode::fetch_and_add;
    default:
        return wire::Opcode::send;
    }
}

wire::Request first_request(const SendWork& work) {
    wire::Request request{};
    request.magic = wire::magic;
    request.opcode = wire_opcode(work.opcode);
    if (work.opcode == IBV_WR_SEND_WITH_IMM || work.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        request.flags |= wire::flag_immediate;
    }
    if (work.solicited) {
        request.flags |= wire::flag_solicited;
    }
    request.remote_address = work.remote_address;
    request.message_bytes = work.length_bytes;
    request.rkey = work.rkey;
    request.immediate = work.immediate;
    request.compare_or_add = work.compare_or_add;
    request.swap = work.swap;
    return request;
}

ibv_wc_status status_of(wire::Answer answer) {
    switch (answer) {
    case wire::Answer::invalid_request:
        return IBV_WC_REM_INV_REQ_ERR;
    case wire::Answer::access_refused:
        return IBV_WC_REM_ACCESS_ERR;
    default:
        return IBV_WC_REM_OP_ERR;
    }
}

} // namespace

void QueuePair::run_requester() {
    Lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] {
            const bool to_flush =
                state_ == IBV_QPS_ERR && arriving_count_ == 0 && !(sends_.empty() && receives_.empty());
            const bool to_send = state_ == IBV_QPS_RTS && !sends_.empty();
            return closing_ || to_flush || to_send || (state_ == IBV_QPS_SQD && drain_event_wanted_);
        });
        if (closing_) {
            return;
        }
        if (state_ == IBV_QPS_ERR) {
            flush(&lock);
        } else if (state_ == IBV_QPS_SQD) {
            drain_event_wanted_ = false;
            context_->raise(abi_, IBV_EVENT_SQ_DRAINED, async_events);
        } else {
            send_one(&lock);
        }
    }
}

void QueuePair::flush(Lock* lock) {
    const std::uint64_t generation = generation_;
    flushing_ = true;
    lock->unlock();
    be_late();
    lock->lock();
    flushing_ = false;
    changed_.notify_all();
    if (generation != generation_ || state_ != IBV_QPS_ERR) {
        return;
    }
    for (const SendWork& work : sends_) {
        complete_send(*lock, work, IBV_WC_WR_FLUSH_ERR);
    }
    sends_.clear();
    ibv_wc flushed{};
    flushed.status = IBV_WC_WR_FLUSH_ERR;
    flushed.opcode = IBV_WC_RECV;
    for (const ReceiveWork& work : receives_) {
        complete_receive(*lock, work, flushed, false);
    }
    receives_.clear();
}

void QueuePair::send_one(Lock* lock) {
    const std::uint64_t generation = generation_;
    const SendWork work = std::move(sends_.front());
    sends_.pop_front();
    sending_ = true;
    lock->unlock();
    const ibv_wc_status status = carry_out(work);
    be_late();
    lock->lock();
    sending_ = false;
    changed_.notify_all();
    if (generation != generation_) {
        return;
    }
    if (status == IBV_WC_SUCCESS) {
        count_sent(work);
    }
    complete_send(*lock, work, status);
    if (status != IBV_WC_SUCCESS) {
        enter_error(*lock, nullptr);
        peer_.reset();
    }
}

ibv_wc_status QueuePair::carry_out(const SendWork& work) {
    if (const char* const point = fault_point(work.opcode)) {
        if (const auto fault = call(point)) {
            return static_cast<ibv_wc_status>(*fault);
        }
    }
    ibv_qp_attr attr{};
    {
        Lock lock(mutex_);
        attr = attr_;
    }
    if (answers_with_data(work.opcode) && attr.max_rd_atomic == 0) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    if (const ibv_wc_status status = check_locally(work); status != IBV_WC_SUCCESS) {
        return status;
    }
    if (const ibv_wc_status status = connect_to_peer(attr); status != IBV_WC_SUCCESS) {
        return status;
    }
    wire::Request request = first_request(work);
    do {
        const std::uint64_t rest = work.length_bytes - request.chunk_offset_bytes;
        request.chunk_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(rest, chunk_bytes_most));
        if (const ibv_wc_status status = exchange_chunk(work, request, attr); status != IBV_WC_SUCCESS) {
            return status;
        }
        request.chunk_offset_bytes += request.chunk_bytes;
    } while (request.chunk_offset_bytes < work.length_bytes);
    return IBV_WC_SUCCESS;
}

ibv_wc_status QueuePair::check_locally(const SendWork& work) const {
    if (work.length_bytes > message_bytes_most) {
        return IBV_WC_LOC_LEN_ERR;
    }
    const unsigned wanted = answers_with_data(work.opcode) ? IBV_ACCESS_LOCAL_WRITE : 0;
    for (const ibv_sge& piece : work.pieces) {
        if (piece.length > 0 && find_local(piece.lkey, domain_, wanted, piece.addr, piece.length) == nullptr) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    return IBV_WC_SUCCESS;
}

ibv_wc_status QueuePair::connect_to_peer(const ibv_qp_attr& attr) {
    if (peer_) {
        return IBV_WC_SUCCESS;
    }
    const std::string name = wire::name_of(attr.ah_attr.grh.dgid, attr.dest_qp_num);
    const std::uint64_t retry_us = retry_time_us(attr);
    const auto deadline = Clock::now() + std::chrono::microseconds(retry_us);
    for (;;) {
        if (Fd socket(connect_to(name)); socket) {
            setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &longest_silence, sizeof longest_silence);
            setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &longest_silence, sizeof longest_silence);
            {
                Lock lock(mutex_);
                if (interrupted()) {
                    return IBV_WC_WR_FLUSH_ERR;
                }
                peer_ = std::move(socket);
            }
            if (introduce(peer_.get(), attr)) {
                return IBV_WC_SUCCESS;
            }
            Lock lock(mutex_);
            peer_.reset();
        }
        if (retry_us != 0 && Clock::now() >= deadline) {
            return lost();
        }
        if (!wait_unless_interrupted(pause_between_tries_us)) {
            return IBV_WC_WR_FLUSH_ERR;
        }
    }
}

bool QueuePair::introduce(int socket, const ibv_qp_attr& attr) {
    wire::Hello hello{};
    hello.magic = wire::magic;
    hello.version = wire::version;
    hello.source_gid = context_->device->gid;
    hello.destination_gid = attr.ah_attr.grh.dgid;
    hello.source_qpn = number_;
    hello.destination_qpn = attr.dest_qp_num;
    hello.psn = attr.sq_psn;
    hello.gid_type = gid_type_at(attr.ah_attr.grh.sgid_index);
    wire::Welcome welcome{};
    return send_all(socket, &hello, sizeof hello) && recv_all(socket, &welcome, sizeof welcome) &&
           welcome.magic == wire::magic && welcome.ready == 1;
}

ibv_wc_status QueuePair::exchange_chunk(const SendWork& work, const wire::Request& request, const ibv_qp_attr& attr) {
    for (unsigned tries_left = attr.rnr_retry;;) {
        if (wire::carries_payload(request.opcode)) {
            const ibv_wc_status status = move_local(work, request.chunk_offset_bytes, request.chunk_bytes, false);
            if (status != IBV_WC_SUCCESS) {
                return status;
            }
        }
        wire::Response response{};
        if (const ibv_wc_status status = transfer(request, &response); status != IBV_WC_SUCCESS) {
            return status;
        }
        if (response.answer == wire::Answer::done) {
            if (!answers_with_data(work.opcode)) {
                return IBV_WC_SUCCESS;
            }
            if (request.opcode != wire::Opcode::read) {
                std::memcpy(bounce_->at(0), &response.original, sizeof response.original);
            }
            return move_local(work, request.chunk_offset_bytes, request.chunk_bytes, true);
        }
        if (response.answer != wire::Answer::receiver_not_ready) {
            return status_of(response.answer);
        }
        // 7 stands for: without end.
        if (attr.rnr_retry != 7 && tries_left-- == 0) {
            return IBV_WC_RNR_RETRY_EXC_ERR;
        }
        if (!wait_unless_interrupted(rnr_time_us[response.rnr_timer])) {
            return IBV_WC_WR_FLUSH_ERR;
        }
    }
}

ibv_wc_status QueuePair::transfer(const wire::Request& request, wire::Response* response) {
    const int socket = peer_.get();
    const bool exchanged =
        send_all(socket, &request, sizeof request) &&
        (!wire::carries_payload(request.opcode) || send_all(socket, bounce_->at(0), request.chunk_bytes)) &&
        recv_all(socket, response, sizeof *response) && wire::well_formed(*response, request) &&
        recv_all(socket, bounce_->at(0), response->payload_bytes);
    return exchanged ? IBV_WC_SUCCESS : lost();
}

// The peer cannot be reached: it is gone, or the pair itself was told to stop.
ibv_wc_status QueuePair::lost() {
    Lock lock(mutex_);
    return interrupted() ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
}

bool QueuePair::wait_unless_interrupted(std::uint64_t time_us) {
    Lock lock(mutex_);
    return !changed_.wait_for(lock, std::chrono::microseconds(time_us), [this] { return interrupted(); });
}

ibv_wc_status QueuePair::move_local(const SendWork& work, std::uint64_t offset, std::size_t size, bool to_memory) {
    if (work.is_inline) {
        std::memcpy(bounce_->at(0), work.data.data() + offset, size);
        return IBV_WC_SUCCESS;
    }
    std::uint64_t skip = offset;
    std::size_t moved = 0;
    for (const ibv_sge& piece : work.pieces) {
        if (skip >= piece.length) {
            skip -= piece.length;
            continue;
        }
        const std::size_t part = std::min<std::size_t>(piece.length - skip, size - moved);
        if (part == 0) {
            break;
        }
        const std::uint64_t address = piece.addr + skip;
        const auto region = find_local(piece.lkey, domain_, to_memory ? IBV_ACCESS_LOCAL_WRITE : 0, address, part);
        if (region == nullptr || (to_memory ? region->write(address, *bounce_, moved, part)
                                            : region->read(address, bounce_.get(), moved, part)) != RegionError::none) {
            return IBV_WC_LOC_PROT_ERR;
        }
        moved += part;
        skip = 0;
    }
    return IBV_WC_SUCCESS;
}

void QueuePair::count_sent(const SendWork& work) {
    Traffic::Direction& sent = context_->device->traffic.sent;
    ++sent.requests;
    switch (wire_opcode(work.opcode)) {
    case wire::Opcode::send:
        sent.send_bytes += work.length_bytes;
        break;
    case wire::Opcode::write:
        sent.write_bytes += work.length_bytes;
        break;
    case wire::Opcode::read:
        sent.read_bytes += work.length_bytes;
        break;
    default:
        // An atomic request counts as a request only.
        break;
    }
}

} // namespace gdrkit::twin::verbs
