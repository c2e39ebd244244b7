#include "usrbio/agent/loop.hpp"

#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace gdrkit::usrbio::agent {
namespace {

constexpr unsigned passes_per_receive = 4;
// Factor by which the loop spins longer with operations in flight, one of which will end soon.
constexpr int spin_factor_in_flight = 4;

std::int64_t nanoseconds_of(std::chrono::steady_clock::time_point time) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

[[noreturn]] void throw_error(int number, const char* what) {
    throw std::system_error(number, std::generic_category(), what);
}

} // namespace

// The agent has a thread for each client. malloc gives the threads up to eight arenas per processor, and each arena
// grows by fragments that clients leave behind. Two arenas are enough, because the loop allocates rarely.
void limit_arenas() noexcept {
    mallopt(M_ARENA_MAX, 2);
}

Loop::Loop(const Options& options, const std::array<std::string, priority_classes>& semaphores)
    : options_(options), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_)
        throw_error(errno, "eventfd failed");
    in_flight_.resize(options_.outstanding_max);
    for (std::size_t index = in_flight_.size(); index-- > 0;)
        free_indices_.push_back(static_cast<std::uint32_t>(index));
    watcher_ = std::make_unique<SemaphoreWatcher>(semaphores, event_.get());
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
    const std::uint64_t one = 1;
    // The write fails only if the counter is full, and then the event is already raised.
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

template <class Function> auto Loop::call(Function function) -> std::invoke_result_t<Function> {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Function>()>>(std::move(function));
    auto result = task->get_future();
    {
        const std::lock_guard lock(commands_lock_);
        if (is_shut_down_)
            throw_error(ESHUTDOWN, "the loop has ended");
        commands_.emplace_back([task] { (*task)(); });
        has_commands_ = true;
    }
    wake();
    return result.get();
}

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

Client& Loop::find_client(std::uint64_t number) {
    const auto found = clients_.find(number);
    if (found == clients_.end())
        throw_error(ENOENT, "the client does not exist");
    return *found->second;
}

void Loop::add_client(std::uint64_t client) {
    call([&] {
        auto added = std::make_unique<Client>();
        added->number = client;
        if (!clients_.emplace(client, std::move(added)).second)
            throw_error(EEXIST, "the client exists already");
    });
}

void Loop::remove_client(std::uint64_t client) {
    call([&] {
        const Client& found = find_client(client);
        if (!found.buffers.empty() || !found.files.empty() || !found.rings.empty())
            throw_error(EBUSY, "the client still has buffers, files or rings");
        clients_.erase(client);
    });
}

void Loop::add_buffer(std::uint64_t client, const BufferSpec& spec) {
    call([&] {
        auto buffer = std::make_unique<Buffer>();
        buffer->spec = spec;
        if (!find_client(client).buffers.emplace(spec.id, std::move(buffer)).second)
            throw_error(EEXIST, "the buffer exists already");
    });
}

void Loop::set_file(std::uint64_t client, const FileSpec& spec) {
    call([&] {
        auto& file = find_client(client).files[spec.inode];
        if (file && file->is_closing)
            throw_error(EBUSY, "the file is being removed");
        if (!file)
            file = std::make_unique<File>();
        file->spec = spec;
    });
}

void Loop::add_ring(std::uint64_t client, const RingSpec& spec, int fd) {
    call([&] {
        Client& owner = find_client(client);
        if (owner.rings.contains(spec.id))
            throw_error(EEXIST, "the ring exists already");
        auto ring = std::make_unique<Ring>(owner, spec, fd);
        auto& rings_of_class = rings_.at(static_cast<std::size_t>(spec.priority));
        rings_of_class.push_back(ring.get());
        owner.rings[spec.id].ring = std::move(ring);
    });
}

bool Loop::wait_drained(const std::function<Drained()>& request, std::chrono::milliseconds timeout) {
    const Drained drained = call(request);
    return !drained || drained->get_future().wait_for(timeout) == std::future_status::ready;
}

