// The log of the library, which goes to stderr. The environment variable HF3FS_USRBIO_LIB_LOG sets the level.
#pragma once

namespace gdrkit::usrbio {

enum class LogLevel { debug, info, warning, error, off };

bool log_enabled(LogLevel level) noexcept;

// Writes one line by one system call, so that lines of different threads do not mix.
void log_line(LogLevel level, const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));

} // namespace gdrkit::usrbio
