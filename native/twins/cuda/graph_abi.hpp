// The part of the CUDA driver's binary interface that concerns graphs and the capture of streams, written from the
// public documentation of CUDA 13.0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cuda_abi.hpp"

namespace gdrkit::twin::cuda {

// The types of CUgraphNodeType that the twin supports.
enum NodeType : int {
    node_copy = 1,
    node_fill = 2,
    node_host = 3,
    node_graph = 4,
    node_empty = 5,
    node_wait_event = 6,
    node_record_event = 7,
    node_allocate = 10,
    node_free = 11,
    node_conditional = 13,
};

// CUgraphConditionalNodeType, CU_GRAPH_COND_ASSIGN_DEFAULT
enum ConditionalType : int { conditional_if = 0, conditional_while = 1, conditional_switch = 2 };
inline constexpr unsigned condition_assign_default = 1;

// CUstreamCaptureStatus, CUstreamUpdateCaptureDependencies_flags
enum CaptureStatus : int { capture_none = 0, capture_active = 1, capture_invalidated = 2 };
enum CaptureDependencies : unsigned { capture_add_dependencies = 0, capture_set_dependencies = 1 };

// CUgraphInstantiate_flags, CUgraphInstantiateResult, CUgraphExecUpdateResult
enum InstantiateFlags : std::uint64_t {
    instantiate_auto_free = 1,
    instantiate_upload = 2,
    instantiate_device_launch = 4,
    instantiate_node_priority = 8,
};
enum InstantiateResult : int { instantiate_success = 0, instantiate_error = 1, instantiate_invalid_structure = 2 };
enum UpdateResult : int {
    update_success = 0,
    update_error = 1,
    update_topology_changed = 2,
    update_node_type_changed = 3,
    update_parameters_changed = 5,
};

struct FillParameters { // CUDA_MEMSET_NODE_PARAMS
    DevicePointer to;
    std::size_t pitch_bytes;
    std::uint32_t value;
    std::uint32_t element_bytes;
    std::size_t width, height; // the numbers of values in a row, and of rows
};
static_assert(sizeof(FillParameters) == 40 && offsetof(FillParameters, width) == 24);

struct HostParameters { // CUDA_HOST_NODE_PARAMS
    void (*function)(void*);
    void* user_data;
};
static_assert(sizeof(HostParameters) == 16);

struct AllocateParameters { // CUDA_MEM_ALLOC_NODE_PARAMS
    PoolProperties pool;
    const AccessDescription* access;
    std::size_t access_count;
    std::size_t length_bytes;
    DevicePointer pointer;
};
static_assert(sizeof(AllocateParameters) == 120 && offsetof(AllocateParameters, pointer) == 112);

struct ConditionalParameters { // CUDA_CONDITIONAL_NODE_PARAMS
    Handle condition;
    std::int32_t type;
    std::uint32_t body_count;
    Handle* bodies;
    Handle context;
};
static_assert(sizeof(ConditionalParameters) == 32 && offsetof(ConditionalParameters, bodies) == 16);

struct EdgeData { // CUgraphEdgeData
    std::uint8_t from_port, to_port, type;
    std::uint8_t reserved[5];
};
static_assert(sizeof(EdgeData) == 8);

// CUgraphNodeParams, with the union members of the node types that the twin supports
struct NodeParameterUnion {
    std::int32_t type;
    std::int32_t reserved[3];
    union {
        std::uint64_t words[29]; // gives the union the size that CUDA defines
        struct {
            std::int32_t flags, reserved;
            Handle context;
            Copy3d copy;
        } copy;
        struct {
            FillParameters fill;
            Handle context;
        } fill;
        HostParameters host;
        Handle graph;
        Handle event;
        AllocateParameters allocate;
        DevicePointer free;
        ConditionalParameters conditional;
    };
    std::uint64_t reserved_too;
};
static_assert(sizeof(NodeParameterUnion) == 256 && offsetof(NodeParameterUnion, words) == 16);

struct InstantiateParameters { // CUDA_GRAPH_INSTANTIATE_PARAMS
    std::uint64_t flags;
    Handle upload_stream;
    Handle error_node;
    std::int32_t result;
};
static_assert(sizeof(InstantiateParameters) == 32);

struct UpdateInformation { // CUgraphExecUpdateResultInfo
    std::int32_t result;
    Handle error_node, error_from_node;
};
static_assert(sizeof(UpdateInformation) == 24);

} // namespace gdrkit::twin::cuda
