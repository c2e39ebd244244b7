// The file in which gdrkit records which NICs have moved bytes to and from which GPUs. The agent and `gdrkit reach`
// write it (gdrkit/registration/reach_table.py).
#pragma once

#include "usrbio/client/cuda_driver.hpp"

namespace gdrkit::usrbio {

// Returns whether, according to the file, a NIC of this machine has moved bytes to and from the memory of the GPU with
// this UUID. Returns false if this user has no such file.
bool is_reached_by_nic(const cuda::Uuid& uuid);

} // namespace gdrkit::usrbio
