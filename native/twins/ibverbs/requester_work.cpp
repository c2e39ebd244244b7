// What the requester of a queue pair does without the pair's lock: it begins send requests in order, submits their
// parts as long as there is room, and takes in the answers, which come in the same order.
#include <algorithm>
#include <cstring>

#include "ibverbs/requester_parts.hpp"

namespace gdrkit::twin::verbs {
namespace {

// The peer may begin with the first of several requests while the others are still being made.
constexpr std::uint64_t publish_after_bytes = 64U << 10;

// The waiting times that the codes of min_rnr_timer stand for, in microseconds.
constexpr std::uint32_t rnr_time_us[32] = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

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

// The two moments of a completion that a plan can name.
struct FaultSites {
    FaultSite before; // The request is carried out next.
    FaultSite landed; // Its bytes have arrived.

    FaultSites(std::string_view first, std::string_view second) : before(first), landed(second) {}
};

// nullptr: the plan has no name for the completion of such a request.
FaultSites* fault_sites(ibv_wr_opcode opcode) {
    static FaultSites send("wc.send", "wc.send.landed"), write("wc.rdma_write", "wc.rdma_write.landed"),
        read("wc.rdma_read", "wc.rdma_read.landed");
    switch (wire_opcode(opcode)) {
    case wire::Opcode::send:
        return &send;
    case wire::Opcode::write:
        return &write;
    case wire::Opcode::read:
        return &read;
    default:
        return nullptr;
    }
}

bool may_find_no_receive(const wire::Request& request) {
    return request.opcode == wire::Opcode::send ? request.chunk_offset_bytes == 0
                                                : (request.flags & wire::flag_immediate) != 0 && last_chunk(request);
}

} // namespace

bool QueuePair::advance(const ibv_qp_attr& attr) {
    Sending& own = sending_work_;
    const bool submitted = submit(attr);
    const bool reaped = reap(attr);
    if (!own.failed && own.chunks.empty() && own.stopped) {
        own.failed = own.stopped;
    }
    if (!own.failed && own.hung_up && !own.chunks.empty() && link_->answered() == own.answered) {
        own.failed = lost();
    }
    return submitted || reaped || own.failed;
}

bool QueuePair::submit(const ibv_qp_attr& attr) {
    Sending& own = sending_work_;
    bool any = false;
    while (!own.stopped && !own.failed && !own.hung_up && (own.open || !own.taken.empty())) {
        if ((own.held && !own.chunks.empty()) || (own.try_again && Clock::now() < *own.try_again)) {
            break;
        }
        own.held = false;
        own.try_again.reset();
        if ((!own.open && !begin_next(attr)) || (!own.stopped && !submit_chunk())) {
            break;
        }
        any = true;
    }
    if (own.submitted != own.published) {
        publish();
    }
    return any;
}

// False when the next one must wait for others.
bool QueuePair::begin_next(const ibv_qp_attr& attr) {
    Sending& own = sending_work_;
    FaultSites* const sites = fault_sites(own.taken.front().opcode);
    FaultSite* const site = sites != nullptr ? &sites->before : nullptr;
    if (must_wait(own.taken.front(), site)) {
        return false;
    }
    const SendWork& work = own.begun.push_back(std::move(own.taken.front()));
    own.taken.pop_front();
    if (const ibv_wc_status status = prepare(work, site, attr); status != IBV_WC_SUCCESS) {
        own.stopped = status;
        return true;
    }
    own.open = true;
    own.next = first_request(work);
    own.tries_left = attr.rnr_retry;
    own.with_data += answers_with_data(work.opcode) ? 1 : 0;
    return true;
}

// A request that a plan names is carried out alone: what the plan does to it is not done to those before it.
bool QueuePair::must_wait(const SendWork& next, FaultSite* site) {
    const Sending& own = sending_work_;
    if (next.fenced && own.with_data > 0) {
        return true;
    }
    if (site == nullptr || !site->planned()) {
        return false;
    }
    Lock lock(mutex_);
    return !own.begun.empty() || !own.finished.empty() || !due_.empty();
}

ibv_wc_status QueuePair::prepare(const SendWork& work, FaultSite* site, const ibv_qp_attr& attr) {
    if (site != nullptr) {
        if (const auto fault = call(site)) {
            return static_cast<ibv_wc_status>(*fault);
        }
    }
    if (answers_with_data(work.opcode) && attr.max_rd_atomic == 0) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    if (const ibv_wc_status status = check_locally(work); status != IBV_WC_SUCCESS) {
        return status;
    }
    return connect_to_peer(attr);
}

// Where the bytes of the next part will be. False when there is no room for them now.
bool QueuePair::find_room(const SendWork& work, wire::Request* request, std::uint32_t* pages) {
    *pages = pages_to_lend(work, *request);
    if (*pages > 0) {
        request->flags |= wire::flag_piped;
        request->payload_at = 0;
        return sending_work_.pages_lent + *pages <= link_->pipe().pages_most();
    }
    request->flags &= static_cast<std::uint16_t>(~wire::flag_piped);
    const auto at = link_->reserve(request->chunk_bytes);
    request->payload_at = at.value_or(0);
    return at.has_value();
}

// False when there is no room for it now.
bool QueuePair::submit_chunk() {
    Sending& own = sending_work_;
    const SendWork& work = own.begun.back();
    wire::Request& request = own.next;
    const std::uint64_t rest = work.length_bytes - request.chunk_offset_bytes;
    request.chunk_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(rest, chunk_bytes_most));
    std::uint32_t pages = 0;
    if (own.chunks.size() == Link::slot_count || !find_room(work, &request, &pages)) {
        return false;
    }
    const bool later = pages > 0 && may_lend_later(work, request);
    if (later) {
        lend_later(work);
    } else {
        lend_now();
        if (own.stopped) {
            return true;
        }
    }
    if (wire::carries_payload(request.opcode)) {
        const ibv_wc_status status = later       ? IBV_WC_SUCCESS
                                     : pages > 0 ? lend_local(work, request)
                                                 : move_local(work, request, false);
        if (status != IBV_WC_SUCCESS) {
            // Nobody saw it; nothing more is submitted before the connection ends.
            own.stopped = status;
            return true;
        }
    }
    own.pages_lent += pages;
    if (own.chunks.empty()) {
        own.heard = Clock::now();
    }
    own.chunks.push_back({request, link_->reserved(), pages});
    link_->put(own.submitted++, request);
    own.held = may_find_no_receive(request);
    own.unpublished_bytes += request.chunk_bytes;
    request.chunk_offset_bytes += request.chunk_bytes;
    own.open = request.chunk_offset_bytes < work.length_bytes;
    if (own.unpublished_bytes >= publish_after_bytes) {
        publish();
    }
    return true;
}

