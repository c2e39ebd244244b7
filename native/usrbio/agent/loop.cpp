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

constexpr unsigned looks_a_receive = 4;
// So much longer it looks with operations in flight, of which one will end soon.
constexpr int spins_in_flight = 4;

std::int64_t nanoseconds_of(std::chrono::steady_clock::time_point when) noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

[[noreturn]] void refuse(int number, const char* what) {
    throw std::system_error(number, std::generic_category(), what);
}

} // namespace

// The agent has a thread for each client. malloc gives threads up to eight arenas for each processor, which grow by
// what ended clients leave scattered there. Two are enough, since the loop allocates hardly ever.
void limit_arenas() noexcept {
    mallopt(M_ARENA_MAX, 2);
}

Loop::Loop(const Options& options, const std::array<std::string, priority_classes>& semaphores)
    : options_(options), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_)
        refuse(errno, "eventfd");
    flights_.resize(options_.outstanding_max);
    for (std::size_t slot = flights_.size(); slot-- > 0;)
        free_.push_back(static_cast<std::uint32_t>(slot));
    watcher_ = std::make_unique<Watcher>(semaphores, event_.get());
    thread_ = std::thread(&Loop::run, this);
}

Loop::~Loop() {
    stop();
}

void Loop::stop() {
    {
        const std::lock_guard lock(commands_lock_);
        if (!is_over_)
            commands_.emplace_back([this] { is_stopping_ = true; });
        is_over_ = true;
        has_commands_ = true;
    }
    wake();
    if (thread_.joinable())
        thread_.join();
    watcher_.reset();
}

