// The part of class Loop that runs the thread, adds and removes clients, buffers, files and rings, and sleeps when
// there is no work. loop_io.cpp handles operations and results.
#include "usrbio/agent/loop.hpp"

#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace gdrkit::usrbio::agent {
namespace {

// With operations in flight, each pass that did work and every 4th idle pass checks the socket for results. Without
// operations in flight, only every 64th pass checks the socket, to notice the end of the connection.
constexpr unsigned passes_per_receive = 4;
constexpr unsigned passes_per_disconnect_check = 64;
// With operations in flight the loop spins four times longer, because a result will come soon.
constexpr int spin_factor_in_flight = 4;

std::int64_t to_nanoseconds(std::chrono::steady_clock::time_point time) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

[[noreturn]] void throw_error(int error_number, const char* message) {
    throw std::system_error(error_number, std::generic_category(), message);
}

} // namespace

// The agent has a thread for each client. By default malloc uses up to eight arenas per processor for these threads,
// and free fragments accumulate in each arena. Two arenas are enough, because the loop allocates rarely.
void limit_arenas() noexcept {
    mallopt(M_ARENA_MAX, 2);
}

Loop::Loop(const Options& options, const std::array<std::string, priority_class_count>& semaphore_names)
    : options_(options), wake_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_event_)
        throw_error(errno, "eventfd failed");
    in_flight_.resize(options_.outstanding_max);
    for (std::size_t index = in_flight_.size(); index-- > 0;)
        free_indices_.push_back(static_cast<std::uint32_t>(index));
    watcher_ = std::make_unique<SemaphoreWatcher>(semaphore_names, wake_event_.get());
    thread_ = std::thread(&Loop::run, this);
}

Loop::~Loop() {
    stop();
}

void Loop::stop() {
    {
        const std::lock_guard lock(commands_lock_);
        if (!is_shut_down_)
            commands_.emplace_back([this] { is_stopping_ = true; });
        is_shut_down_ = true;
        has_commands_ = true;
    }
    wake();
    if (thread_.joinable())
        thread_.join();
    watcher_.reset();
}

void Loop::wake() noexcept {
    const std::uint64_t increment = 1;
    // The write fails only if the counter of the eventfd is at its maximum, and then poll() returns anyway.
    [[maybe_unused]] const ssize_t written_bytes = ::write(wake_event_.get(), &increment, sizeof increment);
}

// Executes `function` in the loop's thread. Waits for its result and returns it, or throws its exception.
template <class Function> auto Loop::run_in_loop_thread(Function function) -> std::invoke_result_t<Function> {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Function>()>>(std::move(function));
    auto future = task->get_future();
    {
        const std::lock_guard lock(commands_lock_);
        if (is_shut_down_)
            throw_error(ESHUTDOWN, "the loop has ended");
        commands_.emplace_back([task] { (*task)(); });
        has_commands_ = true;
    }
    wake();
    return future.get();
}

// Executes the functions that other threads have passed to run_in_loop_thread(). Returns whether there were any.
bool Loop::run_commands() {
    if (!has_commands_.load(std::memory_order_acquire))
        return false;
    std::deque<std::function<void()>> commands;
    {
        const std::lock_guard lock(commands_lock_);
        commands.swap(commands_);
        has_commands_ = false;
    }
    for (const auto& command : commands)
        command();
    return !commands.empty();
}

Client& Loop::find_client(std::uint64_t client_number) {
    const auto entry = clients_.find(client_number);
    if (entry == clients_.end())
        throw_error(ENOENT, "the client does not exist");
    return *entry->second;
}

void Loop::add_client(std::uint64_t client_number) {
    run_in_loop_thread([&] {
        auto new_client = std::make_unique<Client>();
        new_client->number = client_number;
        if (!clients_.emplace(client_number, std::move(new_client)).second)
            throw_error(EEXIST, "the client exists already");
    });
}