void QueuePair::publish() {
    Sending& own = sending_work_;
    lend_now();
    own.published = own.submitted;
    own.unpublished_bytes = 0;
    own.hung_up |= !link_->publish_requests(own.published, peer_.get());
}

bool QueuePair::reap(const ibv_qp_attr& attr) {
    Sending& own = sending_work_;
    bool any = false;
    while (!own.failed && !own.chunks.empty() && link_->answered() != own.answered) {
        any = true;
        const wire::Response response = link_->response(own.answered);
        if (link_->answered() - own.answered > own.chunks.size() ||
            !wire::well_formed(response, own.chunks.front().request)) {
            own.failed = lost();
        } else {
            take_answer(response, attr);
        }
    }
    if (any) {
        own.heard = Clock::now();
    }
    return any;
}

void QueuePair::take_answer(const wire::Response& response, const ibv_qp_attr& attr) {
    Sending& own = sending_work_;
    const Chunk chunk = own.chunks.front();
    own.chunks.pop_front();
    ++own.answered;
    own.pages_lent -= chunk.pages;
    if (response.answer == wire::Answer::receiver_not_ready) {
        // It was the last that was submitted, so the same part is again the next one.
        own.next = chunk.request;
        own.open = true;
        link_->release(chunk.mark);
        // 7 stands for: without end.
        if (attr.rnr_retry != 7 && own.tries_left-- == 0) {
            own.failed = IBV_WC_RNR_RETRY_EXC_ERR;
        } else {
            own.try_again = Clock::now() + std::chrono::microseconds(rnr_time_us[response.rnr_timer]);
        }
        return;
    }
    if (response.answer != wire::Answer::done) {
        own.failed = status_of(response.answer);
        return;
    }
    SendWork& work = own.begun.front();
    if (answers_with_data(work.opcode)) {
        if (chunk.request.opcode != wire::Opcode::read) {
            std::memcpy(link_->memory().at(chunk.request.payload_at), &response.original, sizeof response.original);
        }
        if (const ibv_wc_status status = move_local(work, chunk.request, true); status != IBV_WC_SUCCESS) {
            own.failed = status;
            return;
        }
    }
    if (chunk.pages == 0) {
        link_->release(chunk.mark);
    }
    if (last_chunk(chunk.request)) {
        own.with_data -= answers_with_data(work.opcode) ? 1 : 0;
        if (FaultSites* const sites = fault_sites(work.opcode); sites != nullptr) {
            if (const auto fault = call(&sites->landed)) {
                own.failed = static_cast<ibv_wc_status>(*fault);
                return;
            }
        }
        own.finished.push_back(std::move(work));
        own.begun.pop_front();
    }
}

ibv_wc_status QueuePair::check_locally(const SendWork& work) {
    if (work.length_bytes > message_bytes_most) {
        return IBV_WC_LOC_LEN_ERR;
    }
    const unsigned wanted = answers_with_data(work.opcode) ? IBV_ACCESS_LOCAL_WRITE : 0;
    for (const ibv_sge& piece : work.pieces) {
        if (piece.length > 0 && own_region(piece, wanted) == nullptr) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    return IBV_WC_SUCCESS;
}

// Between the memory of the application and the place of this part in the shared memory.
ibv_wc_status QueuePair::move_local(const SendWork& work, const wire::Request& request, bool to_memory) {
    Bounce* const bounce = &link_->memory();
    if (work.is_inline) {
        std::copy_n(work.data.begin() + static_cast<std::ptrdiff_t>(request.chunk_offset_bytes), request.chunk_bytes,
                    bounce->at(request.payload_at));
        return IBV_WC_SUCCESS;
    }
    const bool moved = for_each_part(work, request, [&](const ibv_sge& part, std::size_t at) {
        const unsigned wanted = to_memory ? IBV_ACCESS_LOCAL_WRITE : 0;
        Region* const region = own_region(part, wanted);
        return region != nullptr &&
               (to_memory ? region->write(part.addr, *bounce, request.payload_at + at, part.length)
                          : region->read(part.addr, bounce, request.payload_at + at, part.length)) == RegionError::none;
    });
    return moved ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

} // namespace gdrkit::twin::verbs
