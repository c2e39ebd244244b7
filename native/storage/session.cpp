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

constexpr std::size_t small_buffer_bytes_min = 16384, small_buffers = 256, large_buffers = 16;
constexpr std::size_t receive_bytes = 1 << 18, backlog_bytes_max = 1 << 20;
constexpr int final_send_timeout_ms = 1000;
constexpr std::chrono::milliseconds cause_timeout{50};
constexpr unsigned rounds_per_receive = 4;
// With operations in progress, the session polls longer by this factor, because the next work is near. To sleep and be
// woken costs more, on both sides.
constexpr unsigned busy_spin_factor = 4;

int make_event() {
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) {
        throw verbs::Error("eventfd", verbs::last_errno());
    }
    return event;
}

void raise_event(int event) {
    const std::uint64_t one = 1;
    // The write can only fail if the counter is full, and then the event is readable anyway.
    [[maybe_unused]] const ssize_t count = ::write(event, &one, sizeof one);
}

} // namespace

Session::Session(std::shared_ptr<Store> store, std::shared_ptr<Fabric> fabric,
                 const std::vector<verbs::Endpoint>& peers, const SessionLimits& limits)
    : store_(std::move(store)), fabric_(std::move(fabric)), limits_(limits), stop_(make_event()), ended_(make_event()) {
    queue_pairs_.emplace(*fabric_, peers);
    std::vector<verbs::Device*> devices;
    for (const auto& device : fabric_->devices()) {
        devices.push_back(device.get());
    }
    // Whole chunks are verified, so a buffer has space for one more chunk at each end.
    const std::size_t around = 2 * std::size_t{store_->chunk_bytes()};
    staging_.emplace(devices, verbs::Staging::Layout{std::max(small_buffer_bytes_min, 2 * around), small_buffers,
                                                     limits_.segment_bytes + around, large_buffers});
    ++store_->counters().sessions;
}

Session::~Session() {
    close();
}

void Session::add_file(std::uint64_t handle, std::shared_ptr<OpenFile> file) {
    const std::lock_guard guard(files_lock_);
    files_[handle] = std::move(file);
}

bool Session::remove_file(std::uint64_t handle) {
    std::shared_ptr<OpenFile> file; // Closed outside of the lock.
    const std::lock_guard guard(files_lock_);
    const auto entry = files_.find(handle);
    if (entry == files_.end()) {
        return false;
    }
    file = std::move(entry->second);
    files_.erase(entry);
    return true;
}

void Session::start(Descriptor data_connection) {
    const std::lock_guard guard(close_lock_);
    if (thread_.joinable() || stopping_ || !queue_pairs_) {
        throw verbs::Error("start a session twice", EALREADY);
    }
    data_connection_ = std::move(data_connection);
    // Python's main thread handles signals, so the thread of the session blocks them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this] { serve(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Session::close() {
    const std::lock_guard guard(close_lock_);
    stopping_ = true;
    raise_event(stop_.get());
    if (thread_.joinable()) {
        thread_.join();
    }
    segments_.clear();
    waiting_.clear();
    free_pending_.clear();
    operation_pool_.clear();
    queue_pairs_.reset(); // Queue pairs must go before the memory that they could write to.
    staging_.reset();
    data_connection_ = Descriptor();
    std::unordered_map<std::uint64_t, std::shared_ptr<OpenFile>> files;
    {
        const std::lock_guard files_guard(files_lock_);
        files.swap(files_);
    }
}

