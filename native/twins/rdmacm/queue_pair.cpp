// Implements the creation of queue pairs and shared receive queues, and the transitions of queue pairs.

#include "rdmacm/queue_pair.hpp"

#include <cstring>

#include "rdmacm/connection.hpp"
#include "rdmacm/functions.hpp"
#include "rdmacm/session.hpp"

namespace gdrkit::twin::rdmacm {
namespace {

// The default acknowledgement timeout is 4.096 us * 2^18. Like the kernel's default, it includes the packet life time
// in both directions and the acknowledgement delay of the devices.
constexpr std::uint8_t default_ack_timeout = 18;

// Move the queue pair to a state, with the attributes of the connection. `responder_resources` and `initiator_depth`
// replace the limits of the connection, unless they are rdma_max_resp_res and rdma_max_init_depth. The state
// INIT uses neither.
int move_to_state(Identifier* id, ibv_qp_state state, std::uint8_t responder_resources, std::uint8_t initiator_depth) {
    ibv_qp_attr attr{};
    int attr_mask = 0;
    attr.qp_state = state;
    {
        std::lock_guard lock(manager_mutex());
        if (const int error = fill_attributes(*id, &attr, &attr_mask); error != 0) {
            return error;
        }
    }
    if (state == IBV_QPS_RTR && responder_resources != rdma_max_resp_res) {
        attr.max_dest_rd_atomic = responder_resources;
    }
    if (state == IBV_QPS_RTS && initiator_depth != rdma_max_init_depth) {
        attr.max_rd_atomic = initiator_depth;
    }
    return ibv_modify_qp(id->public_id.qp, &attr, attr_mask);
}

// Move a datagram queue pair from RESET to RTS.
int make_datagram_pair_ready(Identifier* id) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = id->public_id.port_num;
    attr.qkey = id->qkey;
    int error = ibv_modify_qp(id->public_id.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    attr.qp_state = IBV_QPS_RTR;
    error = error != 0 ? error : ibv_modify_qp(id->public_id.qp, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    return error != 0 ? error : ibv_modify_qp(id->public_id.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

void destroy_completion_queues(rdma_cm_id* id) {
    if (id->qp_type == IBV_QPT_XRC_RECV && id->srq != nullptr) {
        return; // the shared receive queue uses the completion queues
    }
    for (auto [queue, channel] :
         {std::pair(&id->recv_cq, &id->recv_cq_channel), {&id->send_cq, &id->send_cq_channel}}) {
        if (*queue != nullptr) {
            ibv_destroy_cq(*queue);
            *queue = nullptr;
        }
        if (*channel != nullptr) {
            ibv_destroy_comp_channel(*channel);
            *channel = nullptr;
        }
    }
}

// Create a completion queue with its channel. Return 0 or an errno.
int make_completion_queue(rdma_cm_id* id, std::uint32_t entry_count, ibv_comp_channel** channel, ibv_cq** queue) {
    *channel = ibv_create_comp_channel(id->verbs);
    *queue = *channel == nullptr ? nullptr : ibv_create_cq(id->verbs, static_cast<int>(entry_count), id, *channel, 0);
    return *queue == nullptr ? errno : 0;
}

// Create the completion queues for sends and receives with these numbers of entries, and their channels. 0 entries mean
// that no queue is created. Return 0 or an errno.
int make_completion_queues(rdma_cm_id* id, std::uint32_t send_entry_count, std::uint32_t receive_entry_count) {
    int error = receive_entry_count == 0
                    ? 0
                    : make_completion_queue(id, receive_entry_count, &id->recv_cq_channel, &id->recv_cq);
    if (error == 0 && send_entry_count != 0) {
        error = make_completion_queue(id, send_entry_count, &id->send_cq_channel, &id->send_cq);
    }
    if (error != 0) {
        destroy_completion_queues(id);
    }
    return error;
}

// Return the protection domain for a queue pair or a shared receive queue of the identifier, or nullptr with errno set:
// EINVAL if the domain belongs to another device, ENOMEM if the default domain could not be allocated.
ibv_pd* choose_pd(Identifier* id, ibv_pd* requested_pd) {
    ibv_pd* const pd = requested_pd != nullptr ? requested_pd : id->public_id.pd;
    if (pd == nullptr || pd->context != id->public_id.verbs) {
        errno = pd == nullptr ? ENOMEM : EINVAL;
        return nullptr;
    }
    return pd;
}

ibv_xrcd* choose_xrc_domain(Identifier* id, ibv_xrcd* requested_domain) {
    std::lock_guard lock(manager_mutex());
    return requested_domain != nullptr ? requested_domain : get_default_xrc_domain(id->local_gid->device);
}

int create_queue_pair(Identifier* id, ibv_qp_init_attr_ex* attr) {
    rdma_cm_id& public_id = id->public_id;
    if (public_id.qp != nullptr || public_id.verbs == nullptr) {
        return EINVAL;
    }
    // If the identifier already has completion queues, the program must not give other ones.
    if ((public_id.recv_cq != nullptr && attr->recv_cq != nullptr && public_id.recv_cq != attr->recv_cq) ||
        (public_id.send_cq != nullptr && attr->send_cq != nullptr && public_id.send_cq != attr->send_cq)) {
        return EINVAL;
    }
    const bool is_xrc_receive = public_id.qp_type == IBV_QPT_XRC_RECV;
    if (is_xrc_receive) {
        attr->xrcd = choose_xrc_domain(id, (attr->comp_mask & IBV_QP_INIT_ATTR_XRCD) != 0 ? attr->xrcd : nullptr);
        attr->comp_mask |= IBV_QP_INIT_ATTR_XRCD;
    } else {
        attr->pd = choose_pd(id, (attr->comp_mask & IBV_QP_INIT_ATTR_PD) != 0 ? attr->pd : nullptr);
        attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
    }
    if (is_xrc_receive ? attr->xrcd == nullptr : attr->pd == nullptr) {
        return errno;
    }
    attr->srq = attr->srq == nullptr ? public_id.srq : attr->srq;
    const std::uint32_t send_entry_count =
        attr->send_cq != nullptr || public_id.send_cq != nullptr ? 0 : attr->cap.max_send_wr;
    const std::uint32_t receive_entry_count =
        attr->recv_cq != nullptr || public_id.recv_cq != nullptr ? 0 : attr->cap.max_recv_wr;
    if (const int error = make_completion_queues(&public_id, send_entry_count, receive_entry_count); error != 0) {
        return error;
    }
    attr->send_cq = attr->send_cq == nullptr ? public_id.send_cq : attr->send_cq;
    attr->recv_cq = attr->recv_cq == nullptr ? public_id.recv_cq : attr->recv_cq;
    ibv_qp* const qp = ibv_create_qp_ex(public_id.verbs, attr);
    int error = qp == nullptr ? errno : 0;
    if (error == 0) {
        public_id.qp = qp;
        error = is_datagram(*id) ? make_datagram_pair_ready(id) : move_to_state(id, IBV_QPS_INIT, 0, 0);
        if (error != 0) {
            public_id.qp = nullptr;
            ibv_destroy_qp(qp);
        }
    }
    if (error != 0) {
        destroy_completion_queues(&public_id);
        return error;
    }
    public_id.pd = is_xrc_receive ? public_id.pd : qp->pd;
    return 0;
}

// Fill in the XRC domain and the completion queue of a shared receive queue, if the program gave none.
int complete_xrc_attributes(Identifier* id, ibv_srq_init_attr_ex* attr) {
    attr->xrcd = choose_xrc_domain(id, (attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD) != 0 ? attr->xrcd : nullptr);
    if (attr->xrcd == nullptr) {
        return errno;
    }
    if ((attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ) == 0 || attr->cq == nullptr) {
        // If the identifier has a queue pair, the completion queue for receives may already exist.
        const int error =
            id->public_id.recv_cq != nullptr ? 0 : make_completion_queues(&id->public_id, 0, attr->attr.max_wr);
        if (error != 0) {
            return error;
        }
        attr->cq = id->public_id.recv_cq;
    }
    attr->comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    return 0;
}

int create_shared_receive_queue(Identifier* id, ibv_srq_init_attr_ex* attr) {
    if (id->public_id.srq != nullptr || id->public_id.verbs == nullptr) {
        return EINVAL;
    }
    attr->pd = choose_pd(id, (attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) != 0 ? attr->pd : nullptr);
    attr->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    if (attr->pd == nullptr) {
        return errno;
    }
    if ((attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) != 0 && attr->srq_type == IBV_SRQT_XRC) {
        if (const int error = complete_xrc_attributes(id, attr); error != 0) {
            return error;
        }
    }
    ibv_srq* const srq = ibv_create_srq_ex(id->public_id.verbs, attr);
    if (srq == nullptr) {
        const int error = errno;
        destroy_completion_queues(&id->public_id);
        return error;
    }
    id->public_id.pd = id->public_id.pd == nullptr ? attr->pd : id->public_id.pd;
    id->public_id.srq = srq;
    return 0;
}

} // namespace

ibv_ah_attr make_path_to_remote(const Identifier& id) {
    ibv_ah_attr path{};
    path.is_global = 1;
    path.port_num = id.public_id.port_num;
    path.grh.dgid = id.remote_gid;
    path.grh.sgid_index = id.local_gid->gid_index;
    path.grh.hop_limit = 64;
    path.grh.traffic_class = id.tos;
    return path;
}

int fill_attributes(const Identifier& id, ibv_qp_attr* attr, int* attr_mask) {
    if (!id.local_gid) {
        return EINVAL;
    }
    const ibv_qp_state state = attr->qp_state;
    *attr = {};
    attr->qp_state = state;
    const bool is_reliable = id.public_id.qp_type == IBV_QPT_RC || id.public_id.qp_type == IBV_QPT_XRC_SEND ||
                             id.public_id.qp_type == IBV_QPT_XRC_RECV;
    const bool has_peer_parameters = id.connection != nullptr && id.connection->phase != Phase::waits_for_reply;
    switch (state) {
    case IBV_QPS_INIT:
        *attr_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        attr->port_num = id.public_id.port_num;
        if (is_datagram(id)) {
            attr->qkey = id.qkey;
            *attr_mask |= IBV_QP_QKEY;
            return 0;
        }
        *attr_mask |= IBV_QP_ACCESS_FLAGS;
        if (has_peer_parameters) {
            // As in the kernel's communication manager, the peer may write. It may also read and use atomics if this
            // side accepts such requests (responder_resources is not 0).
            attr->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
            attr->qp_access_flags |=
                id.responder_resources == 0 ? 0U : IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        }
        return 0;
    case IBV_QPS_RTR:
        if (is_datagram(id)) {
            *attr_mask = IBV_QP_STATE;
            return 0;
        }
        if (!has_peer_parameters) {
            return EINVAL;
        }
        *attr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        attr->ah_attr = make_path_to_remote(id);
        attr->path_mtu = id.local_gid->device->port_attr.active_mtu;
        attr->dest_qp_num = id.remote_qp_num;
        attr->rq_psn = id.remote_psn;
        if (is_reliable) {
            *attr_mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
            attr->max_dest_rd_atomic = id.responder_resources;
        }
        return 0;
    case IBV_QPS_RTS:
        *attr_mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        if (is_datagram(id)) {
            return 0;
        }
        if (!has_peer_parameters) {
            return EINVAL;
        }
        attr->sq_psn = id.psn;
        if (is_reliable) {
            *attr_mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT;
            attr->retry_cnt = id.retry_count;
            attr->rnr_retry = id.rnr_retry_count;
            attr->max_rd_atomic = id.initiator_depth;
            attr->timeout = id.ack_timeout != 0 ? id.ack_timeout : default_ack_timeout;
        }
        return 0;
    default:
        return EINVAL;
    }
}

int make_queue_pair_ready(Identifier* id, std::uint8_t responder_resources, std::uint8_t initiator_depth) {
    if (id->public_id.qp == nullptr) {
        return 0;
    }
    // A second transition to INIT sets the access flags of the connection, as in librdmacm.
    int error = move_to_state(id, IBV_QPS_INIT, 0, 0);
    error = error != 0 ? error : move_to_state(id, IBV_QPS_RTR, responder_resources, initiator_depth);
    return error != 0 ? error : move_to_state(id, IBV_QPS_RTS, responder_resources, initiator_depth);
}

int establish_active_side(Identifier* id) {
    const int error = make_queue_pair_ready(id, rdma_max_resp_res, rdma_max_init_depth);
    std::lock_guard lock(manager_mutex());
    Connection* const connection = id->connection.get();
    if (error != 0 || connection == nullptr || connection->phase != Phase::received_reply) {
        if (connection != nullptr && connection->phase == Phase::received_reply) {
            auto message = make_message(*id, wire::Type::reject);
            message->reason = rejected_by_program;
            send_message(connection, *message);
            close_connection(connection);
        }
        return error != 0 ? error : EINVAL; // the peer has ended the connection meanwhile
    }
    send_message(connection, *make_message(*id, wire::Type::ready_to_use));
    connection->phase = Phase::established;
    return 0;
}

void fail_queue_pair(Identifier* id) {
    if (id->public_id.qp != nullptr) {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_ERR;
        ibv_modify_qp(id->public_id.qp, &attr, IBV_QP_STATE);
    }
}

extern "C" {

int rdma_create_qp_ex(rdma_cm_id* id, ibv_qp_init_attr_ex* qp_init_attr) {
    return run_entry_with_errno("rdma_create_qp_ex", [&] {
        Identifier* const identifier = get_identifier(id);
        return identifier == nullptr ? EINVAL : create_queue_pair(identifier, qp_init_attr);
    });
}

int rdma_create_qp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* qp_init_attr) {
    return run_entry_with_errno("rdma_create_qp", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        ibv_qp_init_attr_ex attr{};
        // ibv_qp_init_attr_ex begins with the fields of ibv_qp_init_attr.
        static_assert(offsetof(ibv_qp_init_attr_ex, comp_mask) >= offsetof(ibv_qp_init_attr, sq_sig_all) + sizeof(int));
        std::memcpy(&attr, qp_init_attr, offsetof(ibv_qp_init_attr, sq_sig_all) + sizeof qp_init_attr->sq_sig_all);
        if (pd != nullptr) {
            attr.comp_mask = IBV_QP_INIT_ATTR_PD;
            attr.pd = pd;
        }
        const int error = create_queue_pair(identifier, &attr);
        if (error == 0) {
            qp_init_attr->cap = attr.cap;
        }
        return error;
    });
}

void rdma_destroy_qp(rdma_cm_id* id) {
    if (get_identifier(id) != nullptr && id->qp != nullptr) {
        ibv_destroy_qp(id->qp);
        id->qp = nullptr;
        destroy_completion_queues(id);
    }
}

int rdma_create_srq_ex(rdma_cm_id* id, ibv_srq_init_attr_ex* attr) {
    return run_entry_with_errno("rdma_create_srq_ex", [&] {
        Identifier* const identifier = get_identifier(id);
        return identifier == nullptr ? EINVAL : create_shared_receive_queue(identifier, attr);
    });
}

int rdma_create_srq(rdma_cm_id* id, ibv_pd* pd, ibv_srq_init_attr* attr) {
    return run_entry_with_errno("rdma_create_srq", [&] {
        Identifier* const identifier = get_identifier(id);
        if (identifier == nullptr) {
            return EINVAL;
        }
        ibv_srq_init_attr_ex extended_attr{};
        extended_attr.srq_context = attr->srq_context;
        extended_attr.attr = attr->attr;
        extended_attr.pd = pd;
        extended_attr.srq_type = id->qp_type == IBV_QPT_XRC_RECV ? IBV_SRQT_XRC : IBV_SRQT_BASIC;
        extended_attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
        const int error = create_shared_receive_queue(identifier, &extended_attr);
        if (error == 0) {
            attr->attr = extended_attr.attr;
        }
        return error;
    });
}

void rdma_destroy_srq(rdma_cm_id* id) {
    if (get_identifier(id) != nullptr && id->srq != nullptr) {
        ibv_destroy_srq(id->srq);
        id->srq = nullptr;
        if (id->qp == nullptr) {
            destroy_completion_queues(id);
        }
    }
}

int rdma_init_qp_attr(rdma_cm_id* id, ibv_qp_attr* qp_attr, int* qp_attr_mask) {
    return run_entry_with_errno("rdma_init_qp_attr", [&] {
        const Identifier* const identifier = get_identifier(id);
        std::lock_guard lock(manager_mutex());
        return identifier == nullptr ? EINVAL : fill_attributes(*identifier, qp_attr, qp_attr_mask);
    });
}

} // extern "C"
} // namespace gdrkit::twin::rdmacm
