#include "runtime/program.h"

#include <algorithm>
#include <charconv>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

namespace jaxkern {
namespace {

// The integer that is the whole text, if T holds it.
template <class T> bool ReadNumber(std::string_view text, T* value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end;
}

// The floating-point number that is the whole text. Its point is '.' in every locale.
bool ReadReal(const std::string& text, double* value) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);
  char* stop = nullptr;
  *value = strtod_l(text.c_str(), &stop, c);
  return !text.empty() && *stop == '\0';
}

bool PowerOfTwo(uint64_t n) { return n != 0 && (n & (n - 1)) == 0; }

// pBUFFER+OFFSET
bool ReadBuffer(std::string_view token, const std::vector<int64_t>& buffer_bytes, BufferRef* ref) {
  const size_t plus = token.find('+');
  if (token.empty() || token[0] != 'p' || plus == std::string_view::npos) return false;
  if (!ReadNumber(token.substr(1, plus - 1), &ref->buffer) || !ReadNumber(token.substr(plus + 1), &ref->offset))
    return false;
  return ref->buffer >= 0 && static_cast<size_t>(ref->buffer) < buffer_bytes.size() && ref->offset >= 0 &&
         ref->offset <= buffer_bytes[ref->buffer];
}

// Reads the arguments of a kernel and lays them out as C++ does: each at a multiple of its alignment, and the size of a
// struct is a multiple of the struct's alignment. Every reader returns an empty string, or what is wrong.
class Arguments {
 public:
  Arguments(std::istringstream& in, const std::vector<int64_t>& buffer_bytes, Step* step)
      : in_(in), buffer_bytes_(buffer_bytes), step_(step) {}

  std::string Read() {
    std::string token;
    while (in_ >> token) {
      const size_t first_pointer = step_->pointers.size();
      Value value;
      if (std::string error = ReadValue(token, 0, &value); !error.empty()) return error;
      step_->argument_offsets.push_back(Append(value, first_pointer, &step_->arguments));
      if (step_->arguments.size() > kMostArgumentBytes || step_->argument_offsets.size() > kMostArguments)
        return "a kernel takes at most " + std::to_string(kMostArguments) + " arguments of " +
               std::to_string(kMostArgumentBytes) + " bytes together";
    }
    return "";
  }

 private:
  static constexpr int kMostNested = 16;

  // A pointer's bytes are zeros; its place among them is in step_->pointers.
  struct Value {
    std::vector<unsigned char> bytes;
    size_t alignment = 1;
  };

  // Appends a value, whose pointers are those from first_pointer on; returns its offset.
  uint32_t Append(const Value& value, size_t first_pointer, std::vector<unsigned char>* to) {
    to->resize((to->size() + value.alignment - 1) / value.alignment * value.alignment);
    const uint32_t at = static_cast<uint32_t>(to->size());
    to->insert(to->end(), value.bytes.begin(), value.bytes.end());
    for (size_t i = first_pointer; i < step_->pointers.size(); ++i) step_->pointers[i].at += at;
    return at;
  }

  // The value that begins with `token`. Offsets of its pointers are relative to its begin.
  std::string ReadValue(const std::string& token, int nested, Value* value) {
    if (token[0] == '{') return ReadStruct(token, nested, value);
    if (token[0] == 'p') {
      Step::Pointer pointer = {0, {}};
      if (!ReadBuffer(token, buffer_bytes_, &pointer.ref)) return "'" + token + "' is not inside a buffer";
      step_->pointers.push_back(pointer);
      Set(uint64_t{0}, value);
      return "";
    }
    const size_t colon = token.find(':');
    const std::string type = token.substr(0, colon), text = colon == std::string::npos ? "" : token.substr(colon + 1);
    const bool read = type == "i32"   ? ReadInteger<int32_t>(text, value)
                      : type == "u32" ? ReadInteger<uint32_t>(text, value)
                      : type == "i64" ? ReadInteger<int64_t>(text, value)
                      : type == "u64" ? ReadInteger<uint64_t>(text, value)
                      : type == "u8"  ? ReadInteger<uint8_t>(text, value)
                      : type == "f32" ? ReadFloat(text, value)
                      : type == "f64" ? ReadDouble(text, value)
                                      : false;
    return read ? "" : "'" + token + "' is not an argument";
  }

  std::string ReadStruct(const std::string& token, int nested, Value* value) {
    if (nested == kMostNested) return "structs are nested more than " + std::to_string(kMostNested) + " deep";
    if (!ReadNumber(std::string_view(token).substr(1), &value->alignment) || !PowerOfTwo(value->alignment) ||
        value->alignment > 256)
      return "'" + token + "' is not an alignment";
    std::string member;
    while (in_ >> member && member != "}") {
      const size_t first_pointer = step_->pointers.size();
      Value part;
      if (std::string error = ReadValue(member, nested + 1, &part); !error.empty()) return error;
      Append(part, first_pointer, &value->bytes);
      value->alignment = std::max(value->alignment, part.alignment);
    }
    if (member != "}") return "a struct does not end";
    value->bytes.resize((value->bytes.size() + value->alignment - 1) / value->alignment * value->alignment);
    return "";
  }

  template <class T> static bool ReadInteger(const std::string& text, Value* value) {
    T number;
    return ReadNumber(text, &number) && Set(number, value);
  }

