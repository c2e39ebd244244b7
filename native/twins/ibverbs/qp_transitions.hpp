// Checks which attributes each state transition of a connected queue pair (RC, UC, XRC) requires and allows.
#pragma once

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

// Return the mask without the attributes that the kernel ignores for this type (modify_qp_mask of ib_uverbs): an XRC
// send queue pair has no responder, and an XRC receive queue pair has no requester. Programs such as perftest set these
// attributes all the same.
int remove_ignored_attributes(ibv_qp_type type, int attr_mask);

// Return 0, or EINVAL if the transition does not exist, a required attribute is missing, or an attribute is not
// allowed.
int check_transition(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int attr_mask);

// Return 0, or EINVAL if an attribute that `attr_mask` selects is out of range.
int check_attribute_values(const ibv_qp_attr& attr, int attr_mask);

} // namespace gdrkit::twin::verbs
