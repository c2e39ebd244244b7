// The functions of librdmacm (rdma_cma.h and rsocket.h) that the software twin exports.
#pragma once

#include <poll.h>
#include <sys/select.h>
#include <sys/uio.h>

#include "rdmacm/types.hpp"

#pragma GCC visibility push(default)
namespace gdrkit::twin::rdmacm {
extern "C" {

rdma_event_channel* rdma_create_event_channel(void);
void rdma_destroy_event_channel(rdma_event_channel* channel);
int rdma_create_id(rdma_event_channel* channel, rdma_cm_id** id, void* context, rdma_port_space ps);
int rdma_destroy_id(rdma_cm_id* id);
int rdma_migrate_id(rdma_cm_id* id, rdma_event_channel* channel);
int rdma_bind_addr(rdma_cm_id* id, sockaddr* addr);
int rdma_resolve_addr(rdma_cm_id* id, sockaddr* src_addr, sockaddr* dst_addr, int timeout_ms);
int rdma_resolve_route(rdma_cm_id* id, int timeout_ms);
int rdma_connect(rdma_cm_id* id, rdma_conn_param* conn_param);
int rdma_establish(rdma_cm_id* id);
int rdma_listen(rdma_cm_id* id, int backlog);
int rdma_accept(rdma_cm_id* id, rdma_conn_param* conn_param);
int rdma_reject(rdma_cm_id* id, const void* private_data, std::uint8_t private_data_len);
int rdma_reject_ece(rdma_cm_id* id, const void* private_data, std::uint8_t private_data_len);
int rdma_notify(rdma_cm_id* id, ibv_event_type event);
int rdma_disconnect(rdma_cm_id* id);
int rdma_get_cm_event(rdma_event_channel* channel, rdma_cm_event** event);
int rdma_ack_cm_event(rdma_cm_event* event);
__be16 rdma_get_src_port(rdma_cm_id* id);
__be16 rdma_get_dst_port(rdma_cm_id* id);
ibv_context** rdma_get_devices(int* num_devices);
void rdma_free_devices(ibv_context** list);
const char* rdma_event_str(rdma_cm_event_type event);
int rdma_set_option(rdma_cm_id* id, int level, int optname, void* optval, std::size_t optlen);
int rdma_init_qp_attr(rdma_cm_id* id, ibv_qp_attr* qp_attr, int* qp_attr_mask);
int rdma_set_local_ece(rdma_cm_id* id, ibv_ece* ece);
int rdma_get_remote_ece(rdma_cm_id* id, ibv_ece* ece);

int rdma_create_qp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* qp_init_attr);
int rdma_create_qp_ex(rdma_cm_id* id, ibv_qp_init_attr_ex* qp_init_attr);
void rdma_destroy_qp(rdma_cm_id* id);
int rdma_create_srq(rdma_cm_id* id, ibv_pd* pd, ibv_srq_init_attr* attr);
int rdma_create_srq_ex(rdma_cm_id* id, ibv_srq_init_attr_ex* attr);
void rdma_destroy_srq(rdma_cm_id* id);

int rdma_getaddrinfo(const char* node, const char* service, const rdma_addrinfo* hints, rdma_addrinfo** res);
void rdma_freeaddrinfo(rdma_addrinfo* res);
int rdma_create_ep(rdma_cm_id** id, rdma_addrinfo* res, ibv_pd* pd, ibv_qp_init_attr* qp_init_attr);
void rdma_destroy_ep(rdma_cm_id* id);
int rdma_get_request(rdma_cm_id* listen, rdma_cm_id** id);

int rdma_join_multicast(rdma_cm_id* id, sockaddr* addr, void* context);
int rdma_join_multicast_ex(rdma_cm_id* id, rdma_cm_join_mc_attr_ex* attr, void* context);
int rdma_leave_multicast(rdma_cm_id* id, sockaddr* addr);

int rsocket(int domain, int type, int protocol);
int rbind(int socket, const sockaddr* addr, socklen_t addrlen);
int rlisten(int socket, int backlog);
int raccept(int socket, sockaddr* addr, socklen_t* addrlen);
int rconnect(int socket, const sockaddr* addr, socklen_t addrlen);
int rshutdown(int socket, int how);
int rclose(int socket);
ssize_t rrecv(int socket, void* buf, size_t len, int flags);
ssize_t rrecvfrom(int socket, void* buf, size_t len, int flags, sockaddr* src_addr, socklen_t* addrlen);
ssize_t rrecvmsg(int socket, msghdr* msg, int flags);
ssize_t rread(int socket, void* buf, size_t count);
ssize_t rreadv(int socket, const iovec* iov, int iovcnt);
ssize_t rsend(int socket, const void* buf, size_t len, int flags);
ssize_t rsendto(int socket, const void* buf, size_t len, int flags, const sockaddr* dest_addr, socklen_t addrlen);
ssize_t rsendmsg(int socket, const msghdr* msg, int flags);
ssize_t rwrite(int socket, const void* buf, size_t count);
ssize_t rwritev(int socket, const iovec* iov, int iovcnt);
int rpoll(pollfd* fds, nfds_t nfds, int timeout);
int rselect(int nfds, fd_set* readfds, fd_set* writefds, fd_set* exceptfds, timeval* timeout);
int rgetpeername(int socket, sockaddr* addr, socklen_t* addrlen);
int rgetsockname(int socket, sockaddr* addr, socklen_t* addrlen);
int rsetsockopt(int socket, int level, int optname, const void* optval, socklen_t optlen);
int rgetsockopt(int socket, int level, int optname, void* optval, socklen_t* optlen);
int rfcntl(int socket, int cmd, ...);
off_t riomap(int socket, void* buf, size_t len, int prot, int flags, off_t offset);
int riounmap(int socket, void* buf, size_t len);
size_t riowrite(int socket, const void* buf, size_t count, off_t offset, int flags);

} // extern "C"
} // namespace gdrkit::twin::rdmacm
#pragma GCC visibility pop
