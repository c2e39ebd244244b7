// The part of a storage server's Session that receives requests and sends replies: its thread, its files and its end.
// segments.cpp moves the bytes of the operations.
#include "storage/session.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "storage/session_parts.hpp"
#include "verbs/error.hpp"

namespace gdrkit::storage {

namespace {

// The staging memory of a session has buffers of two sizes, so that many small operations can be in progress.
constexpr std::size_t small_buffer_bytes_min = 16384, small_buffers_count = 256, large_buffers_count = 16;
constexpr std::size_t receive_buffer_bytes = 1 << 18;
// If more bytes of unsent replies than this wait, the session receives no further requests.
constexpr std::size_t backlog_bytes_max = 1 << 20;
// After a failure, a session waits for the client at most this long whenever the socket has no space for the last
// replies, and then about this long until the client closes the connection.
constexpr int final_timeout_ms = 1000;
// Longest wait for the completion that shows which transfer broke a queue pair.
constexpr std::chrono::milliseconds cause_timeout{50};
// Without progress, the thread checks the socket only in every fourth round, because the check is a system call.
constexpr unsigned rounds_per_receive = 4;
// With operations in progress, the thread polls longer by this factor before it sleeps, because their completions
// arrive soon, before a sleeping thread would have woken up.
constexpr unsigned busy_spin_factor = 4;

int create_event() {
    const int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd < 0) {
        throw verbs::Error("eventfd", verbs::last_errno());
    }
    return event_fd;
}

void raise_event(int event_fd) {
    const std::uint64_t increment = 1;
    // The write fails only if the counter is full, and then the event is already readable.
    [[maybe_unused]] const ssize_t count = ::write(event_fd, &increment, sizeof increment);
}

} // namespace

Session::Session(std::shared_ptr<Store> store, std::shared_ptr<Fabric> fabric,
                 const std::vector<verbs::Endpoint>& client_endpoints, const SessionLimits& limits)
    : store_(std::move(store)), fabric_(std::move(fabric)), limits_(limits), stop_event_(create_event()),
      ended_event_(create_event()) {
    queue_pairs_.emplace(*fabric_, client_endpoints);
    std::vector<verbs::Device*> devices;
    for (const auto& device : fabric_->devices()) {
        devices.push_back(device.get());
    }
    // A read verifies whole chunks, so a buffer has space for one more chunk at each end.
    const std::size_t margin_bytes = 2 * std::size_t{store_->chunk_bytes()};
    staging_.emplace(devices,
                     verbs::Staging::Layout{std::max(small_buffer_bytes_min, 2 * margin_bytes), small_buffers_count,
                                            limits_.segment_bytes + margin_bytes, large_buffers_count});
    ++store_->counters().sessions;
}

Session::~Session() {
    close();
}

void Session::add_file(std::uint64_t handle, std::shared_ptr<OpenFile> file) {
    const std::lock_guard guard(files_mutex_);
    files_[handle] = std::move(file);
}

bool Session::remove_file(std::uint64_t handle) {
    std::shared_ptr<OpenFile> file; // Destroyed after `guard`, so that the file is closed without the lock.
    const std::lock_guard guard(files_mutex_);
    const auto entry = files_.find(handle);
    if (entry == files_.end()) {
        return false;
    }
    file = std::move(entry->second);
    files_.erase(entry);
    return true;
}

