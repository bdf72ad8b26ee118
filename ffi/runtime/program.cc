#include "runtime/program.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

namespace jaxkern {
namespace {

// Reads arguments and lays them out as C++ does: each at a multiple of its alignment, a struct's size one of its own.
class Arguments {
 public:
  Arguments(std::istringstream& in, int buffers, Step* step) : in_(in), buffers_(buffers), step_(step) {}

  bool Read() {
    std::string token;
    while (in_ >> token) {
      const size_t first_pointer = step_->pointers.size();
      std::vector<unsigned char> bytes;
      const uint32_t align = One(token, &bytes, step_->pointers);
      if (align == 0) return false;
      const uint32_t at = Append(align, bytes, &step_->arguments);
      for (size_t i = first_pointer; i < step_->pointers.size(); ++i) step_->pointers[i].at += at;
      step_->argument_offsets.push_back(at);
    }
    return true;
  }

 private:
  static uint32_t Append(uint32_t align, const std::vector<unsigned char>& bytes, std::vector<unsigned char>* to) {
    to->resize((to->size() + align - 1) / align * align);
    const uint32_t at = static_cast<uint32_t>(to->size());
    to->insert(to->end(), bytes.begin(), bytes.end());
    return at;
  }

  // The bytes of the argument that begins with `token`, the pointers in it relative to its begin; returns its
  // alignment, or 0 for an error.
  uint32_t One(const std::string& token, std::vector<unsigned char>* bytes, std::vector<Step::Pointer>& pointers) {
    const char* const text = token.c_str();
    if (token[0] == '{') {
      uint32_t align = static_cast<uint32_t>(strtoul(text + 1, nullptr, 10));
      if (align == 0 || align > 256) return 0;
      std::string member;
      while (in_ >> member && member != "}") {
        const size_t first = pointers.size();
        std::vector<unsigned char> part;
        const uint32_t part_align = One(member, &part, pointers);
        if (part_align == 0) return 0;
        const uint32_t at = Append(part_align, part, bytes);
        for (size_t i = first; i < pointers.size(); ++i) pointers[i].at += at;
        align = part_align > align ? part_align : align;
      }
      bytes->resize((bytes->size() + align - 1) / align * align);
      return align;
    }
    if (token[0] == 'p') {
      Step::Pointer pointer = {0, {}};
      if (!ReadBuffer(token, buffers_, &pointer.ref)) return 0;
      pointers.push_back(pointer);
      return Value(uint64_t{0}, bytes);
    }
    const size_t colon = token.find(':');
    if (colon == std::string::npos) return 0;
    const std::string type = token.substr(0, colon);
    const char* const value = text + colon + 1;
    if (type == "i32") return Value(static_cast<int32_t>(strtoll(value, nullptr, 10)), bytes);
    if (type == "u32") return Value(static_cast<uint32_t>(strtoull(value, nullptr, 10)), bytes);
    if (type == "i64") return Value(static_cast<int64_t>(strtoll(value, nullptr, 10)), bytes);
    if (type == "u64") return Value(static_cast<uint64_t>(strtoull(value, nullptr, 10)), bytes);
    if (type == "u8") return Value(static_cast<uint8_t>(strtoul(value, nullptr, 10)), bytes);
    if (type == "f32") return Value(strtof(value, nullptr), bytes);
    if (type == "f64") return Value(strtod(value, nullptr), bytes);
    return 0;
  }

  template <class T> static uint32_t Value(T value, std::vector<unsigned char>* bytes) {
    bytes->resize(sizeof value);
    memcpy(bytes->data(), &value, sizeof value);
    return sizeof value;
  }

 public:
  static bool ReadBuffer(const std::string& token, int buffers, BufferRef* ref) {
    char* end = nullptr;
    if (token.size() < 4 || token[0] != 'p') return false;
    ref->buffer = static_cast<int>(strtol(token.c_str() + 1, &end, 10));
    if (*end != '+') return false;
    ref->offset = strtoll(end + 1, &end, 10);
    return *end == '\0' && ref->buffer >= 0 && ref->buffer < buffers;
  }

 private:
  std::istringstream& in_;
  int buffers_;
  Step* step_;
};

bool ReadThree(std::string_view text, unsigned (&size)[3]) {
  return sscanf(std::string(text).c_str(), "%u,%u,%u", &size[0], &size[1], &size[2]) == 3;
}

bool ReadLaunch(std::istringstream& in, Step* step) {
  std::string item;
  while (in >> item) {
    const size_t equals = item.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = item.substr(0, equals), value = item.substr(equals + 1);
    const unsigned number = static_cast<unsigned>(strtoul(value.c_str(), nullptr, 10));
    if (name == "grid") {
      if (!ReadThree(value, step->grid)) return false;
    } else if (name == "block") {
      if (!ReadThree(value, step->block)) return false;
    } else if (name == "cluster") {
      step->cluster = number;
    } else if (name == "shared") {
      step->shared_bytes = number;
    } else if (name == "waves") {
      step->waves = number;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string ParseProgram(std::string_view text, Program* program) {
  program->text = text;
  std::istringstream lines(program->text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const auto wrong = [&] { return "line " + std::to_string(number) + " of a launch list cannot be read: " + line; };
    std::istringstream in(line);
    std::string keyword;
    in >> keyword >> std::ws;
    const int buffers = static_cast<int>(program->buffer_bytes.size());
    const bool has_variant = !program->variants.empty();
    Step* const step =
        has_variant && !program->variants.back().steps.empty() ? &program->variants.back().steps.back() : nullptr;
    if (keyword == "jaxkern") {
      in >> program->version;
    } else if (keyword == "operation") {
      std::getline(in, program->operation);
    } else if (keyword == "bytes") {
      int64_t bytes;
      while (in >> bytes) program->buffer_bytes.push_back(bytes);
    } else if (keyword == "alignment") {
      program->variants.emplace_back();
      if (!(in >> program->variants.back().alignment) || program->variants.back().alignment == 0) return wrong();
    } else if (keyword == "launch" && has_variant) {
      program->variants.back().steps.emplace_back();
      if (!ReadLaunch(in, &program->variants.back().steps.back())) return wrong();
    } else if (keyword == "header" && step) {
      in >> step->kernel.header;
    } else if (keyword == "source" && step) {
      std::getline(in, step->kernel.source);
      for (size_t at = 0; (at = step->kernel.source.find("\\n", at)) != std::string::npos; ++at)
        step->kernel.source.replace(at, 2, "\n");
    } else if (keyword == "kernel" && step) {
      std::getline(in, step->kernel.name);
    } else if (keyword == "args" && step) {
      if (!Arguments(in, buffers, step).Read()) return wrong();
    } else if (keyword == "memset" && has_variant) {
      Step memset;
      std::string target;
      int value = 0;
      if (!(in >> target >> value >> memset.memset_bytes) || !Arguments::ReadBuffer(target, buffers, &memset.target))
        return wrong();
      memset.memset_value = static_cast<unsigned char>(value);
      program->variants.back().steps.push_back(memset);
    } else {
      return wrong();
    }
  }
  return program->variants.empty() ? "a launch list without launches" : "";
}

}  // namespace jaxkern
