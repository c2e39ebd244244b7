// Tests of the software twin of libibverbs: extended reliable connections (XRC). A sender names a shared receive queue
// in each request. The receive queue pair and the shared receive queues belong to one XRC domain.
#include <fcntl.h>

#include "model/sockets.hpp"
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin;
using namespace gdrkit::twin::tests;

namespace {

// Open an XRC domain. The domain belongs to the open file `fd`, or to no file if `fd` is -1.
ibv_xrcd* open_domain(ibv_context* context, int fd = -1, int oflags = O_CREAT) {
    ibv_xrcd_init_attr attr{IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, fd, oflags};
    return ibv_open_xrcd(context, &attr);
}

ibv_srq* create_xrc_srq(ibv_pd* pd, ibv_xrcd* xrcd, ibv_cq* cq, std::uint32_t max_wr = 4) {
    ibv_srq_init_attr_ex init{};
    init.attr = {max_wr, 1, 0};
    init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    init.srq_type = IBV_SRQT_XRC;
    init.pd = pd;
    init.xrcd = xrcd;
    init.cq = cq;
    return ibv_create_srq_ex(pd->context, &init);
}

std::uint32_t get_srq_number(ibv_srq* srq) {
    std::uint32_t number = 0;
    CHECK(ibv_get_srq_num(srq, &number) == 0);
    return number;
}

ibv_qp* create_receive_qp(ibv_context* context, ibv_xrcd* xrcd) {
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_XRC_RECV;
    init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    init.xrcd = xrcd;
    return ibv_create_qp_ex(context, &init);
}

ibv_qp* create_send_qp(ibv_pd* pd, ibv_cq* cq) {
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_XRC_SEND;
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    init.pd = pd;
    init.send_cq = cq;
    init.cap = {16, 0, 4, 0, 64};
    // In verbs.h, ibv_create_qp_ex calls ibv_create_qp if comp_mask is exactly IBV_QP_INIT_ATTR_PD. So this call tests
    // the ibv_create_qp of the twin.
    return ibv_create_qp_ex(pd->context, &init);
}

// A receiver with two shared receive queues in one XRC domain, and a sender. The `qp` of each endpoint is an XRC queue
// pair.
struct XrcPair {
    Endpoint sender{1}, receiver;
    // The completion queue of both shared receive queues.
    ibv_cq* srq_cq = ibv_create_cq(receiver.context, 16, nullptr, nullptr, 0);
    ibv_pd* second_pd = ibv_alloc_pd(receiver.context);
    ibv_xrcd* xrcd = open_domain(receiver.context);
    ibv_srq* first_srq = create_xrc_srq(receiver.pd, xrcd, srq_cq);
    ibv_srq* second_srq = create_xrc_srq(second_pd, xrcd, srq_cq);

    XrcPair() {
        CHECK(first_srq != nullptr && second_srq != nullptr);
        CHECK(ibv_destroy_qp(sender.qp) == 0 && ibv_destroy_qp(receiver.qp) == 0);
        sender.qp = create_send_qp(sender.pd, sender.cq);
        receiver.qp = create_receive_qp(receiver.context, xrcd);
        CHECK(sender.qp != nullptr && receiver.qp != nullptr);
        connect_sender(receiver.address());
        connect_receiver(sender.address());
    }
    // Check that the domain and the completion queue are busy until their last user is destroyed.
    ~XrcPair() {
        CHECK(ibv_close_xrcd(xrcd) == EBUSY);
        CHECK(ibv_destroy_qp(receiver.qp) == 0);
        receiver.qp = nullptr;
        CHECK(ibv_destroy_srq(first_srq) == 0 && ibv_close_xrcd(xrcd) == EBUSY && ibv_destroy_cq(srq_cq) == EBUSY);
        CHECK(ibv_destroy_srq(second_srq) == 0 && ibv_close_xrcd(xrcd) == 0 && ibv_destroy_cq(srq_cq) == 0);
        CHECK(ibv_dealloc_pd(second_pd) == 0);
    }
    XrcPair(const XrcPair&) = delete;
    XrcPair& operator=(const XrcPair&) = delete;

