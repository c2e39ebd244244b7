// The file in which gdrkit keeps which NICs were seen to move bytes to and from which GPUs. The agent and
// `gdrkit reach` write it (gdrkit/registration/reach_table.py).
#pragma once

#include "usrbio/client/cuda_driver.hpp"

namespace gdrkit::usrbio {

// Returns whether a NIC of this machine moved bytes to and from the memory of the GPU with this UUID, as the file says.
// Returns false if there is no such file of this user.
bool is_reached_by_nic(const cuda::Uuid& uuid);

} // namespace gdrkit::usrbio
