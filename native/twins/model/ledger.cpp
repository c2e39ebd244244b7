// The ledger: the handles that a twin has returned to the client and that were not released yet. It also remembers the
// last releases, and reports a second release of the same handle.

#include "model/ledger.hpp"

#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "model/usage.hpp"

namespace gdrkit::twin {
namespace {

struct Stack {
    std::array<void*, 24> frames{};
    int count = 0;

    static Stack capture() {
        Stack stack;
        stack.count = backtrace(stack.frames.data(), static_cast<int>(stack.frames.size()));
        return stack;
    }
};

// The kind and the value of a handle.
using HandleKey = std::pair<std::string_view, std::uint64_t>;

struct ReleasedHandle {
    Stack creation_stack, release_stack;
    // The number distinguishes this release from a later release of the same handle value, because a twin may reuse
    // values.
    std::uint64_t sequence_number = 0;
};

struct Ledger {
    std::mutex mutex;
    std::map<HandleKey, Stack> live_handles; // with the stack of the creation
    std::map<HandleKey, ReleasedHandle> released_handles;
    std::deque<std::pair<HandleKey, std::uint64_t>> release_order; // handle and sequence number, oldest release first
    std::uint64_t release_count = 0;
};

Ledger& ledger() {
    static auto* const instance = new Ledger;
    return *instance;
}

void print_stack(const char* title, const Stack& stack) {
    std::fprintf(stderr, "gdrkit twin: %s\n", title);
    std::fflush(stderr);
    backtrace_symbols_fd(stack.frames.data(), stack.count, STDERR_FILENO);
}

} // namespace

void record_open_handle(std::string_view kind, std::uint64_t handle) {
    record_object(kind);
    Ledger& ledger_state = ledger();
    std::lock_guard lock(ledger_state.mutex);
    // An allocator may reuse the address of a released object. Releasing the new object is not a double release.
    ledger_state.released_handles.erase(HandleKey{kind, handle});
    ledger_state.live_handles.emplace(HandleKey{kind, handle}, Stack::capture());
}

bool record_closed_handle(std::string_view kind, std::uint64_t handle) {
    Ledger& ledger_state = ledger();
    std::lock_guard lock(ledger_state.mutex);
    const HandleKey key{kind, handle};
    if (auto entry = ledger_state.live_handles.find(key); entry != ledger_state.live_handles.end()) {
        const std::uint64_t sequence_number = ++ledger_state.release_count;
        ledger_state.released_handles.insert_or_assign(
            key, ReleasedHandle{entry->second, Stack::capture(), sequence_number});
        ledger_state.live_handles.erase(entry);
        ledger_state.release_order.emplace_back(key, sequence_number);
        if (ledger_state.release_order.size() > max_remembered_releases) {
            const auto& [oldest_key, oldest_sequence_number] = ledger_state.release_order.front();
            if (const auto oldest = ledger_state.released_handles.find(oldest_key);
                oldest != ledger_state.released_handles.end() &&
                oldest->second.sequence_number == oldest_sequence_number) {
                ledger_state.released_handles.erase(oldest);
            }
            ledger_state.release_order.pop_front();
        }
        return true;
    }
    if (auto entry = ledger_state.released_handles.find(key); entry != ledger_state.released_handles.end()) {
        std::fprintf(stderr, "gdrkit twin: double release of %.*s 0x%llx\n", static_cast<int>(kind.size()), kind.data(),
                     static_cast<unsigned long long>(handle));
        print_stack("it was created at", entry->second.creation_stack);
        print_stack("released first at", entry->second.release_stack);
        print_stack("released again at", Stack::capture());
        std::abort();
    }
    return false;
}

bool ledger_holds(std::string_view kind, std::uint64_t handle) {
    Ledger& ledger_state = ledger();
    std::lock_guard lock(ledger_state.mutex);
    return ledger_state.live_handles.contains(HandleKey{kind, handle});
}

std::string ledger_json() {
    Ledger& ledger_state = ledger();
    std::lock_guard lock(ledger_state.mutex);
    std::map<std::string_view, std::size_t> counts;
    for (const auto& [key, stack] : ledger_state.live_handles) {
        ++counts[key.first];
    }
    std::string json = "{";
    for (const auto& [kind, count] : counts) {
        json += (json.size() > 1 ? ",\"" : "\"") + std::string(kind) + "\":" + std::to_string(count);
    }
    return json + "}";
}

std::string ledger_text() {
    Ledger& ledger_state = ledger();
    std::lock_guard lock(ledger_state.mutex);
    std::string text;
    for (const auto& [key, stack] : ledger_state.live_handles) {
        char line[64];
        std::snprintf(line, sizeof line, " 0x%llx created at\n", static_cast<unsigned long long>(key.second));
        text += std::string(key.first) + line;
        char** names = backtrace_symbols(stack.frames.data(), stack.count);
        for (int frame = 0; names != nullptr && frame < stack.count; ++frame) {
            text += std::string("    ") + names[frame] + "\n";
        }
        std::free(names);
    }
    return text;
}

} // namespace gdrkit::twin
