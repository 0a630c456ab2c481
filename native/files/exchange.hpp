#pragma once

namespace trackbed::files {

// Exchanges the names of two files or folders in one step. Returns 0 or the errno: EINVAL or ENOSYS where the file
// system or the kernel cannot. Requires: both exist, on one file system, and neither contains the other.
int exchange_names(const char* path, const char* other);

}  // namespace trackbed::files
