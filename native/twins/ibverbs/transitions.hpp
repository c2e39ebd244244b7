// Which attributes each transition of a reliable-connected queue pair needs and takes.
#pragma once

#include "ibverbs/abi.hpp"

namespace gdrkit::twin::verbs {

// 0, or EINVAL when there is no such transition, a required attribute is missing or one is there that does not belong.
int check_transition(ibv_qp_state from, ibv_qp_state to, int attr_mask);

// 0, or EINVAL when a value in `attr` that the mask names is out of range.
int check_values(const ibv_qp_attr& attr, int attr_mask);

} // namespace gdrkit::twin::verbs