    void connect_sender(const QueuePairAddress& peer) {
        CHECK(sender.modify_to_init() == 0);
        ibv_qp_attr attr = sender.make_rtr_attr(peer);
        attr.max_dest_rd_atomic = 255; // too large, but a send queue pair ignores it
        CHECK(ibv_modify_qp(sender.qp, &attr, Endpoint::rtr_mask) == 0);
        CHECK(sender.modify_to_rts() == 0);
        ibv_qp_init_attr init{};
        CHECK(ibv_query_qp(sender.qp, &attr, IBV_QP_STATE, &init) == 0 && attr.max_dest_rd_atomic == 0);
    }
    void connect_receiver(const QueuePairAddress& peer) {
        CHECK(receiver.modify_to_init() == 0);
        CHECK(receiver.modify_to_rtr(peer) == 0);
        // A receive queue pair ignores the retry counts and max_rd_atomic, but not the timeout.
        CHECK(receiver.modify_to_rts() == 0);
        ibv_qp_attr attr{};
        ibv_qp_init_attr init{};
        CHECK(ibv_query_qp(receiver.qp, &attr, IBV_QP_STATE, &init) == 0 && attr.retry_cnt == 0 && attr.timeout != 0);
    }
    int post(ibv_send_wr wr, std::uint32_t srq_number, const std::vector<ibv_sge>& sges) {
        wr.qp_type.xrc.remote_srqn = srq_number;
        return sender.post(wr, sges);
    }
    static void post_receive(ibv_srq* srq, std::uint64_t wr_id, ibv_sge sge) {
        ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
        ibv_recv_wr* bad_wr = nullptr;
        CHECK(ibv_post_srq_recv(srq, &wr, &bad_wr) == 0);
    }
    [[nodiscard]] ibv_wc poll_srq_completion() const {
        ibv_wc wc{};
        for (int tries = 0; tries < 100000; ++tries) {
            if (ibv_poll_cq(srq_cq, 1, &wc) == 1) {
                return wc;
            }
            usleep(100);
        }
        CHECK(false && "no completion within ten seconds");
        return wc;
    }
};

void test_message_goes_to_named_queue() {
    XrcPair pair;
    Buffer source(pair.sender.pd, 4096), first_buffer(pair.receiver.pd, 4096), second_buffer(pair.second_pd, 4096);
    fill_pattern(source.bytes, 4096);
    XrcPair::post_receive(pair.first_srq, 10, first_buffer.sge(0, 4096));
    XrcPair::post_receive(pair.second_srq, 20, second_buffer.sge(0, 4096));
    CHECK(pair.post(make_request(1, IBV_WR_SEND), get_srq_number(pair.second_srq), {source.sge(0, 4096)}) == 0);
    pair.sender.expect_completion(1, IBV_WC_SUCCESS);
    ibv_wc wc = pair.poll_srq_completion();
    CHECK(wc.wr_id == 20 && wc.status == IBV_WC_SUCCESS && wc.qp_num == pair.receiver.qp->qp_num);
    CHECK(has_pattern(second_buffer.bytes, 4096) && first_buffer.bytes[0] == 0);
    CHECK(pair.post(make_request(2, IBV_WR_SEND), get_srq_number(pair.first_srq), {source.sge(0, 4096)}) == 0);
    pair.sender.expect_completion(2, IBV_WC_SUCCESS);
    wc = pair.poll_srq_completion();
    CHECK(wc.wr_id == 10 && has_pattern(first_buffer.bytes, 4096));
}

// RDMA requests name a shared receive queue, too. The protection domain of this queue decides which keys are valid.
void test_write_and_read_use_domain_of_queue() {
    XrcPair pair;
    Buffer source(pair.sender.pd, 64), readback(pair.sender.pd, 64), target(pair.second_pd, 64);
    fill_pattern(source.bytes, 64);
    const std::uint32_t second_srq_number = get_srq_number(pair.second_srq);
    CHECK(pair.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey), second_srq_number,
                    {source.sge(0, 64)}) == 0);
    CHECK(pair.post(make_request(2, IBV_WR_RDMA_READ, target.address_at(), target.mr->rkey), second_srq_number,
                    {readback.sge(0, 64)}) == 0);
    pair.sender.expect_completion(1, IBV_WC_SUCCESS);
    pair.sender.expect_completion(2, IBV_WC_SUCCESS);
    CHECK(has_pattern(target.bytes, 64) && has_pattern(readback.bytes, 64));
    const std::uint32_t first_srq_number = get_srq_number(pair.first_srq);
    CHECK(pair.post(make_request(3, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey), first_srq_number,
                    {source.sge(0, 64)}) == 0);
    pair.sender.expect_completion(3, IBV_WC_REM_ACCESS_ERR);
    CHECK(wait_for_event(pair.receiver.context).event_type == IBV_EVENT_QP_ACCESS_ERR);
}

