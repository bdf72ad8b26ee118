// Compiled kernels on disk, one file each.
//
// The folder is a way into the process: whatever lies in it is run on the GPU. So it is made with mode 0700, and
// neither a folder nor a file is read that belongs to another user or that others may write to. Files appear by rename,
// so that several processes can share a folder, and carry their key and a checksum: what is damaged, truncated or of
// another key is as good as absent. A read marks the file as used; a write that takes the folder over its bound removes
// the files that were used least recently. No failure of the disk is an error.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/nvrtc.h"

namespace jaxkern {

class DiskCache {
 public:
  // An empty folder: no cache.
  DiskCache(std::string folder, int64_t bound_bytes) : folder_(std::move(folder)), bound_bytes_(bound_bytes) {}

  bool Read(const std::string& key, Cubin* cubin) const;
  void Write(const std::string& key, const Cubin& cubin) const;

 private:
  bool Trusted() const;  // the folder is there (or can be made), ours, and writable by nobody else
  void Trim() const;

  std::string folder_;
  int64_t bound_bytes_;
};

}  // namespace jaxkern
