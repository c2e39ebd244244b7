// The extended functions to post send requests (ibv_wr_*): a program starts a list, adds requests with the ibv_wr_*
// functions, and completes or aborts the list.
#pragma once

#include <cstdint>
#include <semaphore>
#include <vector>

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

struct QueuePairHandle;

// The requests between ibv_wr_start and ibv_wr_complete of one queue pair.
class RequestBuilder {
public:
    // Take the lock, which keeps every other thread from posting, and begin with an empty list.
    void start();
    // Discard the requests and release the lock.
    void finish();
    // End the process if no list is started: the functions of real providers would then write to an undefined entry of
    // the send queue.
    void require_started(const char* function) const;

    // Append a request with the wr_id and flags that the client has set in `qp`.
    ibv_send_wr& add(const ibv_qp_ex& qp, ibv_wr_opcode opcode);
    // Return the request that was added last. If there is none, record the error EINVAL and return nullptr.
    ibv_send_wr* last_request();
    void set_sges(const ibv_sge* sges, std::size_t count, std::uint32_t max_count);
    void set_inline(const ibv_data_buf* buffers, std::size_t count, std::uint32_t max_bytes);
    // Record an error. ibv_wr_complete returns the first error of the list.
    void record_error(int error) { error_ = error_ == 0 ? error : error_; }

    // Return 0, or the errno with which the list fails. If check() returns 0, the queue pair accepts the whole list.
    [[nodiscard]] int check(ibv_qp_type type, std::uint32_t free_slot_count) const;
    // Link the requests to a list for ibv_post_send. Return the first request; nullptr if there is none.
    ibv_send_wr* link_requests();

    // A thread holds this lock from ibv_wr_start to ibv_wr_complete or ibv_wr_abort, and during ibv_post_send.
    std::binary_semaphore lock{1};

private:
    struct BuiltRequest {
        ibv_send_wr wr{};
        std::vector<ibv_sge> sges;
        std::vector<std::byte> inline_data;
    };
    std::vector<BuiltRequest> requests_;
    int error_ = 0;
    bool is_started_ = false;
};

// Return whether a queue pair of this type can have these operations (enum ibv_qp_create_send_ops_flags).
bool supports_send_operations(ibv_qp_type type, std::uint64_t operations);

// Set the function pointers of a queue pair for ibv_wr_start, ibv_wr_complete, ibv_wr_abort and these operations.
void enable_extended_posts(QueuePairHandle* handle, std::uint64_t operations);

} // namespace gdrkit::twin::verbs
