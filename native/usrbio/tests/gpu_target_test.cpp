// What links of GPU iovs say: one spelling, and everything else refused.
#include "usrbio/client/gpu_target.hpp"

#include <string>

#include "tests/check.hpp"

namespace {

using namespace gdrkit::usrbio;

const std::string digits(128, 'a');

std::string with(const std::string& from, const std::string& to) {
    std::string text = "gdr://v2/device/1/allocation/65536/offset/512/size/4096/ipc/" + digits;
    const auto at = text.find(from);
    CHECK(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

void refuses(const std::string& text) {
    if (parse_target(text)) {
        std::fprintf(stderr, "was taken: %s\n", text.c_str());
        CHECK(false);
    }
}

void targets() {
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
    CHECK(parse_target(with("", "")).has_value());
    CHECK(parse_target(with("offset/512/size/4096", "offset/61440/size/4096")).has_value());
}

void malformed_targets() {
    refuses("");
    refuses("gdr://");
    refuses("/dev/shm/hf3fs-iov");
    refuses("gdr://device/0/ptr/140737488355328/size/4096");
    refuses(with("v2", "v1"));
    refuses(with("gdr:", "GDR:"));
    refuses(with("device/1", "device/-1"));
    refuses(with("device/1", "device/+1"));
    refuses(with("device/1", "device/01"));
    refuses(with("device/1", "device/ 1"));
    refuses(with("device/1", "device/"));
    refuses(with("device/1", "device/2147483648"));
    refuses(with("65536", "0x10000"));
    refuses(with("65536", "18446744073709551616"));
    refuses(with("65536", "9223372036854775808"));
    refuses(with("65536", "1"));
    refuses(with("512", "65537"));
    refuses(with("size/4096", "size/0"));
    refuses(with("size/4096", "size/65025"));
    refuses(with("size/4096", "size/18446744073709551615"));
    refuses(with("offset/512/size/4096", "size/4096/offset/512"));
    refuses(with("/ipc/" + digits, ""));
    refuses(with("/ipc/" + digits, "/ipc/" + digits.substr(1)));
    refuses(with("/ipc/" + digits, "/ipc/" + digits + "a"));
    refuses(with("/ipc/" + digits, "/ipc/" + digits + "/"));
    refuses(with("/ipc/" + digits, "/ipc/" + std::string(128, '0')));
    refuses(with("/ipc/" + digits, "/ipc/" + std::string(128, 'A')));
    refuses(with("/ipc/" + digits, "/ipc/" + std::string(127, 'a') + "g"));
    refuses(with("/ipc/" + digits, "/dmabuf/"));
    refuses(std::string("gdr://v2/device/1/allocation/65536/offset/512/size/4096/dmabuf\0", 63));
}

void names() {
    std::uint8_t id[16];
    for (std::size_t at = 0; at < 16; ++at) {
        id[at] = static_cast<std::uint8_t>(at * 16 + 1);
    }
    const std::string name = "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d3";
    CHECK(gpu_link_name(id, 3) == name);
    const auto parsed = parse_gpu_link_name(name, 3);
    CHECK(parsed.has_value() && std::equal(parsed->begin(), parsed->end(), id));
    for (const char* const bad :
         {"", "01112131-4151-6171-8191-a1b1c1d1e1f1", "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d4",
          "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d3.b4096", "01112131-4151-6171-8191-a1b1c1d1e1f1.gdr.d03",
          "01112131415161718191a1b1c1d1e1f1.gdr.d3", "01112131-4151-6171-8191-A1b1c1d1e1f1.gdr.d3"}) {
        CHECK(!parse_gpu_link_name(bad, 3));
    }
}

} // namespace

int main() {
    targets();
    malformed_targets();
    names();
}
