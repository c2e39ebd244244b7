// HF3FS_USRBIO_LIB_LOG: what the library says to stderr.
#pragma once

namespace gdrkit::usrbio {

enum class LogLevel { debug, info, warning, error, off };

bool log_enabled(LogLevel level) noexcept;

// One line, whole, whatever other threads say.
void log_line(LogLevel level, const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));

} // namespace gdrkit::usrbio
