#include "engine/engine.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "engine/place.hpp"

namespace gdrkit::engine {
namespace {

constexpr std::size_t jobs_max = 256;
constexpr unsigned long timer_slack_ns = 1000;

} // namespace

// Staging memory and a stream for one short transfer at a time.
struct SmallLane {
    SmallLane(cuda::Context context, int node) : staging(Engine::small_bytes_max, node), lane(context, 0) {
        staging.pin();
    }
    ~SmallLane() {
        cuda::driver().context_push(lane.context());
        lane.drain(); // No copy may use the staging memory when it is unpinned.
        staging.unpin();
        cuda::Context popped = nullptr;
        cuda::driver().context_pop(&popped);
    }
    Staging staging;
    Lane lane;
};

Engine::Engine(const Tuning& tuning, int node)
    : tuning_(tuning), node_(node),
      staging_(tuning.workers_count * slab_bytes_of(tuning) + tuning.hauls_count * tuning.haul_bytes, node),
      hauls_(contexts_, staging_, staging_.at() + tuning.workers_count * slab_bytes_of(tuning), tuning) {}

Engine::~Engine() {
    close();
}

void Engine::start_threads() {
    // The threads block all signals, which the program's own threads handle.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
        while (threads_.size() < tuning_.workers_count) {
            threads_.emplace_back([this, index = threads_.size()] { work(index); });
        }
    } catch (const std::system_error& error) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        // The engine works with a single thread, but slowly.
        if (threads_.empty()) {
            throw kernel_error("pthread_create", error.code().value());
        }
        return;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::work(std::size_t index) {
    pthread_setname_np(pthread_self(), "gdrkit-engine");
    prctl(PR_SET_TIMERSLACK, timer_slack_ns); // The thread sleeps for microseconds, see Lane::wait.
    if (cpu_set_t processors; processors_of(node_, processors)) {
        pthread_setaffinity_np(pthread_self(), sizeof processors, &processors);
    }
    Pump pump(*this, contexts_, staging_, hauls_, staging_.at() + index * slab_bytes_of(tuning_), tuning_);
    pump.run();
}

void Engine::submit(const std::shared_ptr<Job>& job) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return jobs_.size() < jobs_max || closing_; });
    if (closing_) {
        throw kernel_error("submit", ESHUTDOWN);
    }
    if (threads_.empty()) {
        start_threads();
    }
    jobs_.push_back(job);
    ++epoch_;
    const std::size_t wanted = std::min(job->pieces_count(), threads_.size());
    if (wanted == threads_.size()) {
        changed_.notify_all();
    } else {
        for (std::size_t each = 0; each < wanted; ++each) {
            changed_.notify_one();
        }
    }
}

Taken Engine::next(Piece& piece, bool wait) {
    std::unique_lock lock(mutex_);
    for (;;) {
        const std::uint64_t seen = epoch_;
        bool busy = false;
        for (; !loading_.empty(); loading_.pop_front()) {
            if (Haul::claim(loading_.front(), piece)) {
                return Taken::piece;
            }
        }
        for (std::size_t index = 0; index < jobs_.size();) {
            const std::shared_ptr<Job> job = jobs_[index];
            lock.unlock();
            const Taken taken = job->take(piece, hauls_.opening());
            if (taken == Taken::piece) {
                piece.job = job;
                return taken;
            }
            busy |= taken == Taken::busy;
            lock.lock();
            if (const auto at = std::find(jobs_.begin(), jobs_.end(), job); at == jobs_.end()) {
                index = 0; // Another thread has removed the job meanwhile.
            } else if (taken == Taken::nothing) {
                jobs_.erase(at);
                room_.notify_one();
            } else {
                index = static_cast<std::size_t>(at - jobs_.begin()) + 1;
            }
        }
        if (seen != epoch_) {
            continue;
        }
        if (closing_ && !busy) {
            return Taken::nothing;
        }
        if (!wait) {
            return Taken::busy;
        }
        changed_.wait(lock, [&] { return epoch_ != seen || (closing_ && !busy); });
    }
}

void Engine::let_others_go_on() {
    const std::lock_guard lock(mutex_);
    ++epoch_;
    // The calling worker usually continues itself. At the end, all workers must see that nothing is left.
    if (closing_) {
        changed_.notify_all();
    } else {
        changed_.notify_one();
    }
}

// A null `haul` means that the worker which wanted to open one has failed.
void Engine::share(std::shared_ptr<Haul> haul) {
    const std::lock_guard lock(mutex_);
    ++epoch_;
    if (haul) {
        loading_.push_back(std::move(haul));
    }
    hauls_.opening().store(false, std::memory_order_relaxed);
    changed_.notify_all();
}

std::unique_ptr<SmallLane> Engine::take_small_lane(int device) {
    {
        const std::lock_guard lock(small_mutex_);
        std::vector<std::unique_ptr<SmallLane>>& free = small_[device];
        if (!free.empty()) {
            std::unique_ptr<SmallLane> found = std::move(free.back());
            free.pop_back();
            return found;
        }
    }
    return nullptr;
}

Moved Engine::transfer_small(Direction direction, File& file, std::uint64_t offset, std::uint64_t address,
                             std::uint64_t length, int device) {
    if (device == host_memory) {
        auto* const memory = reinterpret_cast<std::byte*>(address);
        return direction == Direction::read ? read_buffered(file, offset, length, memory)
                                            : write_buffered(file, offset, length, memory);
    }
    std::unique_ptr<SmallLane> small = take_small_lane(device);
    const cuda::Context context = small ? small->lane.context() : contexts_.of(device);
    Moved moved;
    {
        const CurrentContext current(context);
        try {
            if (!small) {
                small = std::make_unique<SmallLane>(context, node_);
            }
            std::byte* const staging = small->staging.at();
            if (direction == Direction::read) {
                moved = read_buffered(file, offset, length, staging);
                if (moved.bytes != 0) {
                    small->lane.to_device(address, staging, moved.bytes);
                    small->lane.synchronize();
                }
            } else {
                small->lane.to_host(staging, address, length);
                small->lane.synchronize();
                moved = write_buffered(file, offset, length, staging);
            }
        } catch (const Error& error) {
            moved.bytes = 0;
            moved.failure = error.failure();
            // A copy may still run. It must be over when this function returns: the caller may free its memory, and the
            // next transfer uses the staging memory.
            if (small) {
                small->lane.drain();
            }
        }
    }
    if (small) {
        const std::lock_guard lock(small_mutex_);
        small_[device].push_back(std::move(small));
    }
    return moved;
}

void Engine::close() {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) {
            return;
        }
        closed_ = true;
        closing_ = true;
        ++epoch_;
        changed_.notify_all();
        room_.notify_all();
    }
    for (std::thread& each : threads_) {
        each.join();
    }
    threads_.clear();
    {
        const std::lock_guard lock(small_mutex_);
        small_.clear();
    }
    hauls_.close();
    if (const cuda::Context context = contexts_.any(); context != nullptr) {
        cuda::driver().context_push(context);
        staging_.unpin();
        cuda::Context popped = nullptr;
        cuda::driver().context_pop(&popped);
    }
}

} // namespace gdrkit::engine
