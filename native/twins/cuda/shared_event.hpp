// The state of an interprocess event: memory that is mapped by every process that has a handle of the event.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "model/sockets.hpp"

namespace gdrkit::twin::cuda {

// A record is one cuEventRecord of the event. Records are numbered from 1 on, in all processes together. A record is
// done when the work before it in its stream is done, or when its process has ended. Records in different streams may
// be done in any order.
class SharedEvent {
public:
    // Make the state of a new event. Return null if the system has no memory or no descriptors left.
    static std::shared_ptr<SharedEvent> make();
    // Map the state that another process has created. Return null if the descriptor does not refer to such a state.
    static std::shared_ptr<SharedEvent> adopt(Fd fd);

    SharedEvent(const SharedEvent&) = delete;
    SharedEvent& operator=(const SharedEvent&) = delete;
    ~SharedEvent();

    [[nodiscard]] int fd() const { return fd_.get(); }

    // Begin a record of this process and return its number. The process must end each record that it began.
    std::uint32_t begin_record();
    void end_record(std::uint32_t record_number);

    // Return the number of the last record; 0 if the event was never recorded.
    [[nodiscard]] std::uint32_t get_last_record_number() const { return state_->last_record_number.load(); }
    [[nodiscard]] bool is_done(std::uint32_t record_number);
    void wait_until_done(std::uint32_t record_number);

private:
    struct State {
        std::atomic<std::uint32_t> last_record_number; // 0: the event was never recorded
        std::atomic<std::uint32_t> ended_count; // number of the records that have ended; the futex of waiting threads
    };
    static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

    SharedEvent(Fd fd, State* state) : fd_(std::move(fd)), state_(state) {}
    static std::shared_ptr<SharedEvent> map(Fd fd);
    void set_lock(std::uint32_t record_number, short lock_type);

    // Processes share the file, but not its open description. Until a record ends, the description of its process holds
    // a shared lock (F_OFD_SETLK) of the byte whose offset is the number of the record. The kernel releases the lock
    // when the process ends.
    Fd fd_;
    State* state_;
    std::mutex mutex_;
    // Numbers of the unfinished records of this process. The set is needed because F_OFD_GETLK does not report the
    // locks of the same open file description.
    std::set<std::uint32_t> unfinished_record_numbers_;
};

} // namespace gdrkit::twin::cuda
