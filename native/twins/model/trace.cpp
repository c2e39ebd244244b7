#include "model/trace.hpp"

#include <time.h>

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <mutex>

namespace gdrkit::twin {
namespace {

constexpr std::size_t kept_most = 512;

struct Calls {
    std::mutex mutex;
    std::deque<std::string> lines;
};

Calls& calls() {
    static auto* const all = new Calls;
    return *all;
}

// Arguments are numbers, and strings that a client gave: what JSON would have to escape is shown as a dot.
std::string plain(const char* text) {
    std::string line = text;
    for (char& letter : line) {
        if (letter < ' ' || letter > '~' || letter == '"' || letter == '\\') {
            letter = '.';
        }
    }
    return line;
}

} // namespace

void trace(const char* format, ...) {
    char text[512];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    const long long now_ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
    Calls& all = calls();
    std::lock_guard lock(all.mutex);
    all.lines.push_back(std::to_string(now_ns) + " " + plain(text));
    if (all.lines.size() > kept_most) {
        all.lines.pop_front();
    }
}

std::string trace_json() {
    Calls& all = calls();
    std::lock_guard lock(all.mutex);
    std::string json = "[";
    for (const std::string& line : all.lines) {
        json += (json.size() > 1 ? ",\"" : "\"") + line + "\"";
    }
    return json + "]";
}

} // namespace gdrkit::twin
