// Tests of the software twin of libibverbs: devices, ports and GIDs as a program queries them, unimplemented operations
// of a context, and the string functions.
#include <fstream>

#include "tests/ibverbs_support.hpp"

// Exported functions that verbs.h hides behind a macro (ibv_query_port) or does not declare.
#undef ibv_query_port
extern "C" {
int ibv_query_port(struct ibv_context*, std::uint8_t, struct _compat_ibv_port_attr*);
int ibv_read_sysfs_file(const char*, const char*, char*, std::size_t);
const char* ibv_get_sysfs_path(void);
}

using namespace gdrkit::twin::tests;

namespace {

void test_device_and_port_attributes(ibv_context* context) {
    ibv_device_attr attr{};
    CHECK(ibv_query_device(context, &attr) == 0);
    CHECK(attr.phys_port_cnt == 1 && attr.max_pkeys == 1 && attr.max_qp > 0 && attr.atomic_cap == IBV_ATOMIC_HCA);
    CHECK(attr.node_guid == ibv_get_device_guid(context->device));
    ibv_device_attr_ex extended{};
    CHECK(ibv_query_device_ex(context, nullptr, &extended) == 0);
    CHECK(extended.phys_port_cnt_ex == 1 && std::memcmp(&extended.orig_attr, &attr, sizeof attr) == 0);

    ibv_port_attr port_attr{};
    CHECK(___ibv_query_port(context, 1, &port_attr) == 0);
    CHECK(port_attr.state == IBV_PORT_ACTIVE && port_attr.link_layer == IBV_LINK_LAYER_ETHERNET &&
          port_attr.gid_tbl_len == 4);
    CHECK(port_attr.active_mtu == IBV_MTU_4096 && port_attr.flags == IBV_QPF_GRH_REQUIRED);
    CHECK(___ibv_query_port(context, 0, &port_attr) == EINVAL && ___ibv_query_port(context, 2, &port_attr) == EINVAL);
    // The function of the old ABI writes the 48 bytes of the old structure and no byte beyond it.
    std::uint8_t old_attr[52];
    std::memset(old_attr, 0xaa, sizeof old_attr);
    CHECK(ibv_query_port(context, 1, reinterpret_cast<struct _compat_ibv_port_attr*>(old_attr)) == 0);
    CHECK(old_attr[48] == 0xaa && old_attr[51] == 0xaa);
    CHECK(___ibv_query_port(context, 1, &port_attr) == 0 && std::memcmp(old_attr, &port_attr, 48) == 0);
}

// The GID table has four entries: the link-local GID of the device as RoCE v1 (index 0) and as RoCE v2 (index 1), and
// two empty entries.
void test_gids_identify_devices(ibv_context* context, ibv_context* other_context) {
    ibv_gid first_gid{}, second_gid{}, other_gid{};
    CHECK(ibv_query_gid(context, 1, 0, &first_gid) == 0 && ibv_query_gid(context, 1, 1, &second_gid) == 0);
    CHECK(std::memcmp(&first_gid, &second_gid, sizeof first_gid) == 0 && first_gid.raw[0] == 0xfe &&
          first_gid.raw[1] == 0x80);
    CHECK(first_gid.global.interface_id == ibv_get_device_guid(context->device));
    CHECK(ibv_query_gid(other_context, 1, 1, &other_gid) == 0 &&
          std::memcmp(&first_gid, &other_gid, sizeof first_gid) != 0);
    const ibv_gid empty_gid{};
    ibv_gid queried_gid = first_gid;
    CHECK(ibv_query_gid(context, 1, 3, &queried_gid) == 0 &&
          std::memcmp(&queried_gid, &empty_gid, sizeof queried_gid) == 0);
    errno = 0;
    CHECK(ibv_query_gid(context, 1, 4, &queried_gid) == -1 && errno == EINVAL);
    ibv_gid_entry entries[3];
    CHECK(ibv_query_gid_table(context, entries, 3, 0) == 2);
    CHECK(entries[0].gid_type == IBV_GID_TYPE_ROCE_V1 && entries[1].gid_type == IBV_GID_TYPE_ROCE_V2);
    CHECK(entries[1].gid_index == 1 && entries[1].port_num == 1);
    CHECK(ibv_query_gid_table(context, entries, 1, 0) == -EINVAL && ibv_query_gid_table(context, entries, 3, 1) < 0);
    ibv_gid_entry entry{};
    CHECK(ibv_query_gid_ex(context, 1, 1, &entry, 0) == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
    CHECK(ibv_query_gid_ex(context, 1, 2, &entry, 0) == ENODATA &&
          ibv_query_gid_ex(context, 1, 3, &entry, 0) == ENODATA);
    CHECK(ibv_query_gid_ex(context, 1, 4, &entry, 0) == EINVAL && ibv_query_gid_ex(context, 2, 0, &entry, 0) == EINVAL);
    __be16 pkey = 0;
    CHECK(ibv_query_pkey(context, 1, 0, &pkey) == 0 && pkey == 0xffff && ibv_get_pkey_index(context, 1, pkey) == 0);
    CHECK(ibv_query_pkey(context, 1, 1, &pkey) == -1 && ibv_get_pkey_index(context, 1, 0x1234) == -1);
}

// Every unimplemented operation in the function tables of the context fails with EOPNOTSUPP. Functions that return a
// pointer set errno; the others return the errno value.
void test_unimplemented_operations_fail(Endpoint* endpoint) {
    const auto is_unsupported = [](const void* result) {
        const bool is_expected = result == nullptr && errno == EOPNOTSUPP;
        errno = 0;
        return is_expected;
    };
    ibv_context* const context = endpoint->context;
    errno = 0;
    ibv_qp_init_attr_ex qp_attr{};
    qp_attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
    CHECK(is_unsupported(ibv_create_qp_ex(context, &qp_attr)));
    CHECK(is_unsupported(ibv_alloc_null_mr(endpoint->pd)));
    ibv_flow_attr flow_attr{};
    CHECK(is_unsupported(ibv_create_flow(endpoint->qp, &flow_attr)));
    ibv_counters_init_attr counters_attr{};
    CHECK(is_unsupported(ibv_create_counters(context, &counters_attr)));
    ibv_wq_init_attr wq_attr{};
    CHECK(is_unsupported(ibv_create_wq(context, &wq_attr)));
    ibv_modify_cq_attr cq_attr{};
    CHECK(ibv_modify_cq(endpoint->cq, &cq_attr) == EOPNOTSUPP);
    CHECK(ibv_advise_mr(endpoint->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, nullptr, 0) == EOPNOTSUPP);
    ibv_qp_rate_limit_attr rate_limit_attr{};
    CHECK(ibv_modify_qp_rate_limit(endpoint->qp, &rate_limit_attr) == EOPNOTSUPP);
    // No entry of the tables is null, so a program that calls an unimplemented operation gets an error and does not
    // crash.
    auto* const extended = verbs_get_ctx(context);
    CHECK(extended != nullptr && extended->sz == sizeof *extended);
    auto* const extended_ops = reinterpret_cast<void**>(extended);
    for (std::size_t index = 0; index < offsetof(verbs_context, _ABI_placeholder3) / sizeof(void*); ++index) {
        // `priv` is the only field that is not an operation.
        CHECK(extended_ops[index] != nullptr || index == offsetof(verbs_context, priv) / sizeof(void*));
    }
    auto* const ops = reinterpret_cast<void**>(&context->ops);
    for (std::size_t index = 0; index < sizeof context->ops / sizeof(void*); ++index) {
        CHECK(ops[index] != nullptr);
    }
}

void test_names_and_rates() {
    CHECK(std::string(ibv_wc_status_str(IBV_WC_SUCCESS)) == "success");
    CHECK(std::string(ibv_wc_status_str(IBV_WC_REM_ACCESS_ERR)) == "remote access error");
    CHECK(std::string(ibv_wc_status_str(static_cast<ibv_wc_status>(99))) == "unknown");
    CHECK(std::string(ibv_port_state_str(IBV_PORT_ACTIVE)) == "active");
    CHECK(std::string(ibv_node_type_str(IBV_NODE_CA)) == "InfiniBand channel adapter");
    CHECK(std::string(ibv_event_type_str(IBV_EVENT_CQ_ERR)) == "CQ error");
    CHECK(ibv_rate_to_mult(IBV_RATE_10_GBPS) == 4 && ibv_rate_to_mult(IBV_RATE_25_GBPS) == -1);
    CHECK(mult_to_ibv_rate(4) == IBV_RATE_10_GBPS && mult_to_ibv_rate(0) == IBV_RATE_MAX);
    CHECK(ibv_rate_to_mbps(IBV_RATE_100_GBPS) == 103125 && mbps_to_ibv_rate(103125) == IBV_RATE_100_GBPS);
    CHECK(ibv_fork_init() == 0 && ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
    CHECK(std::string(ibv_get_sysfs_path()) == "/sys");
    char text[256];
    CHECK(ibv_read_sysfs_file("/proc/sys/kernel", "ostype", text, sizeof text) == 5 && std::string(text) == "Linux");
    errno = 0;
    CHECK(ibv_read_sysfs_file("/proc", "no_such_file", text, sizeof text) == -1 && errno == ENOENT);
}

} // namespace

int main() {
    isolate_from_other_processes();
    unsetenv("SYSFS_PATH");
    {
        Endpoint requester(0), responder(1);
        test_device_and_port_attributes(requester.context);
        test_gids_identify_devices(requester.context, responder.context);
        test_unimplemented_operations_fail(&requester);
    }
    test_names_and_rates();
    errno = 0;
    ibv_device unknown_device{};
    CHECK(ibv_open_device(&unknown_device) == nullptr && errno == ENODEV);
    return 0;
}
