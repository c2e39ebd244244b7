// Tests of the software twin of libibverbs: memory on the RDMA device (ibv_alloc_dm), with allocation, copies and
// memory regions.
#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr unsigned zero_based_access = unsigned{IBV_ACCESS_ZERO_BASED} | read_write_access;

ibv_dm* allocate_device_memory(ibv_context* context, std::size_t length) {
    ibv_alloc_dm_attr attr{};
    attr.length = length;
    errno = 0;
    return ibv_alloc_dm(context, &attr);
}

// Offset and length of a copy must be multiples of 4, and the copy must end inside the device memory.
void test_copies_are_checked() {
    Endpoint endpoint;
    ibv_dm* const dm = allocate_device_memory(endpoint.context, 4096);
    CHECK(dm != nullptr && dm->context == endpoint.context);
    std::uint8_t pattern[64], copy[64];
    fill_pattern(pattern, sizeof pattern);
    CHECK(ibv_memcpy_to_dm(dm, 4032, pattern, 64) == 0 && ibv_memcpy_from_dm(copy, dm, 4032, 64) == 0);
    CHECK(has_pattern(copy, 64));
    CHECK(ibv_memcpy_to_dm(dm, 4036, pattern, 64) == EFAULT && ibv_memcpy_from_dm(copy, dm, 8192, 4) == EFAULT);
    CHECK(ibv_memcpy_to_dm(dm, 2, pattern, 4) == EINVAL && ibv_memcpy_from_dm(copy, dm, 0, 3) == EINVAL);
    CHECK(ibv_free_dm(dm) == 0);
}

void test_memory_of_a_device_is_limited() {
    Endpoint endpoint;
    ibv_device_attr_ex attr{};
    CHECK(ibv_query_device_ex(endpoint.context, nullptr, &attr) == 0 && attr.max_dm_size > 0);
    CHECK(allocate_device_memory(endpoint.context, attr.max_dm_size + 1) == nullptr && errno == EINVAL);
    CHECK(allocate_device_memory(endpoint.context, 0) == nullptr && errno == EINVAL);
    ibv_dm* const dm = allocate_device_memory(endpoint.context, attr.max_dm_size);
    CHECK(dm != nullptr);
    CHECK(allocate_device_memory(endpoint.context, 4) == nullptr && errno == ENOMEM);
    CHECK(ibv_free_dm(dm) == 0);
    ibv_alloc_dm_attr wrong_attr{};
    wrong_attr.length = 4;
    wrong_attr.comp_mask = 1; // a bit without a meaning
    CHECK(ibv_alloc_dm(endpoint.context, &wrong_attr) == nullptr && errno == EINVAL);
}

void test_peer_writes_into_a_region_by_offsets() {
    Endpoint requester(0);
    Endpoint responder(1);
    connect(&requester, &responder);
    Buffer source(requester.pd, 4096);
    fill_pattern(source.bytes, 4096);
    ibv_dm* const dm = allocate_device_memory(responder.context, 8192);
    errno = 0;
    // Device memory has no address, so a region needs IBV_ACCESS_ZERO_BASED.
    CHECK(ibv_reg_dm_mr(responder.pd, dm, 0, 4096, read_write_access) == nullptr && errno == EINVAL);
    CHECK(ibv_reg_dm_mr(responder.pd, dm, 4096, 4097, zero_based_access) == nullptr && errno == EINVAL);
    ibv_mr* const empty_region = ibv_reg_dm_mr(responder.pd, dm, 0, 0, zero_based_access);
    CHECK(empty_region != nullptr && ibv_dereg_mr(empty_region) == 0);
    ibv_mr* const mr = ibv_reg_dm_mr(responder.pd, dm, 4096, 4096, zero_based_access);
    CHECK(mr != nullptr && ibv_free_dm(dm) == EBUSY);
    // The remote address of a request is the offset in the zero-based region.
    CHECK(requester.post(make_request(1, IBV_WR_RDMA_WRITE, 96, mr->rkey), {source.sge(0, 4000)}) == 0);
    requester.expect_completion(1, IBV_WC_SUCCESS);
    std::uint8_t copy[4000];
    CHECK(ibv_memcpy_from_dm(copy, dm, 4096 + 96, sizeof copy) == 0 && has_pattern(copy, sizeof copy));
    // This write ends one byte behind the region.
    CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, 97, mr->rkey), {source.sge(0, 4000)}) == 0);
    requester.expect_completion(2, IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_free_dm(dm) == 0);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_copies_are_checked();
    test_memory_of_a_device_is_limited();
    test_peer_writes_into_a_region_by_offsets();
    return 0;
}
