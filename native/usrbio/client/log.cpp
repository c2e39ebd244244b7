#include "usrbio/client/log.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace gdrkit::usrbio {

namespace {

// 3FS accepts longer values here too ("DBG3:default=..."). They begin with the level.
LogLevel parse_level(const char* setting) noexcept {
    const std::string_view word = setting == nullptr ? "" : setting;
    if (word.starts_with("DBG") || word.starts_with("DEBUG")) {
        return LogLevel::debug;
    }
    if (word.starts_with("INFO")) {
        return LogLevel::info;
    }
    if (word.starts_with("ERR") || word.starts_with("CRITICAL") || word.starts_with("FATAL")) {
        return LogLevel::error;
    }
    return word == "OFF" ? LogLevel::off : LogLevel::warning;
}

} // namespace

bool log_enabled(LogLevel level) noexcept {
    static const LogLevel level_min = parse_level(std::getenv("HF3FS_USRBIO_LIB_LOG"));
    return level >= level_min && level_min != LogLevel::off;
}

void log_line(LogLevel level, const char* format, ...) noexcept {
    if (!log_enabled(level)) {
        return;
    }
    static constexpr const char* names[] = {"DBG", "INFO", "WARN", "ERR"};
    char line[1024];
    int length = std::snprintf(line, sizeof(line), "hf3fs_usrbio %s: ", names[static_cast<int>(level)]);
    std::va_list arguments;
    va_start(arguments, format);
    const int message_length =
        std::vsnprintf(line + length, sizeof(line) - 1 - static_cast<std::size_t>(length), format, arguments);
    va_end(arguments);
    length = std::min(length + std::max(message_length, 0), static_cast<int>(sizeof(line)) - 2);
    line[length] = '\n';
    // If stderr is closed, there is no other way to report it.
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, static_cast<std::size_t>(length) + 1);
}

} // namespace gdrkit::usrbio
