#include "runtime/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "runtime/hash.h"

namespace jaxkern {
namespace {

constexpr char kMagic[] = "jaxkern kernel 1\n";
constexpr char kSuffix[] = ".jaxkern";
constexpr char kDraftSuffix[] = ".XXXXXX";  // for mkostemp
constexpr time_t kClockSkew = 3600;         // seconds by which the clock of a file server may be ahead

struct File {
  int fd;
  explicit File(int fd) : fd(fd) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
};

bool ReadAll(int fd, std::string* text) {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n == 0) return true;
    if (n < 0) return false;
    text->append(buffer, n);
  }
}

bool WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n <= 0) return false;
    text.remove_prefix(n);
  }
  return true;
}

// Whether the cache made a file of this name: a hash and the suffix, and for a draft mkostemp's letters.
bool IsOwnName(std::string_view name) {
  constexpr size_t kHash = 32, kWhole = kHash + sizeof kSuffix - 1, kDraft = kWhole + sizeof kDraftSuffix - 1;
  return (name.size() == kWhole || (name.size() == kDraft && name[kWhole] == '.')) &&
         name.find_first_not_of("0123456789abcdef") == kHash && name.substr(kHash, sizeof kSuffix - 1) == kSuffix;
}

// The length of a field, then its bytes.
void Put(std::string* out, std::string_view field) {
  const uint64_t size = field.size();
  out->append(reinterpret_cast<const char*>(&size), sizeof size);
  out->append(field);
}

bool Take(std::string_view* in, std::string_view* field) {
  uint64_t size = 0;
  if (in->size() < sizeof size) return false;
  memcpy(&size, in->data(), sizeof size);
  in->remove_prefix(sizeof size);
  if (size > in->size()) return false;
  *field = in->substr(0, size);
  in->remove_prefix(size);
  return true;
}

bool OursAlone(const struct stat& s) { return s.st_uid == geteuid() && (s.st_mode & (S_IWGRP | S_IWOTH)) == 0; }

bool MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return true;
  const size_t slash = path.find_last_of('/');
  if (errno != ENOENT || slash == std::string::npos || slash == 0) return false;
  return MakeFolder(path.substr(0, slash)) && (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST);
}

}  // namespace

bool DiskCache::Trusted() const {
  if (folder_.empty() || !MakeFolder(folder_)) return false;
  struct stat s;
  return stat(folder_.c_str(), &s) == 0 && S_ISDIR(s.st_mode) && OursAlone(s);
}

bool DiskCache::Read(const std::string& key, Cubin* cubin) const {
  if (!Trusted()) return false;
  // O_NONBLOCK: opening a FIFO would wait for a writer.
  const File file(
      open((folder_ + "/" + HexHash(key) + kSuffix).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat s;
  if (file.fd < 0 || fstat(file.fd, &s) != 0 || !S_ISREG(s.st_mode) || !OursAlone(s)) return false;
  std::string text;
  if (!ReadAll(file.fd, &text)) return false;
  std::string_view rest = text, checksum, body, own_key, symbol, image;
  if (rest.substr(0, sizeof kMagic - 1) != kMagic) return false;
  rest.remove_prefix(sizeof kMagic - 1);
  if (!Take(&rest, &checksum) || !Take(&rest, &body) || !rest.empty() || checksum != HexHash(body)) return false;
  if (!Take(&body, &own_key) || !Take(&body, &symbol) || !Take(&body, &image) || own_key != key) return false;
  cubin->symbol = symbol;
  cubin->image = image;
  futimens(file.fd, nullptr);  // used now
  return true;
}

void DiskCache::Write(const std::string& key, const Cubin& cubin) const {
  if (!Trusted()) return;
  const std::string path = folder_ + "/" + HexHash(key) + kSuffix;
  std::string draft = path + kDraftSuffix;
  std::string body, text = kMagic;
  Put(&body, key);
  Put(&body, cubin.symbol);
  Put(&body, cubin.image);
  Put(&text, HexHash(body));
  Put(&text, body);
  bool whole = false;
  {
    const File file(mkostemp(draft.data(), O_CLOEXEC));  // mode 0600
    if (file.fd < 0) return;
    whole = WriteAll(file.fd, text);
  }
  if (!whole || rename(draft.c_str(), path.c_str()) != 0) {
    unlink(draft.c_str());
    return;
  }
  Trim();
}

void DiskCache::Trim() const {
  struct Entry {
    timespec used;
    int64_t bytes;
    std::string path;
  };
  std::vector<Entry> entries;
  int64_t total = 0;
  DIR* const folder = opendir(folder_.c_str());
  if (!folder) return;
  const time_t future = time(nullptr) + kClockSkew;
  while (const dirent* entry = readdir(folder)) {
    if (!IsOwnName(entry->d_name)) continue;  // drafts of processes that died count too
    const std::string path = folder_ + "/" + entry->d_name;
    struct stat s;
    if (lstat(path.c_str(), &s) != 0 || !S_ISREG(s.st_mode) || s.st_uid != geteuid()) continue;
    // A time in the future says nothing about use. Such a file goes first, or it would outlive every new one.
    entries.push_back({s.st_mtim.tv_sec > future ? timespec{0, 0} : s.st_mtim, s.st_size, path});
    total += s.st_size;
  }
  closedir(folder);
  if (total <= bound_bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.used.tv_sec != b.used.tv_sec ? a.used.tv_sec < b.used.tv_sec : a.used.tv_nsec < b.used.tv_nsec;
  });
  for (const Entry& entry : entries) {
    if (total <= bound_bytes_ * 3 / 4) break;  // not again at the next write
    if (unlink(entry.path.c_str()) == 0) total -= entry.bytes;
  }
}

}  // namespace jaxkern
