// An open RDMA device with its first active port and a protection domain.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gdrkit::verbs {

// The address and settings of one side of a reliable connection. The other side needs them to connect.
struct Endpoint {
    std::uint32_t qp_number = 0;
    std::uint32_t psn = 0; // Packet sequence number of the first packet that this side sends.
    ibv_gid gid{};
    std::uint16_t lid = 0;          // Address of the port on InfiniBand; 0 on Ethernet.
    std::uint32_t mtu_bytes = 1024; // Active MTU of the port.
};

// format_gid() and parse_gid() convert a GID to and from text of eight groups of four hexadecimal digits, as in
// gdrkit.verbs.Endpoint. parse_gid() returns false for a text of another form.
std::string format_gid(const ibv_gid& gid);
bool parse_gid(const std::string& text, ibv_gid& gid);

// The deleter of Owned. It calls the function of libibverbs that releases the object.
struct VerbsDeleter {
    void operator()(ibv_context* context) const { ibv_close_device(context); }
    void operator()(ibv_pd* domain) const { ibv_dealloc_pd(domain); }
    void operator()(ibv_mr* region) const { ibv_dereg_mr(region); }
    void operator()(ibv_cq* queue) const { ibv_destroy_cq(queue); }
    void operator()(ibv_qp* pair) const { ibv_destroy_qp(pair); }
    void operator()(ibv_comp_channel* channel) const { ibv_destroy_comp_channel(channel); }
};
template <typename T> using Owned = std::unique_ptr<T, VerbsDeleter>;

// An open device with a protection domain, its first active port and the GID for connections.
class Device {
public:
    // Throws Error: ENODEV if there is no device with this name, ENETDOWN if the device has no active port, ENODATA if
    // the port has no GID, or the errno of a failed libibverbs call.
    explicit Device(const std::string& name);

    // Returns the names of all devices of this machine, including devices that cannot be opened.
    static std::vector<std::string> list_names();

    const std::string& name() const noexcept { return name_; }
    ibv_context* context() const noexcept { return context_.get(); }
    // The protection domain of the queue pairs and memory regions.
    ibv_pd* domain() const noexcept { return domain_.get(); }
    std::uint8_t port() const noexcept { return port_; }
    const ibv_port_attr& port_attributes() const noexcept { return port_attributes_; }
    int gid_index() const noexcept { return gid_index_; }
    const ibv_gid& gid() const noexcept { return gid_; }
    // Largest number of RDMA READs that a queue pair may have in progress: the limit of the device, but at most 16.
    std::uint8_t reads_max() const noexcept { return reads_max_; }

private:
    // Chooses the first active port, and also sets reads_max_.
    void choose_port();
    void choose_gid();

    std::string name_;
    Owned<ibv_context> context_;
    Owned<ibv_pd> domain_;
    std::uint8_t port_ = 0; // Number of the port, from 1 on.
    ibv_port_attr port_attributes_{};
    int gid_index_ = 0;
    ibv_gid gid_{};
    std::uint8_t reads_max_ = 1;
};

} // namespace gdrkit::verbs
