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

std::uintptr_t page_bytes; // Set before the handler is installed, which may not ask for it.
std::array<GuardSlot, 65536> slots;
std::atomic<std::size_t> slots_used{0}; // No slot at or above it was ever taken: the handler looks no further.
std::mutex taking;
struct sigaction previous;

// Only what may be called in a signal handler: atomics and the mmap system call.
void on_bus_error(int number, siginfo_t* info, void* context) {
    const int saved = errno;
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    const std::size_t used = slots_used.load(std::memory_order_acquire);
    for (std::size_t index = 0; index < used; ++index) {
        GuardSlot& slot = slots[index];
        const std::uintptr_t begin = slot.begin.load(std::memory_order_acquire);
        if (begin == 0 || address < begin || address >= slot.end.load(std::memory_order_acquire))
            continue;
        void* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            break;
        slot.hit.store(true, std::memory_order_relaxed);
        errno = saved;
        return;
    }
    errno = saved;
    // Not ours: whoever was there before decides; by default the process ends where it faulted.
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

BusGuard::BusGuard(void* base, std::size_t length) : slot_(nullptr) {
    install();
    const std::lock_guard lock(taking);
    for (std::size_t index = 0; index < slots.size(); ++index) {
        GuardSlot& slot = slots[index];
        if (slot.begin.load(std::memory_order_relaxed) != 0)
            continue;
        slot.hit.store(false, std::memory_order_relaxed);
        const auto begin = reinterpret_cast<std::uintptr_t>(base);
        slot.end.store(begin + length, std::memory_order_release);
        slot.begin.store(begin, std::memory_order_release);
        if (index >= slots_used.load(std::memory_order_relaxed))
            slots_used.store(index + 1, std::memory_order_release);
        slot_ = &slot;
        return;
    }
    throw std::bad_alloc();
}

BusGuard::~BusGuard() {
    slot_->begin.store(0, std::memory_order_release);
}

} // namespace gdrkit::usrbio::agent