void Loop::remove_client(std::uint64_t client_number) {
    run_in_loop_thread([&] {
        const Client& removed_client = find_client(client_number);
        if (!removed_client.buffers.empty() || !removed_client.files.empty() || !removed_client.rings.empty())
            throw_error(EBUSY, "the client still has buffers, files or rings");
        clients_.erase(client_number);
    });
}

void Loop::add_buffer(std::uint64_t client_number, const BufferSpec& spec) {
    auto buffer = std::make_unique<Buffer>();
    buffer->spec = spec;
    if (spec.mapping != 0) {
        try {
            buffer->guard = std::make_unique<BusGuard>(reinterpret_cast<void*>(spec.mapping), spec.length,
                                                       BusGuard::Purpose::buffer);
        } catch (const std::bad_alloc&) {
            // The table of guarded ranges is full. The buffer has no guard, so the server executes all reads into it.
        }
    }
    run_in_loop_thread([&] {
        if (!find_client(client_number).buffers.emplace(spec.id, std::move(buffer)).second)
            throw_error(EEXIST, "the buffer exists already");
    });
}

void Loop::set_local_store(Descriptor sums_folder, Descriptor generation_memory) {
    auto store = std::make_shared<LocalStore>(std::move(sums_folder), std::move(generation_memory));
    rlimit descriptor_limit{};
    if (getrlimit(RLIMIT_NOFILE, &descriptor_limit) != 0)
        throw_error(errno, "getrlimit failed");
    // A file needs up to three descriptors, so local files take at most three eighths of the limit.
    store->files_max = descriptor_limit.rlim_cur / 8;
    const std::lock_guard lock(commands_lock_);
    local_store_ = std::move(store);
}

void Loop::set_file(std::uint64_t client_number, const FileSpec& spec, Descriptor descriptor) {
    std::unique_ptr<LocalFile> local_file;
    if (descriptor) {
        std::unique_lock lock(commands_lock_);
        const std::shared_ptr<LocalStore> store = local_store_;
        lock.unlock();
        // The caller's thread creates the LocalFile, because its constructor may read a disk.
        if (store && store->files_count < store->files_max)
            local_file = std::make_unique<LocalFile>(std::move(descriptor), store);
    }
    run_in_loop_thread([&] {
        auto& file = find_client(client_number).files[spec.inode];
        if (file && file->is_closing)
            throw_error(EBUSY, "the file is being removed");
        if (!file)
            file = std::make_unique<File>();
        file->spec = spec;
        // The thread of the caller closes the old LocalFile, because a close that frees the blocks of a deleted file
        // takes long.
        std::swap(file->local_file, local_file);
    });
}

void Loop::add_ring(std::uint64_t client_number, const RingSpec& spec, int fd) {
    run_in_loop_thread([&] {
        Client& owner = find_client(client_number);
        if (owner.rings.contains(spec.id))
            throw_error(EEXIST, "the ring exists already");
        auto ring = std::make_unique<Ring>(owner, spec, fd);
        auto& rings_of_class = rings_.at(static_cast<std::size_t>(spec.priority));
        rings_of_class.push_back(ring.get());
        owner.rings[spec.id].ring = std::move(ring);
    });
}

// Executes `remove` in the loop's thread. If `remove` returns a promise, waits at most `timeout` until the promise is
// fulfilled. Returns whether the object has been removed.
bool Loop::remove_and_wait(const std::function<DrainPromise()>& remove, std::chrono::milliseconds timeout) {
    const DrainPromise promise = run_in_loop_thread(remove);
    return !promise || promise->get_future().wait_for(timeout) == std::future_status::ready;
}

