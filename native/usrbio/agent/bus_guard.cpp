// The SIGBUS handler of the agent, and the table of the ranges that it guards.
#include "usrbio/agent/bus_guard.hpp"

#include <csignal>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>

#include "usrbio/host_page.hpp"

namespace gdrkit::usrbio::agent {
namespace {

std::uintptr_t page_bytes; // Set before the handler is installed, because a signal handler must not call sysconf.
std::array<GuardedRange, 65536> guarded_ranges;
std::atomic<std::size_t> ranges_end{0}; // All used entries are below this index.
std::mutex allocation_lock;
std::size_t free_search_begin = 0; // All entries below this index are used. Protected by allocation_lock.
struct sigaction previous_action;

// The SIGBUS handler. It uses only operations that are allowed in a signal handler: atomics and the mmap system call.
void on_bus_error(int signal_number, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    const std::size_t search_end = ranges_end.load(std::memory_order_acquire);
    // The search goes on after a match, because ranges of several clients may contain the address.
    bool is_guarded = false;
    for (std::size_t index = 0; index < search_end; ++index) {
        GuardedRange& range = guarded_ranges[index];
        const std::uintptr_t begin = range.begin.load(std::memory_order_acquire);
        if (begin == 0 || address < begin || address >= range.end.load(std::memory_order_acquire))
            continue;
        void* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
        if (!is_guarded && mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                                0) == MAP_FAILED)
            break; // Without a page, the access would fail again. Handle the address as unguarded.
        range.has_bus_error.store(true, std::memory_order_relaxed);
        is_guarded = true;
    }
    errno = saved_errno;
    if (is_guarded)
        return;
    // The address is not in a guarded range, so call the handler that was installed before. If there was none, restore
    // the default action: the faulting instruction raises SIGBUS again and ends the process.
    if ((previous_action.sa_flags & SA_SIGINFO) != 0 && previous_action.sa_sigaction != nullptr) {
        previous_action.sa_sigaction(signal_number, info, context);
    } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
        previous_action.sa_handler(signal_number);
    } else {
        std::signal(SIGBUS, SIG_DFL);
    }
}

void install_handler() {
    static const int install_error = [] {
        page_bytes = host_page_bytes();
        struct sigaction action {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        return sigaction(SIGBUS, &action, &previous_action) == 0 ? 0 : errno;
    }();
    if (install_error != 0)
        throw std::system_error(install_error, std::generic_category(), "sigaction(SIGBUS) failed");
}

} // namespace

BusGuard::BusGuard(void* base, std::size_t length, Purpose purpose) : range_(nullptr) {
    install_handler();
    const std::lock_guard lock(allocation_lock);
    const std::size_t allowed_end = purpose == Purpose::buffer ? guarded_ranges.size() / 2 : guarded_ranges.size();
    for (std::size_t index = free_search_begin; index < allowed_end; ++index) {
        GuardedRange& range = guarded_ranges[index];
        if (range.begin.load(std::memory_order_relaxed) != 0)
            continue;
        range.has_bus_error.store(false, std::memory_order_relaxed);
        const auto begin = reinterpret_cast<std::uintptr_t>(base);
        range.end.store(begin + length, std::memory_order_release);
        range.begin.store(begin, std::memory_order_release); // Last: a `begin` that is not 0 puts the entry into use.
        if (index >= ranges_end.load(std::memory_order_relaxed))
            ranges_end.store(index + 1, std::memory_order_release);
        range_ = &range;
        free_search_begin = index + 1;
        return;
    }
    throw std::bad_alloc();
}

BusGuard::~BusGuard() {
    const std::lock_guard lock(allocation_lock);
    range_->begin.store(0, std::memory_order_release);
    free_search_begin = std::min(free_search_begin, static_cast<std::size_t>(range_ - guarded_ranges.data()));
}

} // namespace gdrkit::usrbio::agent
