// The identifier (rdma_cm_id) with its state, and the event channel with its queue.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ibverbs/event_queue.hpp"
#include "model/sockets.hpp"
#include "rdmacm/devices.hpp"
#include "rdmacm/manager.hpp"
#include "rdmacm/wire.hpp"

namespace gdrkit::twin::rdmacm {

struct Connection;
struct Identifier;

// The states of an identifier. They are the states of the kernel (enum rdma_cm_state) that decide which calls are
// allowed.
enum class State { idle, bound, addr_resolved, route_resolved, connecting, disconnected, listening };

// An event as the kernel would report it. rdma_get_cm_event converts it to the event that the program gets, and changes
// the state of the queue pair if the event requires it.
struct QueuedEvent {
    Identifier* id = nullptr;     // the identifier that the event is reported on; for a request, the listener
    Identifier* new_id = nullptr; // for a request, the identifier of the new connection
    rdma_cm_event_type type{};
    int status = 0;
    // The parameters for rdma_cm_event::param. Their private data is in `private_data` below.
    rdma_conn_param conn{};
    rdma_ud_param ud{};
    bool is_datagram = false; // the parameters of the event are in `ud`, not in `conn`
    std::array<std::uint8_t, 256> private_data{};
    std::uint8_t private_bytes = 0;
    std::shared_ptr<verbs::EventCounter> event_counter; // the counter of `id`
    IpAddress group;                                    // the group of a multicast join
};

// An event channel.
struct Channel {
    rdma_event_channel public_channel{}; // first, because programs hold pointers to it
    verbs::EventQueue<QueuedEvent> events;
};

// The port of an identifier. The names of the sockets reserve the port in the domain (see ports.hpp).
struct PortClaim {
    std::uint16_t port = 0;       // host byte order; 0: none
    std::vector<Fd> name_sockets; // empty while the port is shared (RDMA_OPTION_ID_REUSEADDR)
};

// A group that the identifier has joined.
struct JoinedGroup {
    IpAddress address;
    ibv_gid gid{};
    void* context = nullptr;
    bool is_attached = false; // the identifier's queue pair receives the messages of the group
};

// The twin's object behind an rdma_cm_id.
struct Identifier {
    Identifier() = default;
    Identifier(const Identifier&) = delete;
    Identifier& operator=(const Identifier&) = delete;
    // Free the route here and not in rdma_destroy_id, which is not called for a request that the program has not taken.
    ~Identifier() { std::free(public_id.route.path_rec); }

    rdma_cm_id public_id{}; // first, because programs hold pointers to it
    // Shared with connections that wait for a request. close_identifier() sets the inner pointer to nullptr.
    std::shared_ptr<Identifier*> pointer_to_self = std::make_shared<Identifier*>(this);
    State state = State::idle;
    Channel* channel = nullptr;
    bool is_synchronous = false; // the identifier owns its channel, and each call waits for its event
    // Counts the events that the program has taken, and the events that it has acknowledged.
    std::shared_ptr<verbs::EventCounter> event_counter = std::make_shared<verbs::EventCounter>();
    std::optional<LocalGid> local_gid; // the device of the source address; empty until the device is known
    CmDevice* pd_device = nullptr;     // the device whose default protection domain the identifier uses
    ibv_gid remote_gid{};
    PortClaim port_claim;
    std::uint32_t psn = 0; // first packet sequence number of this side, 24 bits
    // These are the options of rdma_set_option: RDMA_OPTION_ID_TOS, _ACK_TIMEOUT, _REUSEADDR and _AFONLY.
    std::uint8_t tos = 0;         // type of service, the traffic class of packets
    std::uint8_t ack_timeout = 0; // the timeout is 4.096 us * 2^ack_timeout; 0: not set
    bool reuse_address = false;
    bool ipv6_only = false;
    // A listener uses the members from here on.
    std::vector<std::pair<Fd, Token>> listening_sockets; // with the tokens of their watches
    int free_backlog = 0;                                // number of requests that the backlog can still hold
    // If this is not 0, the connection manager answers datagram requests (SIDR) with this queue pair number, and
    // reports no event.
    std::uint32_t automatic_qp_num = 0;
    // An identifier with a connection uses the members from here on.
    std::shared_ptr<Connection> connection;
    // Limits of the RDMA reads and atomics in progress that the peer requests (responder_resources) and that this side
    // requests (initiator_depth).
    std::uint8_t responder_resources = 0, initiator_depth = 0;
    std::uint8_t retry_count = 7, rnr_retry_count = 7;
    std::uint32_t remote_qp_num = 0, remote_psn = 0;
    std::uint32_t qkey = 0;
    bool is_passive = false;
    bool is_accepted = false; // (passive side) the program has called rdma_accept; before, it gets no event
    // The program got RDMA_CM_EVENT_CONNECT_ERROR. It gets no event about the end of the connection.
    bool has_connect_failed = false;
    std::unique_ptr<ibv_qp_init_attr> endpoint_qp_attributes; // stored by rdma_create_ep for rdma_get_request
    std::string connect_private_data;                         // stored by rdma_create_ep for rdma_connect
    std::vector<JoinedGroup> joined_groups;
};

// Return the identifier of a public structure, or nullptr if the structure is not an identifier. If the identifier was
// destroyed before, print the stacks of its creation, its destruction and this call, and abort the process.
Identifier* get_identifier(rdma_cm_id* id);
// Return the event channel of a public structure, in the same way.
Channel* get_channel(rdma_event_channel* channel);

// Create an identifier. If `channel` is nullptr, the identifier is synchronous and gets a channel of its own. Return 0
// or an errno.
int make_identifier(rdma_event_channel* channel, void* context, rdma_port_space port_space, ibv_qp_type qp_type,
                    Identifier** id);

// Store the device with its GID, or the source address, in the identifier. librdmacm gets them from the kernel.
void set_local_gid(Identifier* id, const LocalGid& local_gid);
void set_source_address(Identifier* id, const IpAddress& address, std::uint16_t port);

// Queue an event of the identifier at its channel. The caller holds the lock of the manager.
void queue_event(Identifier* id, QueuedEvent event);
void queue_event(Identifier* id, rdma_cm_event_type type, int status = 0);

// If the identifier is synchronous, wait for the event that completes the current call, and store it in
// `id->public_id.event`. Return 0, the errno of rdma_get_cm_event, ECONNREFUSED for a rejection, or the status of the
// event without its sign. If the program gave the channel, do nothing and return 0.
int wait_if_synchronous(Identifier* id);

// Return whether the queue pairs of the identifier are unreliable datagram queue pairs.
bool is_datagram(const Identifier& id);

} // namespace gdrkit::twin::rdmacm
