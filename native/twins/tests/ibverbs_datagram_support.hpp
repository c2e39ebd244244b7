// Helpers for the tests of datagram queue pairs (UD) in the software twin of libibverbs: a queue pair in state RTS,
// address handles, and sends with one call.
#pragma once

#include "tests/ibverbs_support.hpp"

namespace gdrkit::twin::tests {

// The network header of 40 bytes (GRH) that the NIC writes before each received datagram.
constexpr std::size_t grh_bytes = sizeof(ibv_grh);
constexpr std::size_t mtu_bytes = 4096;
constexpr std::uint32_t test_qkey = 0x11111111;
constexpr std::uint32_t multicast_qpn = 0xffffff; // destination queue pair number of multicast datagrams

// Return the GID of RoCE v2 (index 1) of port 1.
inline ibv_gid query_gid(ibv_context* context) {
    ibv_gid gid{};
    CHECK(ibv_query_gid(context, 1, 1, &gid) == 0);
    return gid;
}

// Return the multicast GID ff0e::NUMBER.
inline ibv_gid make_group(std::uint8_t number) {
    ibv_gid group{};
    group.raw[0] = 0xff;
    group.raw[1] = 0x0e;
    group.raw[15] = number;
    return group;
}

// Return the attributes of an address handle for the path to this GID. The source GID index 0 stands for RoCE v1, and 1
// for RoCE v2.
inline ibv_ah_attr make_path(const ibv_gid& gid, std::uint8_t sgid_index = 1) {
    ibv_ah_attr path{};
    path.is_global = 1;
    path.port_num = 1;
    path.grh.dgid = gid;
    path.grh.sgid_index = sgid_index;
    path.grh.hop_limit = 64;
    return path;
}

// A datagram queue pair with its device, protection domain, completion queue, and a registered buffer.
struct DatagramEndpoint {
    ibv_context* context;
    ibv_pd* pd;
    ibv_cq* cq;
    ibv_qp* qp = nullptr;
    Buffer* buffer;

    explicit DatagramEndpoint(int device_index = 0, std::uint32_t qkey = test_qkey, std::uint32_t max_wr = 16)
        : context(open_device(device_index)) {
        pd = ibv_alloc_pd(context);
        cq = ibv_create_cq(context, 1024, nullptr, nullptr, 0);
        CHECK(pd != nullptr && cq != nullptr);
        buffer = new Buffer(pd, 1 << 16);
        ibv_qp_init_attr init{};
        init.send_cq = init.recv_cq = cq;
        init.cap = {max_wr, max_wr, 4, 4, 256};
        init.qp_type = IBV_QPT_UD;
        qp = ibv_create_qp(pd, &init);
        CHECK(qp != nullptr);
        CHECK(modify_to_init(qkey) == 0 && modify_to(IBV_QPS_RTR, 0) == 0 &&
              modify_to(IBV_QPS_RTS, IBV_QP_SQ_PSN) == 0);
    }
    ~DatagramEndpoint() {
        CHECK(ibv_destroy_qp(qp) == 0);
        delete buffer;
        CHECK(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    }
    DatagramEndpoint(const DatagramEndpoint&) = delete;
    DatagramEndpoint& operator=(const DatagramEndpoint&) = delete;

    int modify_to_init(std::uint32_t qkey) const {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qkey = qkey;
        return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    }
    // Change the state. The mask selects the further attributes that the call sets.
    int modify_to(ibv_qp_state state, int additional_mask = 0) const {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        attr.sq_psn = 0x123;
        return ibv_modify_qp(qp, &attr, IBV_QP_STATE | additional_mask);
    }
    ibv_qp_state query_state() const {
        ibv_qp_attr attr{};
        ibv_qp_init_attr init{};
        CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
        return attr.qp_state;
    }
    [[nodiscard]] ibv_ah* create_address_handle(const ibv_ah_attr& path) const {
        ibv_ah_attr attr = path;
        ibv_ah* const ah = ibv_create_ah(pd, &attr);
        CHECK(ah != nullptr);
        return ah;
    }
    // Post a receive request for the `length` bytes that begin at `offset` in the buffer.
    int post_receive(std::uint64_t wr_id, std::size_t offset, std::size_t length) const {
        ibv_sge sge = buffer->sge(offset, length);
        ibv_recv_wr wr{}, *bad_wr = nullptr;
        wr.wr_id = wr_id;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        return ibv_post_recv(qp, &wr, &bad_wr);
    }
    // Send the `length` bytes that begin at `offset` in the buffer.
    int send(std::uint64_t wr_id, ibv_ah* ah, std::uint32_t remote_qpn, std::size_t offset, std::size_t length,
             unsigned flags = IBV_SEND_SIGNALED, std::uint32_t qkey = test_qkey,
             ibv_wr_opcode opcode = IBV_WR_SEND) const {
        ibv_sge sge = buffer->sge(offset, length);
        ibv_send_wr wr{}, *bad_wr = nullptr;
        wr.wr_id = wr_id;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        wr.opcode = opcode;
        wr.send_flags = flags;
        wr.imm_data = 0x12345678; // only IBV_WR_SEND_WITH_IMM sends it
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = remote_qpn;
        wr.wr.ud.remote_qkey = qkey;
        return ibv_post_send(qp, &wr, &bad_wr);
    }
    ibv_wc poll_completion() const {
        ibv_wc wc{};
        for (int tries = 0; tries < 100000; ++tries) {
            const int count = ibv_poll_cq(cq, 1, &wc);
            CHECK(count >= 0);
            if (count == 1) {
                return wc;
            }
            usleep(100);
        }
        CHECK(false && "no completion within ten seconds");
        return wc;
    }
    ibv_wc expect_completion(std::uint64_t wr_id, ibv_wc_status status = IBV_WC_SUCCESS) const {
        const ibv_wc wc = poll_completion();
        if (wc.wr_id != wr_id || wc.status != status) {
            std::fprintf(stderr, "request %llu completed with status '%s'; expected request %llu with status '%s'\n",
                         static_cast<unsigned long long>(wc.wr_id), ibv_wc_status_str(wc.status),
                         static_cast<unsigned long long>(wr_id), ibv_wc_status_str(status));
        }
        CHECK(wc.wr_id == wr_id && wc.status == status && wc.qp_num == qp->qp_num);
        return wc;
    }
    // Wait 20 ms, and check that no completion has arrived.
    void expect_no_completion() const {
        ibv_wc wc{};
        usleep(20000);
        CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
    }
};

} // namespace gdrkit::twin::tests
