// The ioctls of a FUSE mount of 3FS, with the numbers and layouts that the daemon of 3FS defines.
#pragma once

#include <linux/ioctl.h>
#include <linux/limits.h>

#include <cstddef>
#include <cstdint>

namespace gdrkit::usrbio {

inline constexpr std::size_t punch_hole_ranges_max = 1000;

// Argument of fuse_hard_link. This ioctl on a file creates a hard link to the file: `name` in the folder with the inode
// `folder_inode`.
struct FuseHardLink {
    std::uint64_t folder_inode;
    char name[NAME_MAX];
};
static_assert(sizeof(FuseHardLink) == 264);

// Argument of fuse_punch_hole. This ioctl on a file removes the ranges [begin[i], end[i]) of the file, for i < count.
struct FusePunchHole {
    std::int32_t count;
    std::uint64_t flags;
    std::uint64_t begin[punch_hole_ranges_max];
    std::uint64_t end[punch_hole_ranges_max];
};
static_assert(sizeof(FusePunchHole) == 16016 && offsetof(FusePunchHole, begin) == 16);

// The ioctl fuse_get_magic returns HF3FS_SUPER_MAGIC, by which the library recognizes a file of 3FS.
inline constexpr unsigned long fuse_get_magic = _IOR('h', 2, std::uint32_t);
inline constexpr unsigned long fuse_hard_link = _IOW('h', 12, FuseHardLink);
inline constexpr unsigned long fuse_punch_hole = _IOW('h', 13, FusePunchHole);

} // namespace gdrkit::usrbio