void test_unknown_queue_is_refused() {
    XrcPair pair;
    // New queues get consecutive numbers, so no queue has a number that differs by 0x8000.
    CHECK(pair.post(make_request(1, IBV_WR_SEND), get_srq_number(pair.first_srq) ^ 0x8000, {}) == 0);
    pair.sender.expect_completion(1, IBV_WC_REM_INV_REQ_ERR);
    const ibv_async_event event = wait_for_event(pair.receiver.context);
    CHECK(event.event_type == IBV_EVENT_QP_REQ_ERR && event.element.qp == pair.receiver.qp);
}

void test_queue_pairs_have_one_direction() {
    XrcPair pair;
    CHECK(pair.sender.post_receive(1, {}) == EINVAL && pair.receiver.post_receive(1, {}) == EINVAL);
    CHECK(pair.receiver.post(make_request(1, IBV_WR_SEND), {}) == EINVAL);
    CHECK(pair.receiver.qp->pd == nullptr && pair.receiver.qp->send_cq == nullptr);
}

void test_invalid_arguments() {
    XrcPair pair;
    ibv_context* const context = pair.receiver.context;
    ibv_xrcd_init_attr attr{IBV_XRCD_INIT_ATTR_FD, -1, 0}; // without IBV_XRCD_INIT_ATTR_OFLAGS
    CHECK(ibv_open_xrcd(context, &attr) == nullptr && errno == EINVAL);
    CHECK(open_domain(context, 1 << 20) == nullptr && errno == EBADF); // no open file has this descriptor
    CHECK(create_receive_qp(context, nullptr) == nullptr && errno == EINVAL);
    CHECK(create_xrc_srq(pair.second_pd, nullptr, pair.srq_cq) == nullptr && errno == EINVAL);
    // A queue pair of type RC cannot use the receive queue of an XRC domain.
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = pair.receiver.cq;
    init.srq = pair.first_srq;
    init.cap = {1, 0, 1, 0, 0};
    init.qp_type = IBV_QPT_RC;
    CHECK(ibv_create_qp(pair.receiver.pd, &init) == nullptr && errno == EINVAL);
}