void Loop::wake() noexcept {
    const std::uint64_t one = 1;
    // It fails only when the counter is full, and then the event is there already.
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

template <class Function> auto Loop::call(Function function) -> std::invoke_result_t<Function> {
    auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Function>()>>(std::move(function));
    auto result = task->get_future();
    {
        const std::lock_guard lock(commands_lock_);
        if (is_over_)
            refuse(ESHUTDOWN, "the loop has ended");
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

Client& Loop::client_of(std::uint64_t number) {
    const auto found = clients_.find(number);
    if (found == clients_.end())
        refuse(ENOENT, "no such client");
    return *found->second;
}

void Loop::add_client(std::uint64_t client) {
    call([&] {
        auto made = std::make_unique<Client>();
        made->number = client;
        if (!clients_.emplace(client, std::move(made)).second)
            refuse(EEXIST, "the client exists");
    });
}

void Loop::remove_client(std::uint64_t client) {
    call([&] {
        const Client& found = client_of(client);
        if (!found.buffers.empty() || !found.files.empty() || !found.rings.empty())
            refuse(EBUSY, "the client has something");
        clients_.erase(client);
    });
}

void Loop::add_buffer(std::uint64_t client, const BufferSpec& spec) {
    call([&] {
        auto buffer = std::make_unique<Buffer>();
        buffer->spec = spec;
        if (!client_of(client).buffers.emplace(spec.id, std::move(buffer)).second)
            refuse(EEXIST, "the buffer exists");
    });
}

void Loop::set_file(std::uint64_t client, const FileSpec& spec) {
    call([&] {
        auto& file = client_of(client).files[spec.inode];
        if (file && file->is_closing)
            refuse(EBUSY, "the file is being removed");
        if (!file)
            file = std::make_unique<File>();
        file->spec = spec;
    });
}

void Loop::add_ring(std::uint64_t client, const RingSpec& spec, int fd) {
    call([&] {
        Client& owner = client_of(client);
        if (owner.rings.contains(spec.id))
            refuse(EEXIST, "the ring exists");
        auto ring = std::make_unique<Ring>(owner, spec, fd);
        auto& same = rings_.at(static_cast<std::size_t>(spec.priority));
        same.push_back(ring.get());
        owner.rings[spec.id].ring = std::move(ring);
    });
}

bool Loop::drained(const std::function<Drained()>& ask, std::chrono::milliseconds timeout) {
    const Drained waiting = call(ask);
    return !waiting || waiting->get_future().wait_for(timeout) == std::future_status::ready;
}

bool Loop::remove_buffer(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout) {
    return drained(
        [&]() -> Drained {
            auto& buffers = client_of(client).buffers;
            const auto found = buffers.find(id);
            if (found == buffers.end())
                return nullptr;
            Buffer& buffer = *found->second;
            buffer.is_closing = true;
            if (buffer.in_flight == 0) {
                buffers.erase(found);
                return nullptr;
            }
            return buffer.waiting.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_file(std::uint64_t client, std::uint64_t inode, std::chrono::milliseconds timeout) {
    return drained(
        [&]() -> Drained {
            auto& files = client_of(client).files;
            const auto found = files.find(inode);
            if (found == files.end())
                return nullptr;
            File& file = *found->second;
            file.is_closing = true;
            if (file.in_flight == 0) {
                files.erase(found);
                return nullptr;
            }
            return file.waiting.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

bool Loop::remove_ring(std::uint64_t client, const Id& id, std::chrono::milliseconds timeout) {
    return drained(
        [&]() -> Drained {
            auto& rings = client_of(client).rings;
            const auto found = rings.find(id);
            if (found == rings.end())
                return nullptr;
            Ring& ring = *found->second.ring;
            ring.is_closing = true;
            forget(ring);
            if (ring.side->outstanding() == 0) {
                rings.erase(found);
                return nullptr;
            }
            return found->second.waiting.emplace_back(std::make_shared<std::promise<void>>());
        },
        timeout);
}

// Out of the rings that are served; what is in flight of it still ends in its memory.
void Loop::forget(Ring& ring) {
    std::erase(rings_[static_cast<std::size_t>(ring.spec.priority)], &ring);
}

void Loop::connect(int socket, std::vector<std::uint16_t> lanes, std::uint64_t generation) {
    auto connection = std::make_unique<Connection>(Descriptor(socket));
    call([&] {
        if (connection_)
            refuse(EBUSY, "connected already");
        if (lanes.empty())
            refuse(EINVAL, "a connection without lanes");
        connection_ = std::move(connection);
        lanes_ = lanes;
        generation_ = generation;
        is_connected_ = true;
        has_refusal_ = false;
        heard_ = Clock::now();
        for (std::uint32_t slot = 0; slot < flights_.size(); ++slot)
            if (flights_[slot].ring != nullptr)
                send(slot);
        if (!pending_.empty())
            statistics_.batches += connection_->queue(pending_);
        pending_.clear();
    });
}

bool Loop::disconnect() {
    return call([&] {
        if (is_connected_)
            ++statistics_.disconnects;
        is_connected_ = false;
        connection_.reset();
        pending_.clear();
        for (std::uint32_t slot = 0; slot < flights_.size(); ++slot)
            if (flights_[slot].ring != nullptr && (!has_refusal_ || flights_[slot].buffer->is_refused))
                complete(slot, -EREMOTEIO);
        announce();
        return has_refusal_;
    });
}

void Loop::abandon() {
    call([&] {
        if (!has_refusal_)
            return;
        has_refusal_ = false;
        for (std::uint32_t slot = 0; slot < flights_.size(); ++slot)
            if (flights_[slot].ring != nullptr)
                complete(slot, -EREMOTEIO);
        announce();
    });
}

Statistics Loop::statistics() {
    return call([&] {
        statistics_.outstanding = flights_.size() - free_.size();
        return statistics_;
    });
}

void Loop::tell(const Event& event) {
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
    for (unsigned vain = 0; !is_stopping_;) {
        bool worked = run_commands();
        worked |= drain_rings();
        // A look at the socket is a system call, one at the rings is not.
        if (worked || vain % looks_a_receive == 0)
            worked |= send_and_receive();
        announce();
        vain = worked ? 0 : vain + 1;
        const Clock::time_point now = Clock::now();
        worked |= is_silent(now);
        if (worked) {
            last_work = now;
        } else if (now - last_work >= options_.spin * (has_flights() ? spins_in_flight : 1)) {
            sleep();
            last_work = Clock::now();
            vain = 0;
        } else {
            // Whoever is to bring the next work may need this processor.
            sched_yield();
        }
    }
    // What nobody removed goes with the loop, in this thread, before its memory does.
    for (auto& same : rings_)
        same.clear();
    clients_.clear();
}

// False: there is work, nobody sleeps.
bool Loop::announce_sleep() {
    for (const auto& same : rings_) {
        for (Ring* ring : same) {
            if (ring->memory.was_cut() || !ring->side->prepare_to_sleep())
                return false;
            ring->is_asleep = true;
        }
    }
    return true;
}

void Loop::sleep() {
    // A loop that can take nothing waits for the server alone: whatever is submitted meanwhile waits too.
    const bool may_sleep = is_full() || announce_sleep();
    if (may_sleep && !has_commands_.load(std::memory_order_seq_cst)) {
        ++statistics_.sleeps;
        std::array<pollfd, 2> wanted{};
        wanted[0] = {event_.get(), POLLIN, 0};
        nfds_t count = 1;
        if (is_connected_) {
            wanted[1] = {connection_->fd(), POLLIN, 0};
            if (connection_->has_backlog())
                wanted[1].events |= POLLOUT;
            count = 2;
        }
        std::int64_t until = -1;
        for (const auto& same : rings_)
            for (const Ring* ring : same)
                if (const std::int64_t held = ring->side->held_until_ns(); held >= 0 && (until < 0 || held < until))
                    until = held;
        if (is_connected_ && has_flights()) {
            const std::int64_t silent = nanoseconds_of(heard_ + options_.silence);
            until = until < 0 ? silent : std::min(until, silent);
        }
        timespec limit{};
        if (until >= 0) {
            const std::int64_t left = std::max<std::int64_t>(until - nanoseconds_of(Clock::now()), 0);
            limit = {left / 1'000'000'000, left % 1'000'000'000};
        }
        // Whatever it says, the next pass looks at everything.
        ppoll(wanted.data(), count, until >= 0 ? &limit : nullptr, nullptr);
    }
    std::uint64_t events = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &events, sizeof events);
    for (const auto& same : rings_)
        for (Ring* ring : same)
            if (std::exchange(ring->is_asleep, false))
                ring->side->woke();
}

} // namespace gdrkit::usrbio::agent
