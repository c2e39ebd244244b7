// The parameters: staged while the driver is closed, applied when it opens.
#pragma once

#include <cstddef>

#include "cufile/driver.hpp"

namespace gdrkit::twin::cufile {

// CUFileSizeTConfigParameter_t and CUFileBoolConfigParameter_t, as far as somebody here reads them.
enum SizeParameter {
    size_profile_stats = 0,
    size_max_direct_io_kb = 5,
    size_max_device_cache_kb = 6,
    size_per_buffer_cache_kb = 7,
    size_max_pinned_kb = 8,
    size_batch_entries = 9,
    size_poll_threshold_kb = 10,
    size_batch_timeout_ms = 11,
    size_parameters = 12,
};
enum BoolParameter { bool_poll_mode = 0, bool_allow_compat = 1, bool_force_compat = 2, bool_parameters = 14 };

// Environment and cufile.json (CUFILE_ENV_PATH_JSON) under what was set by call; called when the driver opens.
Modes apply_parameters();
// What is in force now, or would be.
std::size_t size_parameter(int which);
bool bool_parameter(int which);
void set_size_parameter(int which, std::size_t value);
void set_bool_parameter(int which, bool value);

} // namespace gdrkit::twin::cufile
