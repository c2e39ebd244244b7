// Tests of names and targets of the links of GPU iovs (gpu_target.hpp). Each name and each target has only one
// spelling, and the parser refuses every other text.
#include "usrbio/client/gpu_target.hpp"

#include <algorithm>
#include <string>

#include "tests/check.hpp"

namespace {

using namespace gdrkit::usrbio;

const std::string ipc_digits(128, 'a');

// Returns a valid target in which `old_text` is replaced by `new_text`.
std::string replace_in_target(const std::string& old_text, const std::string& new_text) {
    std::string text = "gdr://v2/device/1/allocation/65536/offset/512/size/4096/ipc/" + ipc_digits;
    const auto position = text.find(old_text);
    CHECK(position != std::string::npos);
    return text.replace(position, old_text.size(), new_text);
}

void check_refused(const std::string& text) {
    if (parse_target(text)) {
        std::fprintf(stderr, "this malformed target was accepted: %s\n", text.c_str());
        CHECK(false);
    }
}

void test_valid_targets_are_parsed() {
    GpuTarget target{7, 1 << 30, 65537, 4099, std::array<std::uint8_t, 64>{}};
    (*target.ipc)[0] = 0x0f;
    (*target.ipc)[63] = 0xa0;
    const std::string text = format_target(target);
    CHECK(text.starts_with("gdr://v2/device/7/allocation/1073741824/offset/65537/size/4099/ipc/0f00"));
    CHECK(text.ends_with("00a0"));
    CHECK(parse_target(text) == target);
    target.ipc.reset();
    CHECK(format_target(target) == "gdr://v2/device/7/allocation/1073741824/offset/65537/size/4099/dmabuf");
    CHECK(parse_target(format_target(target)) == target);
    CHECK(parse_target(replace_in_target("", "")).has_value()); // The target is unchanged.
    // This range ends at the end of the allocation.
    CHECK(parse_target(replace_in_target("offset/512/size/4096", "offset/61440/size/4096")).has_value());
}

void test_malformed_targets_are_refused() {
    check_refused("");
    check_refused("gdr://");
    check_refused("/dev/shm/hf3fs-iov");
    check_refused("gdr://device/0/ptr/140737488355328/size/4096");
    check_refused(replace_in_target("v2", "v1"));
    check_refused(replace_in_target("gdr:", "GDR:"));
    check_refused(replace_in_target("device/1", "device/-1"));
    check_refused(replace_in_target("device/1", "device/+1"));
    check_refused(replace_in_target("device/1", "device/01"));
    check_refused(replace_in_target("device/1", "device/ 1"));
    check_refused(replace_in_target("device/1", "device/"));
    check_refused(replace_in_target("device/1", "device/2147483648"));
    check_refused(replace_in_target("65536", "0x10000"));
    check_refused(replace_in_target("65536", "18446744073709551616"));
    check_refused(replace_in_target("65536", "9223372036854775808"));
    check_refused(replace_in_target("65536", "1"));
    check_refused(replace_in_target("512", "65537"));
    check_refused(replace_in_target("size/4096", "size/0"));
    check_refused(replace_in_target("size/4096", "size/65025"));
    check_refused(replace_in_target("size/4096", "size/18446744073709551615"));
    check_refused(replace_in_target("offset/512/size/4096", "size/4096/offset/512"));
    check_refused(replace_in_target("/ipc/" + ipc_digits, ""));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + ipc_digits.substr(1)));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + ipc_digits + "a"));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + ipc_digits + "/"));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + std::string(128, '0')));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + std::string(128, 'A')));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/ipc/" + std::string(127, 'a') + "g"));
    check_refused(replace_in_target("/ipc/" + ipc_digits, "/dmabuf/"));
    // This target ends in a zero byte.
    check_refused(std::string("gdr://v2/device/1/allocation/65536/offset/512/size/4096/dmabuf\0", 63));
}

void test_link_names_contain_id_and_device() {
    std::uint8_t id[16];
    for (std::size_t position = 0; position < 16; ++position) {
        id[position] = static_cast<std::uint8_t>(position * 16 + 1);
    }
    const std::string name = "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d3";
    CHECK(make_gpu_link_name(id, 3) == name);
    const auto link_name = parse_gpu_link_name(name);
    CHECK(link_name.has_value() && std::ranges::equal(link_name->id, id) && link_name->owner_device == 3);
    CHECK(make_gpu_link_name(link_name->id.data(), 3) == name);
    for (const char* const malformed_name :
         {"", "01112131-4151-6171-8191-a1b1c1d1e1f1", "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d",
          "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d-1", "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d99999999999",
          "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d3.b4096", "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d03",
          "01112131415161718191a1b1c1d1e1f1.gdr.d3", "01112131-4151-6171-8191-A1b1c1d1e1f1.gdr.d3"}) {
        CHECK(!parse_gpu_link_name(malformed_name));
    }
}

} // namespace

int main() {
    test_valid_targets_are_parsed();
    test_malformed_targets_are_refused();
    test_link_names_contain_id_and_device();
}