bool Loop::remove_buffer(std::uint64_t client_number, const Id& id, std::chrono::milliseconds timeout) {
    return remove_and_wait(
        [&]() -> DrainPromise {
            auto& buffers = find_client(client_number).buffers;
            const auto entry = buffers.find(id);
            if (entry == buffers.end())
                return nullptr;
            Buffer& buffer = *entry->second;
            buffer.is_closing = true;
            if (buffer.in_flight_count == 0) {
                buffers.erase(entry);
                return nullptr;
            }
            return buffer.drain_promises.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_file(std::uint64_t client_number, std::uint64_t inode, std::chrono::milliseconds timeout) {
    std::unique_ptr<LocalFile> local_file; // The caller's thread closes the file, as in set_file().
    return remove_and_wait(
        [&]() -> DrainPromise {
            auto& files = find_client(client_number).files;
            const auto entry = files.find(inode);
            if (entry == files.end())
                return nullptr;
            File& file = *entry->second;
            file.is_closing = true;
            local_file = std::move(file.local_file);
            if (file.in_flight_count == 0) {
                files.erase(entry);
                return nullptr;
            }
            return file.drain_promises.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_ring(std::uint64_t client_number, const Id& id, std::chrono::milliseconds timeout) {
    return remove_and_wait(
        [&]() -> DrainPromise {
            auto& rings = find_client(client_number).rings;
            const auto entry = rings.find(id);
            if (entry == rings.end())
                return nullptr;
            Ring& ring = *entry->second.ring;
            ring.is_closing = true;
            stop_draining(ring);
            if (ring.agent_side->outstanding() == 0) {
                rings.erase(entry);
                return nullptr;
            }
            return entry->second.drain_promises.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

// Stops taking operations from the ring. The results of its operations in flight are still written into its memory.
void Loop::stop_draining(Ring& ring) {
    std::erase(rings_[static_cast<std::size_t>(ring.spec.priority)], &ring);
}

void Loop::connect(int socket, std::vector<std::uint16_t> queue_pair_nics, std::uint64_t generation) {
    auto connection = std::make_unique<Connection>(Descriptor(socket));
    run_in_loop_thread([&] {
        if (connection_)
            throw_error(EBUSY, "the loop is already connected");
        if (queue_pair_nics.empty())
            throw_error(EINVAL, "a connection needs at least one queue pair");
        connection_ = std::move(connection);
        queue_pair_nics_ = queue_pair_nics;
        connection_generation_ = generation;
        is_connected_ = true;
        has_memory_refusal_ = false;
        silence_start_time_ = Clock::now();
        // Send again the operations that have waited for this connection; see disconnect().
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr)
                add_request(index);
        if (!unsent_requests_.empty())
            statistics_.batches += connection_->queue(unsent_requests_);
        unsent_requests_.clear();
    });
}

bool Loop::disconnect() {
    return run_in_loop_thread([&] {
        if (is_connected_)
            ++statistics_.disconnects;
        is_connected_ = false;
        connection_.reset();
        unsent_requests_.clear();
        // The next session numbers its file handles from 1 again. With its old handle, an operation on a file that the
        // agent does not open again would go to the file of another client. The server answers EBADF to the handle 0.
        for (const auto& [number, client] : clients_)
            for (const auto& [inode, file] : client->files)
                file->spec.read_handle = file->spec.write_handle = 0;
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr && (!has_memory_refusal_ || in_flight_[index].buffer->is_refused))
                complete_operation(index, -EREMOTEIO);
        publish_completions();
        return has_memory_refusal_;
    });
}

void Loop::abandon() {
    run_in_loop_thread([&] {
        if (!has_memory_refusal_)
            return;
        has_memory_refusal_ = false;
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr)
                complete_operation(index, -EREMOTEIO);
        publish_completions();
    });
}

Statistics Loop::statistics() {
    return run_in_loop_thread([&] {
        statistics_.outstanding = in_flight_.size() - free_indices_.size();
        return statistics_;
    });
}

void Loop::add_event(const Event& event) {
    {
        const std::lock_guard lock(events_lock_);
        events_.push_back(event);
    }
    events_changed_.notify_all();
}

std::vector<Event> Loop::events(std::chrono::milliseconds timeout) {
    std::unique_lock lock(events_lock_);
    events_changed_.wait_for(lock, timeout, [&] { return !events_.empty(); });
    return std::exchange(events_, {});
}

void Loop::run() {
    pthread_setname_np(pthread_self(), "gdrkit-loop");
    Clock::time_point last_work_time = Clock::now();
    for (unsigned idle_pass_count = 0; !is_stopping_;) {
        bool has_worked = run_commands();
        has_worked |= drain_rings();
        publish_completions(); // The completions of local reads need not wait for the socket.
        // Checking the socket costs a system call, checking the rings does not.
        if (has_in_flight() ? has_worked || idle_pass_count % passes_per_receive == 0
                            : pass_count_ % passes_per_disconnect_check == 0)
            has_worked |= send_and_receive();
        publish_completions();
        idle_pass_count = has_worked ? 0 : idle_pass_count + 1;
        const Clock::time_point now = Clock::now();
        has_worked |= report_silent_server(now);
        if (has_worked) {
            last_work_time = now;
        } else if (now - last_work_time >= options_.spin_time * (has_in_flight() ? spin_factor_in_flight : 1)) {
            sleep();
            last_work_time = Clock::now();
            idle_pass_count = 0;
        } else {
            // The application that submits the next work may need this processor.
            sched_yield();
        }
    }
    // Destroy the remaining objects in this thread, because only the loop's thread may use them.
    for (auto& rings : rings_)
        rings.clear();
    clients_.clear();
}

// Announces in every ring that the loop sleeps. Returns false if there is work for the loop, which then must not sleep.
bool Loop::announce_sleep() {
    for (const auto& rings : rings_) {
        for (Ring* ring : rings) {
            if (ring->memory.was_truncated() || !ring->agent_side->prepare_to_sleep())
                return false;
            ring->is_asleep = true;
        }
    }
    return true;
}

void Loop::sleep() {
    // A loop that is full waits only for the server; see is_full(). It does not announce its sleep to the applications,
    // because new submissions need not wake it.
    const bool may_sleep = is_full() || announce_sleep();
    if (may_sleep && !has_commands_.load(std::memory_order_seq_cst)) {
        ++statistics_.sleeps;
        std::array<pollfd, 2> polled_descriptors{};
        polled_descriptors[0] = {wake_event_.get(), POLLIN, 0};
        nfds_t polled_descriptor_count = 1;
        if (is_connected_) {
            polled_descriptors[1] = {connection_->fd(), POLLIN, 0};
            if (connection_->has_backlog())
                polled_descriptors[1].events |= POLLOUT;
            polled_descriptor_count = 2;
        }
        std::int64_t deadline_ns = -1; // Time at which the loop must wake up; -1: no limit.
        for (const auto& rings : rings_)
            for (const Ring* ring : rings)
                if (const std::int64_t held_until_ns = ring->agent_side->held_until_ns();
                    held_until_ns >= 0 && (deadline_ns < 0 || held_until_ns < deadline_ns))
                    deadline_ns = held_until_ns;
        if (is_connected_ && has_in_flight()) {
            const std::int64_t server_deadline_ns = to_nanoseconds(silence_start_time_ + options_.server_timeout);
            deadline_ns = deadline_ns < 0 ? server_deadline_ns : std::min(deadline_ns, server_deadline_ns);
        }
        timespec timeout{};
        if (deadline_ns >= 0) {
            const std::int64_t remaining_ns = std::max<std::int64_t>(deadline_ns - to_nanoseconds(Clock::now()), 0);
            timeout = {remaining_ns / 1'000'000'000, remaining_ns % 1'000'000'000};
        }
        // The result is not needed, because the next pass checks the rings and the socket.
        ppoll(polled_descriptors.data(), polled_descriptor_count, deadline_ns >= 0 ? &timeout : nullptr, nullptr);
    }
    std::uint64_t wake_count = 0;
    [[maybe_unused]] const ssize_t bytes_read = ::read(wake_event_.get(), &wake_count, sizeof wake_count);
    for (const auto& rings : rings_)
        for (Ring* ring : rings)
            if (std::exchange(ring->is_asleep, false))
                ring->agent_side->end_sleep();
}

} // namespace gdrkit::usrbio::agent