void Session::serve() noexcept {
    pthread_setname_np(pthread_self(), "gdrkit-session");
    try {
        Spin spin(limits_.spin_us);
        for (unsigned idle_rounds = 0; !stopping_ && !connection_ended_ && !is_rdma_broken_;) {
            // A check of the socket is a system call; a check for completions is not.
            bool progress = idle_rounds % rounds_per_receive == 0 && receive();
            progress |= parse_frames();
            progress |= start_segments();
            is_rdma_broken_ |= !queue_pairs_->flush();
            progress |= poll_completions();
            if (is_rdma_broken_) {
                break;
            }
            reply();
            progress |= send();
            idle_rounds = progress ? 0 : idle_rounds + 1;
            if (!spin.should_continue(progress, outstanding_ != 0 ? busy_spin_factor : 1)) {
                wait_for_events();
                spin.begin();
                idle_rounds = 0;
            } else if (!progress) {
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
    raise_event(ended_.get());
}

bool Session::receive() {
    if (out_.size() - out_begin_ > backlog_bytes_max || outstanding_ >= limits_.outstanding_max) {
        return false;
    }
    // The buffer has space for more than the largest frame. It is allocated once, because this function is called
    // often.
    in_.resize(receive_bytes);
    if (in_begin_ != 0 && in_begin_ == in_end_) {
        in_begin_ = in_end_ = 0;
    } else if (in_end_ == in_.size()) {
        std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
        in_end_ -= in_begin_;
        in_begin_ = 0;
    }
    if (in_end_ == in_.size()) {
        return false; // The buffer is full of frames that wait for operations before them.
    }
    const ssize_t count = recv(data_connection_.get(), in_.data() + in_end_, in_.size() - in_end_, MSG_DONTWAIT);
    if (count > 0) {
        in_end_ += static_cast<std::size_t>(count);
    } else {
        connection_ended_ |= count == 0 || (errno != EAGAIN && errno != EINTR);
    }
    return count > 0;
}

bool Session::parse_frames() {
    bool any = false;
    const char* refusal = nullptr;
    while (in_end_ - in_begin_ >= sizeof(FrameHeader) && refusal == nullptr) {
        const std::span<const std::byte> rest(in_.data() + in_begin_, in_end_ - in_begin_);
        const auto header = parse_header(rest.first<sizeof(FrameHeader)>(), refusal);
        if (header && static_cast<FrameType>(header->type) != FrameType::io_request) {
            refusal = "a data connection must carry io requests only";
        }
        if (refusal != nullptr || rest.size() < sizeof(FrameHeader) + header->length ||
            (outstanding_ != 0 && outstanding_ + header->count > limits_.outstanding_max)) {
            break;
        }
        if (parse_operations(*header, rest.subspan(sizeof(FrameHeader), header->length), operations_, refusal)) {
            enqueue_operations();
            in_begin_ += sizeof(FrameHeader) + header->length;
            any = true;
        }
    }
    if (refusal != nullptr) {
        ++store_->counters().refused_frames;
        std::fprintf(stderr, "gdrkit serve: a session ended because of an invalid frame: %s\n", refusal);
        connection_ended_ = true;
    }
    return any;
}

void Session::enqueue_operations() {
    const std::lock_guard guard(files_lock_);
    for (const Operation& operation : operations_) {
        PendingOperation& pending = allocate_pending();
        pending.reset(operation);
        if (const auto entry = files_.find(operation.handle); entry != files_.end()) {
            pending.file = entry->second;
        }
        pending.error = check_operation(operation, pending.file);
        ++outstanding_;
        if (pending.error != 0 || operation.length == 0) {
            finish(pending);
        } else {
            waiting_.push_back(&pending);
        }
    }
}

Session::PendingOperation& Session::allocate_pending() {
    if (free_pending_.empty()) {
        return *operation_pool_.emplace_back(std::make_unique<PendingOperation>());
    }
    PendingOperation& pending = *free_pending_.back();
    free_pending_.pop_back();
    return pending;
}

std::int64_t Session::check_operation(const Operation& operation, const std::shared_ptr<OpenFile>& file) const {
    constexpr std::uint64_t offset_max = INT64_MAX;
    const bool is_write = static_cast<Opcode>(operation.opcode) == Opcode::write;
    if (!file || !(is_write ? file->may_write : file->may_read)) {
        return -EBADF;
    }
    if (operation.queue_pair >= queue_pairs_->size() || operation.length > limits_.length_bytes_max ||
        operation.file_offset > offset_max || operation.remote_address > UINT64_MAX - operation.length) {
        return -EINVAL;
    }
    if (operation.length > offset_max - operation.file_offset) {
        return is_write ? -EFBIG : -EINVAL;
    }
    if ((operation.flags & checksum_given) != 0 && operation.length > limits_.segment_bytes) {
        return -EMSGSIZE;
    }
    return 0;
}

// Finishes an operation. Nothing may refer to it afterwards, unless the session ends here.
void Session::finish(PendingOperation& pending) {
    pending.is_finished = true;
    --outstanding_;
    if (pending.error == -EREMOTEIO && !is_rdma_broken_) {
        pending.error = -EIO; // The errno of a file. EREMOTEIO is reserved for failures of the client's memory.
    }
    const bool succeeded = pending.error == 0;
    Result result{};
    result.tag = pending.operation.tag;
    result.result = succeeded ? static_cast<std::int64_t>(pending.moved) : pending.error;
    if (succeeded && (pending.operation.flags & checksum_wanted) != 0) {
        result.checksum = pending.checksum;
        result.flags = checksum_valid;
    }
    if (succeeded) {
        const bool is_write = static_cast<Opcode>(pending.operation.opcode) == Opcode::write;
        auto& counters = store_->counters();
        ++(is_write ? counters.writes : counters.reads);
        (is_write ? counters.written_bytes : counters.read_bytes) += pending.moved;
        result.holes = static_cast<std::uint32_t>(pending.holes.size());
        holes_.insert(holes_.end(), pending.holes.begin(), pending.holes.end());
    }
    results_.push_back(result);
    pending.file.reset();
    free_pending_.push_back(&pending);
    if (results_.size() == operations_max || holes_.size() + holes_max > operations_max * 64) {
        reply();
    }
}

void Session::reply() {
    if (results_.empty()) {
        return;
    }
    std::vector<std::byte> payload(results_.size() * sizeof(Result) + holes_.size() * sizeof(HoleExtent));
    std::memcpy(payload.data(), results_.data(), results_.size() * sizeof(Result));
    if (!holes_.empty()) {
        std::memcpy(payload.data() + results_.size() * sizeof(Result), holes_.data(),
                    holes_.size() * sizeof(HoleExtent));
    }
    append_frame(out_, FrameType::io_reply, static_cast<std::uint32_t>(results_.size()), 0, payload);
    results_.clear();
    holes_.clear();
}

bool Session::send() {
    bool any = false;
    while (out_begin_ < out_.size()) {
        const ssize_t count = ::send(data_connection_.get(), out_.data() + out_begin_, out_.size() - out_begin_,
                                     MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0) {
            connection_ended_ |= errno != EAGAIN && errno != EINTR;
            return any;
        }
        out_begin_ += static_cast<std::size_t>(count);
        any = true;
    }
    out_.clear();
    out_begin_ = 0;
    return any;
}

void Session::wait_for_events() {
    // A completion after arm() makes a channel readable. The poll below finds completions before it.
    queue_pairs_->arm();
    if (poll_completions()) {
        return;
    }
    const bool wants_more = outstanding_ < limits_.outstanding_max && out_.size() - out_begin_ <= backlog_bytes_max &&
                            (in_begin_ != 0 || in_end_ < receive_bytes);
    const int events = (wants_more ? POLLIN : 0) | (out_begin_ < out_.size() ? POLLOUT : 0) | POLLRDHUP;
    std::vector<int> channels;
    queue_pairs_->descriptors(channels);
    std::vector<pollfd> polled{{data_connection_.get(), static_cast<short>(events), 0}, {stop_.get(), POLLIN, 0}};
    for (const int channel : channels) {
        polled.push_back({channel, POLLIN, 0});
    }
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
        throw verbs::Error("poll", verbs::last_errno());
    }
    connection_ended_ |= (polled[0].revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) != 0;
    queue_pairs_->take_events();
}

void Session::end_with_failure() {
    ++store_->counters().rdma_errors;
    // When ibv_post_send fails, the queue pair is broken. A completion that follows reports which transfer broke it.
    const auto until = std::chrono::steady_clock::now() + cause_timeout;
    while (!has_refusal_ && queue_pairs_->in_progress() && std::chrono::steady_clock::now() < until) {
        poll_completions();
        sched_yield();
    }
    // The other operations get no result: with one, the client would reuse its memory while bytes may still arrive
    // there through another queue pair. The client breaks its queue pairs when the connection ends.
    reply();
    // The client may be alive and have invalidated one key. It must learn which operation used it.
    while (!send() || out_begin_ < out_.size()) {
        if (connection_ended_ || out_.empty()) {
            return;
        }
        pollfd polled[] = {{data_connection_.get(), POLLOUT, 0}, {stop_.get(), POLLIN, 0}};
        if (poll(polled, 2, final_send_timeout_ms) <= 0 || polled[1].revents != 0) {
            return;
        }
    }
    // If a TCP connection is closed with unread requests, the kernel discards replies that the peer has not read yet.
    shutdown(data_connection_.get(), SHUT_WR);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(final_send_timeout_ms);
    while (std::chrono::steady_clock::now() < end) {
        pollfd polled[] = {{data_connection_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
        if (poll(polled, 2, final_send_timeout_ms) <= 0 || polled[1].revents != 0 ||
            recv(data_connection_.get(), in_.data(), in_.size(), MSG_DONTWAIT) <= 0) {
            return;
        }
    }
}

} // namespace gdrkit::storage
