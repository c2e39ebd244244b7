// Test of the software twin of librdmacm: static assertions compare the declarations of rdmacm/types.hpp with the real
// rdma_cma.h. CMake builds this file only if that header is installed.
#include <rdma/rdma_cma.h>

#include "rdmacm/types.hpp"

namespace twin = gdrkit::twin::rdmacm;

#define CHECK_VALUE(twin_name, real_name)                                                                              \
    static_assert(static_cast<long long>(twin::twin_name) == static_cast<long long>(real_name))
#define CHECK_SIZE_AND_ALIGNMENT(type)                                                                                 \
    static_assert(sizeof(twin::type) == sizeof(::type) && alignof(twin::type) == alignof(::type))
#define CHECK_OFFSET(type, member) static_assert(offsetof(twin::type, member) == offsetof(::type, member))

CHECK_VALUE(RDMA_CM_EVENT_TIMEWAIT_EXIT, RDMA_CM_EVENT_TIMEWAIT_EXIT);
CHECK_VALUE(RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_REJECTED);
CHECK_VALUE(RDMA_PS_IPOIB, RDMA_PS_IPOIB);
CHECK_VALUE(RDMA_PS_TCP, RDMA_PS_TCP);
CHECK_VALUE(RDMA_PS_UDP, RDMA_PS_UDP);
CHECK_VALUE(RDMA_PS_IB, RDMA_PS_IB);
CHECK_VALUE(udp_qkey, RDMA_UDP_QKEY);
CHECK_VALUE(rdma_max_resp_res, RDMA_MAX_RESP_RES);
CHECK_VALUE(rdma_max_init_depth, RDMA_MAX_INIT_DEPTH);
CHECK_VALUE(option_level_id, RDMA_OPTION_ID);
CHECK_VALUE(option_level_ib, RDMA_OPTION_IB);
CHECK_VALUE(option_tos, RDMA_OPTION_ID_TOS);
CHECK_VALUE(option_reuseaddr, RDMA_OPTION_ID_REUSEADDR);
CHECK_VALUE(option_afonly, RDMA_OPTION_ID_AFONLY);
CHECK_VALUE(option_ack_timeout, RDMA_OPTION_ID_ACK_TIMEOUT);
CHECK_VALUE(option_ib_path, RDMA_OPTION_IB_PATH);
CHECK_VALUE(rai_passive, RAI_PASSIVE);
CHECK_VALUE(rai_numeric_host, RAI_NUMERICHOST);
CHECK_VALUE(rai_no_route, RAI_NOROUTE);
CHECK_VALUE(rai_family, RAI_FAMILY);

CHECK_SIZE_AND_ALIGNMENT(rdma_ib_addr);
CHECK_SIZE_AND_ALIGNMENT(rdma_addr);
CHECK_SIZE_AND_ALIGNMENT(rdma_route);
CHECK_SIZE_AND_ALIGNMENT(rdma_event_channel);
CHECK_SIZE_AND_ALIGNMENT(rdma_cm_id);
CHECK_SIZE_AND_ALIGNMENT(rdma_conn_param);
CHECK_SIZE_AND_ALIGNMENT(rdma_ud_param);
CHECK_SIZE_AND_ALIGNMENT(rdma_cm_event);
CHECK_SIZE_AND_ALIGNMENT(rdma_addrinfo);
CHECK_SIZE_AND_ALIGNMENT(rdma_cm_join_mc_attr_ex);
CHECK_OFFSET(rdma_addr, dst_addr);
CHECK_OFFSET(rdma_addr, addr);
CHECK_OFFSET(rdma_route, path_rec);
CHECK_OFFSET(rdma_cm_id, channel);
CHECK_OFFSET(rdma_cm_id, qp);
CHECK_OFFSET(rdma_cm_id, route);
CHECK_OFFSET(rdma_cm_id, ps);
CHECK_OFFSET(rdma_cm_id, port_num);
CHECK_OFFSET(rdma_cm_id, event);
CHECK_OFFSET(rdma_cm_id, send_cq_channel);
CHECK_OFFSET(rdma_cm_id, recv_cq);
CHECK_OFFSET(rdma_cm_id, srq);
CHECK_OFFSET(rdma_cm_id, pd);
CHECK_OFFSET(rdma_cm_id, qp_type);
CHECK_OFFSET(rdma_conn_param, responder_resources);
CHECK_OFFSET(rdma_conn_param, rnr_retry_count);
CHECK_OFFSET(rdma_conn_param, srq);
CHECK_OFFSET(rdma_conn_param, qp_num);
CHECK_OFFSET(rdma_ud_param, ah_attr);
CHECK_OFFSET(rdma_ud_param, qkey);
CHECK_OFFSET(rdma_cm_event, event);
CHECK_OFFSET(rdma_cm_event, status);
CHECK_OFFSET(rdma_cm_event, param);
CHECK_OFFSET(rdma_addrinfo, ai_src_addr);
CHECK_OFFSET(rdma_addrinfo, ai_dst_canonname);
CHECK_OFFSET(rdma_addrinfo, ai_connect);
CHECK_OFFSET(rdma_addrinfo, ai_next);
CHECK_OFFSET(rdma_cm_join_mc_attr_ex, addr);

int main() {
    return 0;
}
