// Compiled kernels on disk, one file each.
//
// Security: the GPU runs whatever the folder contains. It is created with mode 0700, and folders and files that belong to
// another user, or that others may write to, are ignored. A file is written under a draft's name and renamed, so that
// processes can share the folder. It contains its key and a checksum: a file that is damaged, truncated or of another key
// counts as absent. A read marks a file as used. A write that exceeds the size limit removes the least recently used of
// the cache's own files. A failing disk is not an error.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/nvrtc.h"

namespace jaxkern {

class DiskCache {
 public:
  // An empty folder name disables the cache.
  DiskCache(std::string folder, int64_t bound_bytes) : folder_(std::move(folder)), bound_bytes_(bound_bytes) {}

  bool Read(const std::string& key, Cubin* cubin) const;
  void Write(const std::string& key, const Cubin& cubin) const;

 private:
  bool Trusted() const;  // the folder exists or can be created, belongs to this user, and nobody else may write to it
  void Trim() const;

  std::string folder_;
  int64_t bound_bytes_;
};

}  // namespace jaxkern
