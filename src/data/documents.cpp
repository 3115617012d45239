#include "src/data/documents.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>

#include "kernels/core/error.h"
#include "src/checkpoint/json_strict.h"
#include "src/data/files.h"

namespace kestrel {
namespace {

bool is_gzip_name(const std::filesystem::path& p) {
  return p.extension() == ".gz" || p.extension() == ".dz";
}

bool is_json_lines(const std::string& path) {
  std::filesystem::path p = std::filesystem::path(path).filename();
  if (is_gzip_name(p)) p = p.stem();
  const std::string e = p.extension().string();
  if (e == ".jsonl" || e == ".ndjson") return true;
  if (e.empty() || e == ".txt" || e == ".text" || e == ".md") return false;
  throw DataError(text(path, " has the extension ", e,
                       ". Text is read from .txt, .text, .md and .jsonl files (or their .gz); convert or rename it."));
}

bool is_blank(const std::string& line) {
  return line.find_first_not_of(" \t\r\n\v\f") == std::string::npos;
}

// Bytes of a plain or gzipped file, told by its first two.  zlib's gzread is not used: it passes anything as plain text
// and drops what follows the gzip stream.
class Bytes {
 public:
  explicit Bytes(const std::string& path) : path_(path), file_(path, std::ios::binary), stored_(kChunk, '\0') {
    if (!file_) {
      throw DataError(
          text("cannot open ", path, ": ", std::strerror(errno), ". Check its name and that it may be read."));
    }
    gzipped_ = fill() && stream_.avail_in >= 2 && stored_.starts_with("\x1f\x8b");
    if (!gzipped_ && is_gzip_name(path)) {
      throw DataError(text(path,
                           " is named like a gzip file, but does not begin as one. Compress it again with gzip, "
                           "or rename it if it is plain text."));
    }
    if (gzipped_ && inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~Bytes() { inflateEnd(&stream_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  // Up to `capacity` bytes; 0 at the end of the file.
  size_t read(char* out, size_t capacity) { return gzipped_ ? inflate_into(out, capacity) : copy_into(out, capacity); }
  int64_t stored_bytes_done() const { return stored_end_ - stream_.avail_in; }

 private:
  static constexpr size_t kChunk = size_t{1} << 18;

  bool fill() {
    errno = 0;
    file_.read(stored_.data(), static_cast<std::streamsize>(kChunk));
    if (file_.bad()) {
      throw DataError(text("cannot read ", path_, ": ", std::strerror(errno ? errno : EIO), ". Check the disk."));
    }
    stream_.next_in = reinterpret_cast<Bytef*>(stored_.data());
    stream_.avail_in = static_cast<uInt>(file_.gcount());
    stored_end_ += file_.gcount();
    return stream_.avail_in > 0;
  }
  size_t copy_into(char* out, size_t capacity) {
    if (stream_.avail_in == 0 && !fill()) return 0;
    const size_t n = std::min<size_t>(stream_.avail_in, capacity);
    std::memcpy(out, stream_.next_in, n);
    stream_.next_in += n;
    stream_.avail_in -= static_cast<uInt>(n);
    return n;
  }
  // A gzip file is one stream after another.
  size_t inflate_into(char* out, size_t capacity) {
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(capacity);
    while (stream_.avail_out > 0) {
      if (stream_.avail_in == 0 && !fill()) {
        if (inside_) damaged("it ends inside its gzip stream: it is truncated");
        break;
      }
      inside_ = true;
      const int code = inflate(&stream_, Z_NO_FLUSH);
      if (code == Z_STREAM_END) {
        inflateReset(&stream_);
        inside_ = false;
        ++streams_;
      } else if (code != Z_OK) {
        if (streams_ > 0 && stream_.total_out == 0) damaged("something that is not gzip follows its gzip stream");
        damaged(text("its gzip stream is damaged (", stream_.msg ? stream_.msg : zError(code), ")"));
      }
    }
    return capacity - stream_.avail_out;
  }
  [[noreturn]] void damaged(const std::string& what) const {
    throw DataError(text("cannot read ", path_, ": ", what, ", at or before byte ", stored_bytes_done(),
                         ". Compress or download it again."));
  }

  std::string path_;
  std::ifstream file_;
  std::string stored_;      // a chunk of the file
  int64_t stored_end_ = 0;  // of the chunk, in the file
  z_stream stream_{};
  bool gzipped_ = false, inside_ = false;  // inside a gzip stream
  int64_t streams_ = 0;                    // read to their end
};

}  // namespace

// Lines of such a file, each with its line break.
class DocumentReader::Lines {
 public:
  explicit Lines(const std::string& path)
      : path_(path), json_(is_json_lines(path)), bytes_(path), buffer_(size_t{1} << 18, '\0') {}

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
  int64_t stored_bytes_done() const { return bytes_.stored_bytes_done(); }

 private:
  bool refill() {
    begin_ = 0;
    end_ = bytes_.read(buffer_.data(), buffer_.size());
    return end_ > 0;
  }

  std::string path_;
  bool json_;
  Bytes bytes_;
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
  file_read_ = false;
  return true;
}

std::string DocumentReader::text_of_line(const std::string& line) const {
  const std::string where = text(lines_->path(), " line ", lines_->number());
  const std::string way_out = text(" Each line must be an object such as {\"", options_.json_key,
                                   "\": \"...\"}, with each key once; the key is chosen with --key.");
  const auto refuse = [&](const std::string& why) { return DataError(text(where, ": ", why, ".", way_out)); };
  nlohmann::json object;
  try {
    object = parse_json_strict(line, where);
  } catch (const DataError& e) {
    throw DataError(e.what() + way_out);
  }
  if (!object.is_object()) throw refuse("it is not a JSON object");
  const auto it = object.find(options_.json_key);
  if (it == object.end()) throw refuse(text("it has no key \"", options_.json_key, "\""));
  if (!it->is_string()) throw refuse(text("the value at \"", options_.json_key, "\" is not a string"));
  return it->get<std::string>();
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
    while (lines_->append(line)) {
      if (!is_blank(line)) {
        document = text_of_line(line);
        return true;
      }
      line.clear();
    }
    return false;
  }
  switch (options_.split) {
    case DocumentSplit::line:
      return lines_->append(document);
    case DocumentSplit::blank_line:
      return next_block(document);
    case DocumentSplit::file:
      if (std::exchange(file_read_, true)) return false;
      while (lines_->append(document)) {
      }
      return true;
  }
  return false;
}

bool DocumentReader::next(std::string& document) {
  for (;;) {
    if (lines_) {
      while (next_in_file(document)) {
        if (!is_blank(document)) return true;
        ++empty_documents_;
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
