// The binary interface of the verbs twin: the real verbs header, whose functions the twin exports, and static
// assertions of the layouts that the twin relies on.
#pragma once

#pragma GCC visibility push(default)
#include <infiniband/verbs.h>
#pragma GCC visibility pop

#include <cstddef>

// The header defines these three as macros for clients. The twin defines the functions themselves.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

namespace gdrkit::twin::verbs {

// Size of ibv_port_attr before port_cap_flags2 was added. A client without the verbs_context extension passes a
// structure of this size to ibv_query_port.
inline constexpr std::size_t compat_port_attr_bytes = offsetof(ibv_port_attr, port_cap_flags2);

static_assert(compat_port_attr_bytes == 48);
static_assert(sizeof(ibv_gid) == 16);
static_assert(sizeof(ibv_gid_entry) == 32);
static_assert(sizeof(ibv_wc) == 48);
static_assert(sizeof(ibv_sge) == 16);
static_assert(sizeof(ibv_mr) == 48);
static_assert(offsetof(ibv_context, ops) == 8);
static_assert(sizeof(ibv_context_ops) == 32 * sizeof(void*));
static_assert(offsetof(ibv_context, async_fd) == offsetof(ibv_context, cmd_fd) + 4);
static_assert(offsetof(ibv_context, abi_compat) == sizeof(ibv_context) - sizeof(void*));
// verbs_get_ctx finds the extension at a negative offset and reads its size from just before the context.
static_assert(offsetof(verbs_context, sz) + sizeof(std::size_t) == offsetof(verbs_context, context));
static_assert(offsetof(verbs_context, context) + sizeof(ibv_context) == sizeof(verbs_context));
// An extended CQ (ibv_cq_ex) begins with the members of an ibv_cq.
static_assert(offsetof(ibv_cq_ex, comp_mask) == sizeof(ibv_cq));

} // namespace gdrkit::twin::verbs
