#include "usrbio/agent/bus_guard.hpp"

#include <csignal>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>

#include "usrbio/host_page.hpp"

namespace gdrkit::usrbio::agent {
namespace {

std::uintptr_t page_bytes; // It is set before the handler is installed, because a handler must not call sysconf.
std::array<GuardedRange, 65536> ranges;
std::atomic<std::size_t> ranges_used{0}; // No entry at or above this index was ever used, so the handler stops there.
std::mutex allocation_lock;
struct sigaction previous;

// Uses only operations that are allowed in a signal handler: atomics and the mmap system call.
void on_bus_error(int number, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    const std::size_t used = ranges_used.load(std::memory_order_acquire);
    for (std::size_t index = 0; index < used; ++index) {
        GuardedRange& range = ranges[index];
        const std::uintptr_t begin = range.begin.load(std::memory_order_acquire);
        if (begin == 0 || address < begin || address >= range.end.load(std::memory_order_acquire))
            continue;
        void* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            break;
        range.is_hit.store(true, std::memory_order_relaxed);
        errno = saved_errno;
        return;
    }
    errno = saved_errno;
    // The address is not in a guarded range. Call the handler that was installed before; by default the process ends at
    // the faulting instruction.
    if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction != nullptr) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
    } else {
        std::signal(SIGBUS, SIG_DFL);
    }
}

void install() {
    static const int status = [] {
        page_bytes = host_page_bytes();
        struct sigaction action {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        return sigaction(SIGBUS, &action, &previous) == 0 ? 0 : errno;
    }();
    if (status != 0)
        throw std::system_error(status, std::generic_category(), "sigaction");
}

} // namespace

BusGuard::BusGuard(void* base, std::size_t length) : range_(nullptr) {
    install();
    const std::lock_guard lock(allocation_lock);
    for (std::size_t index = 0; index < ranges.size(); ++index) {
        GuardedRange& range = ranges[index];
        if (range.begin.load(std::memory_order_relaxed) != 0)
            continue;
        range.is_hit.store(false, std::memory_order_relaxed);
        const auto begin = reinterpret_cast<std::uintptr_t>(base);
        range.end.store(begin + length, std::memory_order_release);
        range.begin.store(begin, std::memory_order_release);
        if (index >= ranges_used.load(std::memory_order_relaxed))
            ranges_used.store(index + 1, std::memory_order_release);
        range_ = &range;
        return;
    }
    throw std::bad_alloc();
}

BusGuard::~BusGuard() {
    range_->begin.store(0, std::memory_order_release);
}

} // namespace gdrkit::usrbio::agent
