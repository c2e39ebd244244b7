// Implements the ledger of live handles and the report of double releases.

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

namespace gdrkit::twin {
namespace {

struct Stack {
    std::array<void*, 24> frames{};
    int count = 0;

    static Stack here() {
        Stack stack;
        stack.count = backtrace(stack.frames.data(), static_cast<int>(stack.frames.size()));
        return stack;
    }
};

using Key = std::pair<std::string_view, std::uint64_t>;

struct ReleasedHandle {
    Stack created, released;
    std::uint64_t number = 0; // sequence number of the release, since a handle value may be reused and released again
};

struct Ledger {
    std::mutex mutex;
    std::map<Key, Stack> live;
    std::map<Key, ReleasedHandle> released;
    std::deque<std::pair<Key, std::uint64_t>> release_order; // oldest release first
    std::uint64_t releases = 0;
};

Ledger& ledger() {
    static auto* const the_ledger = new Ledger;
    return *the_ledger;
}

void print_stack(const char* title, const Stack& stack) {
    std::fprintf(stderr, "gdrkit twin: %s\n", title);
    std::fflush(stderr);
    backtrace_symbols_fd(stack.frames.data(), stack.count, STDERR_FILENO);
}

} // namespace

void ledger_add(std::string_view kind, std::uint64_t handle) {
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    // A reused address is a new handle: releasing it is not a double release of the old one.
    all.released.erase(Key{kind, handle});
    all.live.emplace(Key{kind, handle}, Stack::here());
}

bool ledger_remove(std::string_view kind, std::uint64_t handle) {
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    const Key key{kind, handle};
    if (auto position = all.live.find(key); position != all.live.end()) {
        const std::uint64_t number = ++all.releases;
        all.released.insert_or_assign(key, ReleasedHandle{position->second, Stack::here(), number});
        all.live.erase(position);
        all.release_order.emplace_back(key, number);
        if (all.release_order.size() > releases_remembered) {
            const auto& [oldest_key, oldest_number] = all.release_order.front();
            if (const auto oldest = all.released.find(oldest_key);
                oldest != all.released.end() && oldest->second.number == oldest_number) {
                all.released.erase(oldest);
            }
            all.release_order.pop_front();
        }
        return true;
    }
    if (auto position = all.released.find(key); position != all.released.end()) {
        std::fprintf(stderr, "gdrkit twin: double release of %.*s 0x%llx\n", static_cast<int>(kind.size()), kind.data(),
                     static_cast<unsigned long long>(handle));
        print_stack("it was created at", position->second.created);
        print_stack("released first at", position->second.released);
        print_stack("released again at", Stack::here());
        std::abort();
    }
    return false;
}

bool ledger_holds(std::string_view kind, std::uint64_t handle) {
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    return all.live.contains(Key{kind, handle});
}

std::string ledger_json() {
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    std::map<std::string_view, std::size_t> counts;
    for (const auto& [key, stack] : all.live) {
        ++counts[key.first];
    }
    std::string json = "{";
    for (const auto& [kind, count] : counts) {
        json += (json.size() > 1 ? ",\"" : "\"") + std::string(kind) + "\":" + std::to_string(count);
    }
    return json + "}";
}

std::string ledger_text() {
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    std::string text;
    for (const auto& [key, stack] : all.live) {
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