bool Loop::remove_buffer(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout) {
    return wait_drained(
        [&]() -> Drained {
            auto& buffers = find_client(client).buffers;
            const auto found = buffers.find(id);
            if (found == buffers.end())
                return nullptr;
            Buffer& buffer = *found->second;
            buffer.is_closing = true;
            if (buffer.in_flight == 0) {
                buffers.erase(found);
                return nullptr;
            }
            return buffer.drain_waiters.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_file(std::uint64_t client, std::uint64_t inode, std::chrono::milliseconds timeout) {
    return wait_drained(
        [&]() -> Drained {
            auto& files = find_client(client).files;
            const auto found = files.find(inode);
            if (found == files.end())
                return nullptr;
            File& file = *found->second;
            file.is_closing = true;
            if (file.in_flight == 0) {
                files.erase(found);
                return nullptr;
            }
            return file.drain_waiters.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_ring(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout) {
    return wait_drained(
        [&]() -> Drained {
            auto& rings = find_client(client).rings;
            const auto found = rings.find(id);
            if (found == rings.end())
                return nullptr;
            Ring& ring = *found->second.ring;
            ring.is_closing = true;
            stop_draining(ring);
            if (ring.side->outstanding() == 0) {
                rings.erase(found);
                return nullptr;
            }
            return found->second.drain_waiters.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

// The loop stops draining the ring. Operations in flight still complete in its memory.
void Loop::stop_draining(Ring& ring) {
    std::erase(rings_[static_cast<std::size_t>(ring.spec.priority)], &ring);
}

void Loop::connect(int socket, std::vector<std::uint16_t> queue_pair_nics, std::uint64_t generation) {
    auto connection = std::make_unique<Connection>(Descriptor(socket));
    call([&] {
        if (connection_)
            throw_error(EBUSY, "the loop is already connected");
        if (queue_pair_nics.empty())
            throw_error(EINVAL, "a connection needs at least one queue pair");
        connection_ = std::move(connection);
        queue_pair_nics_ = queue_pair_nics;
        generation_ = generation;
        is_connected_ = true;
        has_refusal_ = false;
        last_result_time_ = Clock::now();
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr)
                send(index);
        if (!unsent_.empty())
            statistics_.batches += connection_->queue(unsent_);
        unsent_.clear();
    });
}

bool Loop::disconnect() {
    return call([&] {
        if (is_connected_)
            ++statistics_.disconnects;
        is_connected_ = false;
        connection_.reset();
        unsent_.clear();
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr && (!has_refusal_ || in_flight_[index].buffer->is_refused))
                complete(index, -EREMOTEIO);
        publish_completions();
        return has_refusal_;
    });
}

void Loop::abandon() {
    call([&] {
        if (!has_refusal_)
            return;
        has_refusal_ = false;
        for (std::uint32_t index = 0; index < in_flight_.size(); ++index)
            if (in_flight_[index].ring != nullptr)
                complete(index, -EREMOTEIO);
        publish_completions();
    });
}

Statistics Loop::statistics() {
    return call([&] {
        statistics_.outstanding = in_flight_.size() - free_indices_.size();
        return statistics_;
    });
}

void Loop::report(const Event& event) {
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
    Clock::time_point last_work = Clock::now();
    for (unsigned idle_passes = 0; !is_stopping_;) {
        bool worked = run_commands();
        worked |= drain_rings();
        // Checking the socket costs a system call, checking the rings does not.
        if (worked || idle_passes % passes_per_receive == 0)
            worked |= send_and_receive();
        publish_completions();
        idle_passes = worked ? 0 : idle_passes + 1;
        const Clock::time_point now = Clock::now();
        worked |= is_silent(now);
        if (worked) {
            last_work = now;
        } else if (now - last_work >= options_.spin * (has_in_flight() ? spin_factor_in_flight : 1)) {
            sleep();
            last_work = Clock::now();
            idle_passes = 0;
        } else {
            // The process that brings the next work may need this processor.
            sched_yield();
        }
    }
    // Objects that were not removed are destroyed here, in the loop's thread, before their memory is unmapped.
    for (auto& rings : rings_)
        rings.clear();
    clients_.clear();
}

// Returns false if there is work, so that the loop must not sleep.
bool Loop::announce_sleep() {
    for (const auto& rings : rings_) {
        for (Ring* ring : rings) {
            if (ring->memory.was_truncated() || !ring->side->prepare_to_sleep())
                return false;
            ring->is_asleep = true;
        }
    }
    return true;
}

void Loop::sleep() {
    // A loop that can accept nothing waits only for the server. Submissions wait meanwhile.
    const bool may_sleep = is_full() || announce_sleep();
    if (may_sleep && !has_commands_.load(std::memory_order_seq_cst)) {
        ++statistics_.sleeps;
        std::array<pollfd, 2> polled{};
        polled[0] = {event_.get(), POLLIN, 0};
        nfds_t count = 1;
        if (is_connected_) {
            polled[1] = {connection_->fd(), POLLIN, 0};
            if (connection_->has_backlog())
                polled[1].events |= POLLOUT;
            count = 2;
        }
        std::int64_t deadline = -1;
        for (const auto& rings : rings_)
            for (const Ring* ring : rings)
                if (const std::int64_t held = ring->side->held_until_ns();
                    held >= 0 && (deadline < 0 || held < deadline))
                    deadline = held;
        if (is_connected_ && has_in_flight()) {
            const std::int64_t silent_at = nanoseconds_of(last_result_time_ + options_.silence);
            deadline = deadline < 0 ? silent_at : std::min(deadline, silent_at);
        }
        timespec limit{};
        if (deadline >= 0) {
            const std::int64_t remaining = std::max<std::int64_t>(deadline - nanoseconds_of(Clock::now()), 0);
            limit = {remaining / 1'000'000'000, remaining % 1'000'000'000};
        }
        // The result is not needed: the next pass checks everything.
        ppoll(polled.data(), count, deadline >= 0 ? &limit : nullptr, nullptr);
    }
    std::uint64_t events = 0;
    [[maybe_unused]] const ssize_t bytes_read = ::read(event_.get(), &events, sizeof events);
    for (const auto& rings : rings_)
        for (Ring* ring : rings)
            if (std::exchange(ring->is_asleep, false))
                ring->side->end_sleep();
}

} // namespace gdrkit::usrbio::agent
