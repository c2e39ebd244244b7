// The send and receive requests of a queue pair as the twin keeps them, and their translation from the client's
// structures.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

struct WindowBinding;

// The scatter-gather list of a send request. A list with one entry, the usual case, needs no heap memory.
class ScatterGatherList {
public:
    void assign(const ibv_sge* list, std::size_t count) {
        count_ = count;
        if (count == 1) {
            single_entry_ = *list;
        } else {
            entries_.assign(list, list + count);
        }
    }
    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] const ibv_sge* begin() const { return count_ == 1 ? &single_entry_ : entries_.data(); }
    [[nodiscard]] const ibv_sge* end() const { return begin() + count_; }
    [[nodiscard]] const ibv_sge& front() const { return *begin(); }

private:
    ibv_sge single_entry_{};
    std::vector<ibv_sge> entries_;
    std::size_t count_ = 0;
};

// A posted send request.
struct SendWork {
    std::uint64_t wr_id = 0;
    ibv_wr_opcode opcode{};
    bool is_fenced = false;
    bool is_signaled = false;
    bool is_solicited = false;
    bool is_inline = false;
    std::uint32_t immediate_data = 0; // the immediate data, or the rkey that the request invalidates
    std::uint64_t remote_address = 0;
    std::uint32_t rkey = 0;
    std::uint64_t compare_or_add = 0;    // the value that a compare-and-swap compares, or the addend of a fetch-and-add
    std::uint64_t swap = 0;              // the value that a successful compare-and-swap stores
    std::uint32_t remote_srq_number = 0; // the shared receive queue of the peer, for an XRC queue pair
    std::uint64_t length_bytes = 0;
    ScatterGatherList sges;
    // The payload of an inline request, copied when the request was posted.
    std::vector<std::byte> inline_data;
    // The arguments of a request that binds a memory window.
    std::shared_ptr<const WindowBinding> binding;
};

// A posted receive request.
struct ReceiveWork {
    std::uint64_t wr_id = 0;
    std::uint64_t length_bytes = 0;
    std::vector<ibv_sge> sges;
};

// Return whether `count` is at most `max_count`, and `sges` is not null unless `count` is 0.
bool is_valid_sge_list(const ibv_sge* sges, int count, std::uint32_t max_count);
// Return the sum of the lengths of the entries.
std::uint64_t count_total_bytes(const ibv_sge* sges, int count);
// Return whether the opcode is an atomic operation.
bool is_atomic(ibv_wr_opcode opcode);
// Return whether the request sends the client's data: a send or a write.
bool carries_data(ibv_wr_opcode opcode);
// Return whether the request only changes the keys of its own device: it binds or invalidates a memory window.
bool changes_keys(ibv_wr_opcode opcode);
// Translate a request whose list of entries was checked, and copy its inline data. `all_signaled` is sq_sig_all of the
// queue pair: if it is true, every request gets a completion.
SendWork to_send_work(const ibv_send_wr& wr, bool all_signaled, std::uint64_t length_bytes);
ReceiveWork to_receive_work(const ibv_recv_wr& wr);

} // namespace gdrkit::twin::verbs