void Session::start(Descriptor data_connection) {
    const std::lock_guard guard(close_mutex_);
    if (thread_.joinable() || is_stopping_ || !queue_pairs_) {
        throw verbs::Error("the session was already started or closed", EALREADY);
    }
    data_connection_ = std::move(data_connection);
    // Python's main thread handles signals, so the thread of the session blocks them.
    sigset_t all_signals, previous_signals;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_signals);
    try {
        thread_ = std::thread([this] { serve(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &previous_signals, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous_signals, nullptr);
}

void Session::close() {
    const std::lock_guard guard(close_mutex_);
    is_stopping_ = true;
    raise_event(stop_event_.get());
    if (thread_.joinable()) {
        thread_.join();
    }
    segments_.clear();
    waiting_operations_.clear();
    free_operations_.clear();
    operation_pool_.clear();
    queue_pairs_.reset(); // The queue pairs are destroyed first, because they may still write to the staging memory.
    staging_.reset();
    data_connection_ = Descriptor();
    // Close the files after files_mutex_ has been released.
    std::unordered_map<std::uint64_t, std::shared_ptr<OpenFile>> files;
    {
        const std::lock_guard files_guard(files_mutex_);
        files.swap(files_);
    }
}

void Session::serve() noexcept {
    pthread_setname_np(pthread_self(), "gdrkit-session");
    try {
        SpinTimer spin_timer(limits_.spin_us);
        for (unsigned idle_rounds_count = 0; !is_stopping_ && !has_connection_ended_ && !is_rdma_broken_;) {
            bool has_progress = idle_rounds_count % rounds_per_receive == 0 && receive_requests();
            has_progress |= parse_frames();
            has_progress |= start_segments();
            is_rdma_broken_ |= !queue_pairs_->flush();
            has_progress |= poll_completions();
            if (is_rdma_broken_) {
                break;
            }
            append_reply();
            has_progress |= send_replies();
            idle_rounds_count = has_progress ? 0 : idle_rounds_count + 1;
            if (!spin_timer.should_continue(has_progress, outstanding_count_ != 0 ? busy_spin_factor : 1)) {
                wait_for_events();
                spin_timer.restart();
                idle_rounds_count = 0;
            } else if (!has_progress) {
                // The client that sends the next request may need this processor.
                sched_yield();
            }
        }
        if (is_rdma_broken_) {
            end_with_failure();
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gdrkit serve: a session failed: %s\n", error.what());
    }
    shutdown(data_connection_.get(), SHUT_RDWR);
    raise_event(ended_event_.get());
}

bool Session::receive_requests() {
    if (send_buffer_.size() - send_begin_ > backlog_bytes_max || outstanding_count_ >= limits_.outstanding_max) {
        return false;
    }
    // The buffer has space for more than the largest frame. Only the first call allocates it.
    receive_buffer_.resize(receive_buffer_bytes);
    if (receive_begin_ != 0 && receive_begin_ == receive_end_) {
        receive_begin_ = receive_end_ = 0;
    } else if (receive_end_ == receive_buffer_.size()) {
        std::memmove(receive_buffer_.data(), receive_buffer_.data() + receive_begin_, receive_end_ - receive_begin_);
        receive_end_ -= receive_begin_;
        receive_begin_ = 0;
    }
    if (receive_end_ == receive_buffer_.size()) {
        return false; // The buffer is full of frames that wait for the results of earlier operations.
    }
    const ssize_t received_bytes = recv(data_connection_.get(), receive_buffer_.data() + receive_end_,
                                        receive_buffer_.size() - receive_end_, MSG_DONTWAIT);
    if (received_bytes > 0) {
        receive_end_ += static_cast<std::size_t>(received_bytes);
    } else {
        has_connection_ended_ |= received_bytes == 0 || (errno != EAGAIN && errno != EINTR);
    }
    return received_bytes > 0;
}

bool Session::parse_frames() {
    bool has_parsed = false;
    const char* refusal_reason = nullptr;
    while (receive_end_ - receive_begin_ >= sizeof(FrameHeader) && refusal_reason == nullptr) {
        const std::span<const std::byte> unparsed_bytes(receive_buffer_.data() + receive_begin_,
                                                        receive_end_ - receive_begin_);
        const auto header = parse_header(unparsed_bytes.first<sizeof(FrameHeader)>(), refusal_reason);
        if (header && static_cast<FrameType>(header->type) != FrameType::io_request) {
            refusal_reason = "a data connection must carry io requests only";
        }
        // The frame waits until its operations fit into the limit outstanding_max. If no operation is outstanding, the
        // session accepts every frame.
        if (refusal_reason != nullptr || unparsed_bytes.size() < sizeof(FrameHeader) + header->length ||
            (outstanding_count_ != 0 && outstanding_count_ + header->count > limits_.outstanding_max)) {
            break;
        }
        if (parse_operations(*header, unparsed_bytes.subspan(sizeof(FrameHeader), header->length), parsed_operations_,
                             refusal_reason)) {
            enqueue_operations();
            receive_begin_ += sizeof(FrameHeader) + header->length;
            has_parsed = true;
        }
    }
    if (refusal_reason != nullptr) {
        ++store_->counters().refused_frames;
        std::fprintf(stderr, "gdrkit serve: a session ended because of an invalid frame: %s\n", refusal_reason);
        has_connection_ended_ = true;
    }
    return has_parsed;
}

void Session::enqueue_operations() {
    const std::lock_guard guard(files_mutex_);
    for (const Operation& operation : parsed_operations_) {
        PendingOperation& pending = allocate_operation();
        pending.reset(operation);
        if (const auto entry = files_.find(operation.handle); entry != files_.end()) {
            pending.file = entry->second;
        }
        pending.error = check_operation(operation, pending.file);
        ++outstanding_count_;
        if (pending.error != 0 || operation.length == 0) {
            finish(pending);
        } else {
            waiting_operations_.push_back(&pending);
        }
    }
}

Session::PendingOperation& Session::allocate_operation() {
    if (free_operations_.empty()) {
        return *operation_pool_.emplace_back(std::make_unique<PendingOperation>());
    }
    PendingOperation& pending = *free_operations_.back();
    free_operations_.pop_back();
    return pending;
}

std::int64_t Session::check_operation(const Operation& operation, const std::shared_ptr<OpenFile>& file) const {
    constexpr std::uint64_t file_offset_max = INT64_MAX;
    const bool is_write = static_cast<Opcode>(operation.opcode) == Opcode::write;
    if (!file || !(is_write ? file->may_write : file->may_read)) {
        return -EBADF;
    }
    if (operation.queue_pair >= queue_pairs_->size() || operation.length > limits_.length_bytes_max ||
        operation.file_offset > file_offset_max || operation.remote_address > UINT64_MAX - operation.length) {
        return -EINVAL;
    }
    if (operation.length > file_offset_max - operation.file_offset) {
        return is_write ? -EFBIG : -EINVAL;
    }
    if ((operation.flags & checksum_given) != 0 && operation.length > limits_.segment_bytes) {
        return -EMSGSIZE;
    }
    return 0;
}

// Adds the result of an operation to the next reply, and frees its object for another operation. Afterwards no segment
// may refer to the object, unless the session ends.
void Session::finish(PendingOperation& pending) {
    pending.is_finished = true;
    --outstanding_count_;
    if (pending.error == -EREMOTEIO && !is_rdma_broken_) {
        // The file system returned EREMOTEIO. The protocol reserves EREMOTEIO for memory that the client's NIC refused
        // to access.
        pending.error = -EIO;
    }
    const bool succeeded = pending.error == 0;
    Result result{};
    result.tag = pending.operation.tag;
    result.result = succeeded ? static_cast<std::int64_t>(pending.moved_bytes) : pending.error;
    if (succeeded && (pending.operation.flags & checksum_wanted) != 0) {
        result.checksum = pending.checksum;
        result.flags = checksum_valid;
    }
    if (succeeded) {
        const bool is_write = static_cast<Opcode>(pending.operation.opcode) == Opcode::write;
        auto& counters = store_->counters();
        ++(is_write ? counters.writes : counters.reads);
        (is_write ? counters.written_bytes : counters.read_bytes) += pending.moved_bytes;
        result.holes = static_cast<std::uint32_t>(pending.holes.size());
        unsent_holes_.insert(unsent_holes_.end(), pending.holes.begin(), pending.holes.end());
    }
    unsent_results_.push_back(result);
    pending.file.reset();
    free_operations_.push_back(&pending);
    // The next result may have holes_max holes, which must fit into the same reply.
    if (unsent_results_.size() == operations_max ||
        unsent_holes_.size() + holes_max > operations_max * holes_per_result_max) {
        append_reply();
    }
}

void Session::append_reply() {
    if (unsent_results_.empty()) {
        return;
    }
    std::vector<std::byte> payload(unsent_results_.size() * sizeof(Result) + unsent_holes_.size() * sizeof(HoleExtent));
    std::memcpy(payload.data(), unsent_results_.data(), unsent_results_.size() * sizeof(Result));
    if (!unsent_holes_.empty()) {
        std::memcpy(payload.data() + unsent_results_.size() * sizeof(Result), unsent_holes_.data(),
                    unsent_holes_.size() * sizeof(HoleExtent));
    }
    append_frame(send_buffer_, FrameType::io_reply, static_cast<std::uint32_t>(unsent_results_.size()), 0, payload);
    unsent_results_.clear();
    unsent_holes_.clear();
}

bool Session::send_replies() {
    bool has_sent = false;
    while (send_begin_ < send_buffer_.size()) {
        const ssize_t sent_bytes = ::send(data_connection_.get(), send_buffer_.data() + send_begin_,
                                          send_buffer_.size() - send_begin_, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent_bytes < 0) {
            has_connection_ended_ |= errno != EAGAIN && errno != EINTR;
            return has_sent;
        }
        send_begin_ += static_cast<std::size_t>(sent_bytes);
        has_sent = true;
    }
    send_buffer_.clear();
    send_begin_ = 0;
    return has_sent;
}

void Session::wait_for_events() {
    // A completion after arm() makes a completion channel readable. poll_completions() finds the earlier completions.
    queue_pairs_->arm();
    if (poll_completions()) {
        return;
    }
    const bool can_receive = outstanding_count_ < limits_.outstanding_max &&
                             send_buffer_.size() - send_begin_ <= backlog_bytes_max &&
                             (receive_begin_ != 0 || receive_end_ < receive_buffer_bytes);
    const int events = (can_receive ? POLLIN : 0) | (send_begin_ < send_buffer_.size() ? POLLOUT : 0) | POLLRDHUP;
    std::vector<pollfd> polled_fds{{data_connection_.get(), static_cast<short>(events), 0},
                                   {stop_event_.get(), POLLIN, 0}};
    for (const int fd : queue_pairs_->event_fds()) {
        polled_fds.push_back({fd, POLLIN, 0});
    }
    if (poll(polled_fds.data(), polled_fds.size(), -1) < 0 && errno != EINTR) {
        throw verbs::Error("poll", verbs::last_errno());
    }
    has_connection_ended_ |= (polled_fds[0].revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) != 0;
    queue_pairs_->take_events();
}

void Session::end_with_failure() {
    ++store_->counters().rdma_errors;
    // ibv_post_send may have failed because an earlier transfer broke the queue pair. Wait for the completion of that
    // transfer, which shows whether the client's NIC refused it.
    const auto cause_deadline = std::chrono::steady_clock::now() + cause_timeout;
    while (!has_refusal_ && queue_pairs_->has_transfers_in_progress() &&
           std::chrono::steady_clock::now() < cause_deadline) {
        poll_completions();
        sched_yield();
    }
    // Among the operations in progress, only the refused operation gets a result. If the server sent results for the
    // other operations, the client would reuse their memory, although bytes may still arrive there through another
    // queue pair. When the connection ends, the client breaks its queue pairs, so that no more bytes can arrive.
    append_reply();
    // The client may still be running. If it has invalidated an rkey, it must learn which operation used that rkey.
    while (!send_replies() || send_begin_ < send_buffer_.size()) {
        if (has_connection_ended_ || send_buffer_.empty()) {
            return;
        }
        pollfd polled_fds[] = {{data_connection_.get(), POLLOUT, 0}, {stop_event_.get(), POLLIN, 0}};
        if (poll(polled_fds, 2, final_timeout_ms) <= 0 || polled_fds[1].revents != 0) {
            return;
        }
    }
    // Read all requests until the client closes the connection. If a TCP connection is closed with unread requests, the
    // kernel discards replies that the client has not read yet.
    shutdown(data_connection_.get(), SHUT_WR);
    const auto drain_deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(final_timeout_ms);
    while (std::chrono::steady_clock::now() < drain_deadline) {
        pollfd polled_fds[] = {{data_connection_.get(), POLLIN, 0}, {stop_event_.get(), POLLIN, 0}};
        if (poll(polled_fds, 2, final_timeout_ms) <= 0 || polled_fds[1].revents != 0 ||
            recv(data_connection_.get(), receive_buffer_.data(), receive_buffer_.size(), MSG_DONTWAIT) <= 0) {
            return;
        }
    }
}

} // namespace gdrkit::storage
