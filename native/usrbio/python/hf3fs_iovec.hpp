// The Python class iovec of the module hf3fs. It is memory for the operations of a ring (a hf3fs_iov of the client
// library), or a slice of such memory.
#pragma once

#include "hf3fs_library.hpp"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gdrkit::usrbio {

namespace nb = nanobind;

// One hf3fs_iov, shared by an iovec and its slices, with references to the Python objects that own the memory. Every
// method requires the GIL.
class IovecMemory {
public:
    enum class Kind { host, wrapped_buffer, device };

    IovecMemory(Kind kind, nb::object owner) : kind_(kind), owner_(std::move(owner)) {}
    IovecMemory(const IovecMemory&) = delete;
    IovecMemory& operator=(const IovecMemory&) = delete;
    ~IovecMemory();

    // Acquires the buffer (Py_buffer) of the Python object that owns the memory, and returns it. Until
    // release_buffer(), Python refuses to resize or close this object.
    const Py_buffer& acquire_buffer();
    void release_buffer() noexcept;
    // Marks the memory as open. Call it after the library has filled in iov().
    void mark_open() noexcept { is_open_ = true; }
    // Calls before_close, destroys the iov in the library, and releases all references. Raises an error if the memory
    // is in use.
    void close();

    Iov& iov() noexcept { return iov_; }
    const Iov& iov() const noexcept { return iov_; }
    bool is_device() const noexcept { return kind_ == Kind::device; }
    bool is_open() const noexcept { return is_open_; }
    void check_open() const; // Raises an error if the memory is closed.

    // A use of the memory: an outstanding operation, or a buffer (memoryview, array) that Python code holds. As long as
    // there are uses, the memory cannot be closed, and wrapped memory holds the buffer of its owner. Without uses, the
    // owner may release the wrapped memory; existing programs for 3FS do so before they delete the last iovec. A later
    // begin_use() raises an error.
    enum class Use { operation, buffer };
    void begin_use(Use use);
    void end_use(Use use) noexcept;
    std::size_t operation_count() const noexcept { return operation_count_; }

    // A Python function that close() and the destructor call first; may be empty.
    nb::object before_close;

    // Visits the Python objects that the memory refers to, for Python's garbage collector.
    int traverse(visitproc visit, void* argument) const noexcept;

private:
    void call_before_close();
    void release(); // Destroys the iov in the library.

    Kind kind_;
    nb::object owner_; // The Python object that owns wrapped memory; None for memory of the library.
    Iov iov_{};
    Py_buffer buffer_{}; // The buffer of `owner_`; valid only if `has_buffer_` is true.
    bool has_buffer_ = false;
    bool is_open_ = false;
    std::size_t operation_count_ = 0; // Number of uses by operations.
    std::size_t buffer_count_ = 0;    // Number of uses by buffers of Python code.
};

struct Iovec {
    std::shared_ptr<IovecMemory> memory;
    std::size_t offset = 0; // Offset of this iovec in `memory`, in bytes.
    std::size_t length = 0; // Length of this iovec, in bytes.
    bool is_slice = false;
    bool is_outstanding = false; // An outstanding operation uses this iovec and will set `result`.
    std::int64_t result = 0;     // Result of the last operation: bytes moved, or a negative errno.
    nb::object userdata = nb::none();

    std::uint8_t* begin() const noexcept { return memory->iov().base + offset; }
    // Returns the slice of `slice_bytes` bytes that begins `begin_offset` bytes after the beginning of this iovec.
    Iovec slice(std::size_t begin_offset, std::size_t slice_bytes) const;
};

// The 16 bytes of a UUID.
struct Uuid {
    std::uint8_t bytes[16];
};
// Parses the text of a UUID, with or without hyphens. Raises an error for any other text.
Uuid parse_uuid(const std::string& text);

void bind_iovec(nb::module_& module);

} // namespace gdrkit::usrbio