void test_one_file_is_one_domain() {
    XrcPair pair;
    ibv_context* const context = pair.receiver.context;
    char path[] = "/tmp/gdrkit-xrc.XXXXXX";
    const Fd first_file(mkstemp(path));
    CHECK(first_file);
    // The file has no domain yet, and O_CREAT is missing.
    CHECK(open_domain(context, first_file.get(), 0) == nullptr && errno == EAGAIN);
    ibv_xrcd* const first_domain = open_domain(context, first_file.get(), O_CREAT);
    const Fd second_file(open(path, O_RDONLY | O_CLOEXEC));
    CHECK(first_domain != nullptr && open_domain(context, second_file.get(), O_CREAT | O_EXCL) == nullptr &&
          errno == EINVAL);
    ibv_xrcd* const second_domain = open_domain(context, second_file.get(), 0);
    CHECK(second_domain != nullptr);
    // first_domain and second_domain stand for one domain, so a queue pair that was created with the first delivers to
    // a receive queue that was created with the second.
    ibv_srq* const srq = create_xrc_srq(pair.receiver.pd, second_domain, pair.srq_cq);
    CHECK(srq != nullptr && ibv_destroy_qp(pair.receiver.qp) == 0 && ibv_destroy_qp(pair.sender.qp) == 0);
    pair.receiver.qp = create_receive_qp(context, first_domain);
    pair.sender.qp = create_send_qp(pair.sender.pd, pair.sender.cq);
    pair.connect_sender(pair.receiver.address());
    pair.connect_receiver(pair.sender.address());
    const Buffer receive_buffer(pair.receiver.pd, 8);
    XrcPair::post_receive(srq, 5, receive_buffer.sge(0, 8));
    CHECK(pair.post(make_request(1, IBV_WR_SEND), get_srq_number(srq), {}) == 0);
    pair.sender.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(pair.poll_srq_completion().wr_id == 5);
    CHECK(ibv_close_xrcd(first_domain) == EBUSY && ibv_destroy_qp(pair.receiver.qp) == 0 &&
          ibv_close_xrcd(first_domain) == 0);
    CHECK(ibv_destroy_srq(srq) == 0 && ibv_close_xrcd(second_domain) == 0);
    // The destructor of XrcPair expects a receive queue pair in its own domain.
    pair.receiver.qp = create_receive_qp(context, pair.xrcd);
    CHECK(unlink(path) == 0);
}

// ibv_open_qp makes another ibv_qp structure for an existing receive queue pair. The queue pair exists until its last
// structure is destroyed.
void test_opened_queue_pair_outlives_first_structure() {
    XrcPair pair;
    ibv_context* const context = pair.receiver.context;
    ibv_qp_open_attr attr{IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE, pair.sender.qp->qp_num,
                          pair.xrcd, nullptr, IBV_QPT_XRC_RECV};
    CHECK(ibv_open_qp(context, &attr) == nullptr && errno == EINVAL); // the number of a send queue pair
    attr.qp_num = pair.receiver.qp->qp_num;
    ibv_qp* const opened_qp = ibv_open_qp(context, &attr);
    CHECK(opened_qp != nullptr && opened_qp->qp_num == attr.qp_num && opened_qp->state == IBV_QPS_RTS);
    CHECK(ibv_destroy_qp(pair.receiver.qp) == 0);
    pair.receiver.qp = opened_qp;
    const Buffer receive_buffer(pair.receiver.pd, 8);
    XrcPair::post_receive(pair.first_srq, 5, receive_buffer.sge(0, 8));
    CHECK(pair.post(make_request(1, IBV_WR_SEND), get_srq_number(pair.first_srq), {}) == 0);
    pair.sender.expect_completion(1, IBV_WC_SUCCESS);
    CHECK(pair.poll_srq_completion().wr_id == 5);
    // An error of the queue pair raises an event for each of its structures.
    ibv_qp* const reopened_qp = ibv_open_qp(context, &attr);
    CHECK(reopened_qp != nullptr);
    CHECK(pair.post(make_request(2, IBV_WR_SEND), get_srq_number(pair.first_srq) ^ 0x8000, {}) == 0);
    pair.sender.expect_completion(2, IBV_WC_REM_INV_REQ_ERR);
    CHECK(wait_for_event(context).element.qp == opened_qp && wait_for_event(context).element.qp == reopened_qp);
    CHECK(ibv_destroy_qp(reopened_qp) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_message_goes_to_named_queue();
    test_write_and_read_use_domain_of_queue();
    test_unknown_queue_is_refused();
    test_queue_pairs_have_one_direction();
    test_invalid_arguments();
    test_one_file_is_one_domain();
    test_opened_queue_pair_outlives_first_structure();
    return 0;
}
