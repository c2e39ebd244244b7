// The binary interface of librdmacm: its structures and constants, as far as the twin needs them. They are declared
// here, so that the build needs no headers of librdmacm. A test compares them with the real headers if the real headers
// are installed.
#pragma once

#pragma GCC visibility push(default)
#include <infiniband/sa.h>
#include <infiniband/verbs.h>
#pragma GCC visibility pop

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>

namespace gdrkit::twin::rdmacm {

enum rdma_cm_event_type : unsigned {
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_ADDR_ERROR,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_ROUTE_ERROR,
    RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_CONNECT_ERROR,
    RDMA_CM_EVENT_UNREACHABLE,
    RDMA_CM_EVENT_REJECTED,
    RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_DEVICE_REMOVAL,
    RDMA_CM_EVENT_MULTICAST_JOIN,
    RDMA_CM_EVENT_MULTICAST_ERROR,
    RDMA_CM_EVENT_ADDR_CHANGE,
    RDMA_CM_EVENT_TIMEWAIT_EXIT,
};

enum rdma_port_space : unsigned {
    RDMA_PS_IPOIB = 0x0002,
    RDMA_PS_TCP = 0x0106,
    RDMA_PS_UDP = 0x0111,
    RDMA_PS_IB = 0x013f,
};

// RDMA_UDP_QKEY. The queue key of the unreliable datagram queue pairs that librdmacm creates, and of multicast groups.
inline constexpr std::uint32_t udp_qkey = 0x01234567;
// RDMA_MAX_RESP_RES and RDMA_MAX_INIT_DEPTH. In rdma_conn_param, these values request the largest number that the
// device allows.
inline constexpr std::uint8_t rdma_max_resp_res = 0xff;
inline constexpr std::uint8_t rdma_max_init_depth = 0xff;

// The levels of rdma_set_option (RDMA_OPTION_ID, RDMA_OPTION_IB) and the options of each level (RDMA_OPTION_ID_*,
// RDMA_OPTION_IB_PATH).
inline constexpr int option_level_id = 0, option_level_ib = 1;
inline constexpr int option_tos = 0, option_reuseaddr = 1, option_afonly = 2, option_ack_timeout = 3;
inline constexpr int option_ib_path = 1;

// The flags of rdma_getaddrinfo (RAI_*).
inline constexpr int rai_passive = 1, rai_numeric_host = 2, rai_no_route = 4, rai_family = 8;

struct rdma_ib_addr {
    ibv_gid sgid;
    ibv_gid dgid;
    __be16 pkey;
};

struct rdma_addr {
    union {
        sockaddr src_addr;
        sockaddr_in src_sin;
        sockaddr_in6 src_sin6;
        sockaddr_storage src_storage;
    };
    union {
        sockaddr dst_addr;
        sockaddr_in dst_sin;
        sockaddr_in6 dst_sin6;
        sockaddr_storage dst_storage;
    };
    union {
        rdma_ib_addr ibaddr;
    } addr;
};

struct rdma_route {
    rdma_addr addr;
    ibv_sa_path_rec* path_rec;
    int num_paths;
};

struct rdma_event_channel {
    int fd;
};

struct rdma_cm_event;

struct rdma_cm_id {
    ibv_context* verbs;
    rdma_event_channel* channel;
    void* context;
    ibv_qp* qp;
    rdma_route route;
    rdma_port_space ps;
    std::uint8_t port_num;
    rdma_cm_event* event;
    ibv_comp_channel* send_cq_channel;
    ibv_cq* send_cq;
    ibv_comp_channel* recv_cq_channel;
    ibv_cq* recv_cq;
    ibv_srq* srq;
    ibv_pd* pd;
    ibv_qp_type qp_type;
};

struct rdma_conn_param {
    const void* private_data;
    std::uint8_t private_data_len;
    std::uint8_t responder_resources;
    std::uint8_t initiator_depth;
    std::uint8_t flow_control;
    std::uint8_t retry_count;
    std::uint8_t rnr_retry_count;
    std::uint8_t srq;
    std::uint32_t qp_num;
};

struct rdma_ud_param {
    const void* private_data;
    std::uint8_t private_data_len;
    ibv_ah_attr ah_attr;
    std::uint32_t qp_num;
    std::uint32_t qkey;
};

struct rdma_cm_event {
    rdma_cm_id* id;
    rdma_cm_id* listen_id;
    rdma_cm_event_type event;
    int status;
    union {
        rdma_conn_param conn;
        rdma_ud_param ud;
    } param;
};

struct rdma_addrinfo {
    int ai_flags;
    int ai_family;
    int ai_qp_type;
    int ai_port_space;
    socklen_t ai_src_len;
    socklen_t ai_dst_len;
    sockaddr* ai_src_addr;
    sockaddr* ai_dst_addr;
    char* ai_src_canonname;
    char* ai_dst_canonname;
    std::size_t ai_route_len;
    void* ai_route;
    std::size_t ai_connect_len;
    void* ai_connect;
    rdma_addrinfo* ai_next;
};

struct rdma_cm_join_mc_attr_ex {
    std::uint32_t comp_mask;
    std::uint32_t join_flags;
    sockaddr* addr;
};

static_assert(sizeof(rdma_addr) == 2 * sizeof(sockaddr_storage) + 40);
static_assert(sizeof(rdma_cm_id) == 416);
static_assert(offsetof(rdma_cm_id, route) == 32);
static_assert(offsetof(rdma_cm_id, ps) == 344);
static_assert(offsetof(rdma_cm_id, qp_type) == 408);
static_assert(sizeof(rdma_conn_param) == 24);
static_assert(sizeof(rdma_ud_param) == 56);
static_assert(sizeof(rdma_cm_event) == 80);
static_assert(sizeof(rdma_addrinfo) == 96);
static_assert(sizeof(rdma_cm_join_mc_attr_ex) == 16);

} // namespace gdrkit::twin::rdmacm