  static bool ReadFloat(const std::string& text, Value* value) {
    double number;
    if (!ReadReal(text, &number)) return false;
    if (std::isfinite(number) && std::abs(number) > std::numeric_limits<float>::max()) return false;
    return Set(static_cast<float>(number), value);
  }

  static bool ReadDouble(const std::string& text, Value* value) {
    double number;
    return ReadReal(text, &number) && Set(number, value);
  }

  template <class T> static bool Set(T number, Value* value) {
    value->alignment = sizeof number;
    value->bytes.resize(sizeof number);
    memcpy(value->bytes.data(), &number, sizeof number);
    return true;
  }

  std::istringstream& in_;
  const std::vector<int64_t>& buffer_bytes_;
  Step* step_;
};

// X,Y,Z
bool ReadThree(std::string_view text, unsigned (&size)[3]) {
  for (int d = 0; d < 3; ++d) {
    const size_t comma = d < 2 ? text.find(',') : text.size();
    if (comma == std::string_view::npos || !ReadNumber(text.substr(0, comma), &size[d])) return false;
    text.remove_prefix(d < 2 ? comma + 1 : comma);
  }
  return true;
}

std::string ReadLaunch(std::istringstream& in, Step* step) {
  std::string item;
  while (in >> item) {
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    const bool read = name == "grid"      ? ReadThree(value, step->grid)
                      : name == "block"   ? ReadThree(value, step->block)
                      : name == "cluster" ? ReadNumber(value, &step->cluster)
                      : name == "shared"  ? ReadNumber(value, &step->shared_bytes)
                      : name == "waves"   ? ReadNumber(value, &step->waves)
                                          : false;
    if (!read) return "'" + item + "' is not an option of a launch";
  }
  return "";
}

std::string ReadMemset(std::istringstream& in, const std::vector<int64_t>& buffer_bytes, Step* step) {
  std::string target, value, bytes, more;
  in >> target >> value >> bytes;
  if (!ReadBuffer(target, buffer_bytes, &step->target)) return "'" + target + "' is not inside a buffer";
  if (!ReadNumber(value, &step->memset_value)) return "'" + value + "' is not a byte";
  if (!ReadNumber(bytes, &step->memset_bytes) || step->memset_bytes < 0 || in >> more)
    return "'" + bytes + more + "' is not a number of bytes";
  if (step->memset_bytes > buffer_bytes[step->target.buffer] - step->target.offset)
    return "the memset ends beyond its buffer";
  return "";
}

std::string ReadVariant(std::istringstream& in, Program* program) {
  std::string text, more;
  in >> text;
  Variant variant;
  if (!ReadNumber(text, &variant.alignment) || !PowerOfTwo(variant.alignment) || variant.alignment > kMostAlignment ||
      in >> more)
    return "the alignment must be a power of two up to " + std::to_string(kMostAlignment);
  if (program->variants.size() == kMostVariants)
    return "a launch list has at most " + std::to_string(kMostVariants) + " alignments";
  program->variants.push_back(variant);
  return "";
}

// Reads a line into `program`; returns an empty string, or what is wrong.
std::string ReadLine(const std::string& line, Program* program) {
  std::istringstream in(line);
  std::string keyword;
  in >> keyword >> std::ws;
  Variant* const variant = program->variants.empty() ? nullptr : &program->variants.back();
  Step* const step = variant && !variant->steps.empty() ? &variant->steps.back() : nullptr;
  if (keyword == "jaxkern") {
    in >> program->version;
  } else if (keyword == "operation") {
    std::getline(in, program->operation);
  } else if (keyword == "bytes" && !variant) {
    std::string text;
    while (in >> text) {
      int64_t bytes;
      if (!ReadNumber(text, &bytes) || bytes < 0) return "'" + text + "' is not a number of bytes";
      program->buffer_bytes.push_back(bytes);
    }
  } else if (keyword == "alignment") {
    return ReadVariant(in, program);
  } else if (keyword == "launch" && variant) {
    variant->steps.emplace_back();
    return ReadLaunch(in, &variant->steps.back());
  } else if (keyword == "header" && step) {
    in >> step->kernel.header;
  } else if (keyword == "source" && step) {
    std::getline(in, step->kernel.source);
    for (size_t at = 0; (at = step->kernel.source.find("\\n", at)) != std::string::npos; ++at)
      step->kernel.source.replace(at, 2, "\n");
  } else if (keyword == "kernel" && step) {
    std::getline(in, step->kernel.name);
  } else if (keyword == "args" && step) {
    return Arguments(in, program->buffer_bytes, step).Read();
  } else if (keyword == "memset" && variant) {
    variant->steps.emplace_back();
    return ReadMemset(in, program->buffer_bytes, &variant->steps.back());
  } else {
    return "no such line is known here";
  }
  return "";
}

}  // namespace

std::string ParseProgram(std::string_view text, Program* program) {
  program->text = text;
  std::istringstream lines(program->text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (const std::string error = ReadLine(line, program); !error.empty())
      return "line " + std::to_string(number) + " of a launch list cannot be read: " + line + " (" + error + ")";
  }
  if (program->variants.empty()) return "a launch list without launches";
  if (program->variants.back().alignment != 1) return "a launch list without launches for unaligned buffers";
  for (const Variant& variant : program->variants) {
    for (const Step& step : variant.steps) {
      if (step.memset_bytes < 0 && (step.kernel.header.empty() || step.kernel.name.empty()))
        return "a launch list has a launch without a kernel";
    }
  }
  return "";
}

}  // namespace jaxkern
