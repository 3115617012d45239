#include "src/data/documents.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/core/error.h"
#include "src/data/files.h"

namespace kestrel {
namespace {

bool is_json_lines(const std::string& path) {
  namespace fs = std::filesystem;
  fs::path p = fs::path(path).filename();
  if (p.extension() == ".gz" || p.extension() == ".dz") p = p.stem();
  const std::string e = p.extension().string();
  if (e == ".jsonl" || e == ".ndjson") return true;
  if (e.empty() || e == ".txt" || e == ".text" || e == ".md") return false;
  throw DataError(text(path, " has the extension ", e,
                       ". Text is read from .txt, .text, .md and .jsonl files (or their .gz); convert or rename it."));
}

bool is_blank(const std::string& line) {
  return line.find_first_not_of(" \t\r\n\v\f") == std::string::npos;
}

}  // namespace

// Lines of a plain or gzipped file, each with its line break.
class DocumentReader::Lines {
 public:
  explicit Lines(const std::string& path) : path_(path), json_(is_json_lines(path)), buffer_(size_t{1} << 18, '\0') {
    file_ = gzopen(path.c_str(), "rb");
    if (!file_) throw DataError(text("cannot open ", path, ": ", std::strerror(errno)));
    gzbuffer(file_, 1 << 18);
  }
  ~Lines() { gzclose(file_); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  // Appends the next line; false at the end of the file.
  bool append(std::string& line) {
    bool any = false;
    while (begin_ < end_ || refill()) {
      any = true;
      const char* from = buffer_.data() + begin_;
      const auto* stop = static_cast<const char*>(std::memchr(from, '\n', end_ - begin_));
      const size_t n = stop ? static_cast<size_t>(stop - from) + 1 : end_ - begin_;
      line.append(from, n);
      begin_ += n;
      if (stop) break;
    }
    number_ += any;
    return any;
  }

  const std::string& path() const { return path_; }
  bool json() const { return json_; }
  int64_t number() const { return number_; }  // of the last line, from 1
  int64_t stored_bytes_done() const { return std::max<int64_t>(0, gzoffset(file_)); }

 private:
  bool refill() {
    begin_ = 0;
    const int n = gzread(file_, buffer_.data(), static_cast<unsigned>(buffer_.size()));
    int code = Z_OK;
    const char* why = gzerror(file_, &code);
    if (n < 0 || (n == 0 && code == Z_BUF_ERROR)) {
      throw DataError(text("cannot read ", path_, ": ", code == Z_ERRNO ? std::strerror(errno) : why,
                           ". If it is gzipped, it is truncated or damaged."));
    }
    end_ = static_cast<size_t>(n);
    return n > 0;
  }

  std::string path_;
  bool json_;
  gzFile file_ = nullptr;
  std::string buffer_;
  size_t begin_ = 0, end_ = 0;
  int64_t number_ = 0;
};

std::optional<DocumentSplit> document_split_from(std::string_view name) {
  if (name == "file") return DocumentSplit::file;
  if (name == "blank-line") return DocumentSplit::blank_line;
  if (name == "line") return DocumentSplit::line;
  return std::nullopt;
}

DocumentReader::DocumentReader(const std::vector<std::string>& files_or_globs, InputOptions options)
    : files_(expand_globs(files_or_globs)), options_(std::move(options)) {
  if (files_.empty()) throw DataError("no input files given. Name text files (.txt, .jsonl, or their .gz).");
  for (const auto& f : files_) {
    if (std::filesystem::is_directory(f))
      throw DataError(text(f, " is a directory. Name files, or a pattern such as ", f, "/*.txt."));
    is_json_lines(f);  // refuses an unknown extension before hours of work
    std::error_code unknown_size;
    const auto n = std::filesystem::file_size(f, unknown_size);
    if (!unknown_size) total_bytes_ += static_cast<int64_t>(n);
  }
}

DocumentReader::~DocumentReader() = default;

int64_t DocumentReader::bytes_done() const {
  return finished_bytes_ + (lines_ ? lines_->stored_bytes_done() : 0);
}

bool DocumentReader::open_next() {
  if (lines_) finished_bytes_ += lines_->stored_bytes_done();
  lines_.reset();
  if (opened_ == files_.size()) return false;
  lines_ = std::make_unique<Lines>(files_[opened_++]);
  return true;
}

std::string DocumentReader::text_of_line(const std::string& line) const {
  const auto refuse = [&](const std::string& why) {
    return DataError(text(lines_->path(), " line ", lines_->number(), ": ", why,
                          ". Each line must be an object such as {\"", options_.json_key,
                          "\": \"...\"}; the key is chosen with --key."));
  };
  try {
    const auto object = nlohmann::json::parse(line);
    if (!object.is_object()) throw refuse("it is not a JSON object");
    const auto it = object.find(options_.json_key);
    if (it == object.end()) throw refuse(text("it has no key \"", options_.json_key, "\""));
    if (!it->is_string()) throw refuse(text("the value at \"", options_.json_key, "\" is not a string"));
    return it->get<std::string>();
  } catch (const nlohmann::json::exception& e) {
    throw refuse(e.what());
  }
}

bool DocumentReader::next_block(std::string& document) {
  std::string line;
  while (lines_->append(line)) {
    if (!is_blank(line)) {
      document += line;
    } else if (!document.empty()) {
      return true;
    }
    line.clear();
  }
  return !document.empty();
}

bool DocumentReader::next_in_file(std::string& document) {
  document.clear();
  if (lines_->json()) {
    std::string line;
    if (!lines_->append(line)) return false;
    if (!is_blank(line)) document = text_of_line(line);
    return true;
  }
  switch (options_.split) {
    case DocumentSplit::line:
      return lines_->append(document);
    case DocumentSplit::blank_line:
      return next_block(document);
    case DocumentSplit::file:
      while (lines_->append(document)) {
      }
      return !document.empty();
  }
  return false;
}

bool DocumentReader::next(std::string& document) {
  for (;;) {
    if (lines_) {
      while (next_in_file(document)) {
        if (!is_blank(document)) return true;
      }
    }
    if (!open_next()) return false;
  }
}

bool DocumentReader::next_batch(std::vector<std::string>& documents, int64_t bytes) {
  documents.clear();
  std::string document;
  for (int64_t n = 0; n < bytes && next(document); n += static_cast<int64_t>(documents.back().size())) {
    documents.push_back(std::move(document));
    document.clear();
  }
  return !documents.empty();
}

}  // namespace kestrel
