// Tests of the software twin of libcuda: advice about managed memory, and the prefetch of managed memory. The twin
// moves no pages. It remembers the last advice and prefetch of each page, and returns them in queries.
#include "cuda_driver.hpp"

using namespace gdrkit::twin::cuda;

namespace {

constexpr u64 page_bytes = 4096, memory_bytes = 4 * page_bytes;
// The twin has the devices 0 and 1. The id of a host location has no meaning.
constexpr Location first_device{location_device, 0}, second_device{location_device, 1},
    missing_device{location_device, 2}, host_location{location_host, 7}, no_location{location_none, 0};

u64 allocate_managed() {
    u64 pointer = 0;
    EXPECT_SUCCESS("cuMemAllocManaged", &pointer, memory_bytes, unsigned{attach_global});
    return pointer;
}

int query_attribute(int attribute, u64 pointer, u64 length_bytes) {
    int value = -9;
    EXPECT_SUCCESS("cuMemRangeGetAttribute", static_cast<void*>(&value), u64{sizeof value}, attribute, pointer,
                   length_bytes);
    return value;
}

void advise(u64 pointer, u64 length_bytes, int advice, Location location) {
    EXPECT_SUCCESS("cuMemAdvise_v2", pointer, length_bytes, advice, location);
}

// A query of several pages reports an attribute only if all these pages have it. The advice about a part of a page
// applies to the whole page.
void test_advice_belongs_to_pages() {
    const u64 memory = allocate_managed();
    CHECK(query_attribute(range_read_mostly, memory, memory_bytes) == 0);
    CHECK(query_attribute(range_preferred_location, memory, memory_bytes) == invalid_device_ordinal);
    advise(memory + 1, 1, advise_set_read_mostly, no_location);
    CHECK(query_attribute(range_read_mostly, memory, page_bytes) == 1);
    CHECK(query_attribute(range_read_mostly, memory + page_bytes, 1) == 0);
    CHECK(query_attribute(range_read_mostly, memory + page_bytes - 1, 2) == 0);
    advise(memory, memory_bytes, advise_set_read_mostly, no_location);
    advise(memory + page_bytes, page_bytes, advise_unset_read_mostly, no_location);
    CHECK(query_attribute(range_read_mostly, memory, memory_bytes) == 0);
    CHECK(query_attribute(range_read_mostly, memory + 2 * page_bytes, 2 * page_bytes) == 1);
    advise(memory, memory_bytes, advise_set_preferred_location, second_device);
    CHECK(query_attribute(range_preferred_location, memory, memory_bytes) == 1);
    CHECK(query_attribute(range_preferred_location_type, memory, memory_bytes) == location_device);
    CHECK(query_attribute(range_preferred_location_id, memory, memory_bytes) == 1);
    advise(memory, page_bytes, advise_set_preferred_location, host_location);
    CHECK(query_attribute(range_preferred_location, memory, page_bytes) == cpu_device);
    CHECK(query_attribute(range_preferred_location, memory, memory_bytes) == invalid_device_ordinal);
    CHECK(query_attribute(range_preferred_location_type, memory, memory_bytes) == location_none);
    advise(memory, memory_bytes, advise_set_accessed_by, second_device);
    EXPECT_SUCCESS("cuMemAdvise", memory, page_bytes, int{advise_set_accessed_by}, cpu_device);
    int accessing_devices[3] = {};
    int attributes[] = {range_accessed_by, range_preferred_location};
    int preferred_location = 0;
    u64 sizes[] = {sizeof accessing_devices, sizeof preferred_location};
    void* result_pointers[] = {accessing_devices, &preferred_location};
    EXPECT_SUCCESS("cuMemRangeGetAttributes", static_cast<void**>(result_pointers), static_cast<u64*>(sizes),
                   static_cast<int*>(attributes), u64{2}, memory, memory_bytes);
    CHECK(accessing_devices[0] == 1 && accessing_devices[1] == invalid_device_ordinal &&
          accessing_devices[2] == invalid_device_ordinal);
    CHECK(preferred_location == invalid_device_ordinal);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

void test_prefetch_is_remembered() {
    const u64 memory = allocate_managed();
    Handle stream = 0;
    EXPECT_SUCCESS("cuStreamCreate", &stream, unsigned{stream_non_blocking});
    EXPECT_SUCCESS("cuMemPrefetchAsync", memory, memory_bytes, 1, stream);
    CHECK(query_attribute(range_last_prefetch_location, memory, memory_bytes) == 1);
    EXPECT_SUCCESS("cuMemPrefetchAsync_v2", memory, page_bytes, host_location, 0U, stream);
    CHECK(query_attribute(range_last_prefetch_location, memory, page_bytes) == cpu_device);
    CHECK(query_attribute(range_last_prefetch_location_type, memory, page_bytes) == location_host);
    CHECK(query_attribute(range_last_prefetch_location, memory, memory_bytes) == invalid_device_ordinal);
    EXPECT_SUCCESS("cuMemPrefetchAsync_v2", memory, page_bytes, Location{location_host_numa, 0}, 0U, stream);
    CHECK(query_attribute(range_last_prefetch_location_type, memory, page_bytes) == location_host_numa);
    EXPECT_SUCCESS("cuStreamAttachMemAsync", stream, memory, u64{0}, unsigned{attach_single});
    EXPECT_SUCCESS("cuStreamSynchronize", stream);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
    EXPECT_SUCCESS("cuStreamDestroy_v2", stream);
}

void test_wrong_arguments_are_refused() {
    const u64 memory = allocate_managed(), device_memory = allocate(memory_bytes);
    const Handle stream = 0;
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", device_memory, page_bytes, first_device, 0U, stream);
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", memory, memory_bytes + 1, first_device, 0U, stream);
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", memory, u64{0}, first_device, 0U, stream);
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", memory, page_bytes, first_device, 1U,
                  stream); // the flags must be 0
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", memory, page_bytes, no_location, 0U, stream);
    EXPECT_RESULT(invalid_value, "cuMemPrefetchAsync_v2", memory, page_bytes, Location{location_host_numa, 9999}, 0U,
                  stream);
    EXPECT_RESULT(invalid_device, "cuMemPrefetchAsync_v2", memory, page_bytes, missing_device, 0U, stream);
    EXPECT_RESULT(invalid_device, "cuMemPrefetchAsync", memory, page_bytes, 2, stream);
    EXPECT_RESULT(invalid_handle, "cuMemPrefetchAsync", memory, page_bytes, 0, Handle{5});
    EXPECT_RESULT(invalid_value, "cuMemAdvise", memory, page_bytes, 7, 0); // 7 is not an advice
    EXPECT_RESULT(invalid_value, "cuMemAdvise", device_memory, page_bytes, int{advise_set_read_mostly}, 0);
    EXPECT_RESULT(invalid_value, "cuMemAdvise", memory, page_bytes, int{advise_set_preferred_location}, 2);
    EXPECT_RESULT(invalid_value, "cuMemAdvise_v2", memory, page_bytes, int{advise_set_accessed_by},
                  Location{location_host_numa, 0});
    // A result has 4 bytes, or a multiple of 4 for range_accessed_by. 9 is not an attribute.
    int unused_value = 0;
    EXPECT_RESULT(invalid_value, "cuMemRangeGetAttribute", static_cast<void*>(&unused_value), u64{8},
                  int{range_read_mostly}, memory, page_bytes);
    EXPECT_RESULT(invalid_value, "cuMemRangeGetAttribute", static_cast<void*>(&unused_value), u64{0},
                  int{range_accessed_by}, memory, page_bytes);
    EXPECT_RESULT(invalid_value, "cuMemRangeGetAttribute", static_cast<void*>(&unused_value), u64{4}, 9, memory,
                  page_bytes);
    // Only a whole allocation can be attached. 3 is not a flag.
    EXPECT_RESULT(invalid_value, "cuStreamAttachMemAsync", stream, memory, page_bytes, unsigned{attach_host});
    EXPECT_RESULT(invalid_value, "cuStreamAttachMemAsync", stream, memory, u64{0}, 3U);
    EXPECT_RESULT(invalid_value, "cuStreamAttachMemAsync", stream, device_memory, u64{0}, unsigned{attach_host});
    for (const Handle default_stream : {Handle{0}, Handle{legacy_stream_handle}}) {
        EXPECT_RESULT(invalid_value, "cuStreamAttachMemAsync", default_stream, memory, u64{0}, unsigned{attach_single});
    }
    EXPECT_SUCCESS("cuMemFree_v2", device_memory);
    EXPECT_SUCCESS("cuMemFree_v2", memory);
}

} // namespace

int main() {
    use_primary_context();
    test_advice_belongs_to_pages();
    test_prefetch_is_remembered();
    test_wrong_arguments_are_refused();
}
