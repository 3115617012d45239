// Documents out of text files: plain text or JSON lines, either of them gzipped (told by content; a .gz must be).
//
//   .jsonl, .ndjson   one JSON object a line; the document is the string at `json_key`
//   .txt, .text, .md, or no extension (before a .gz or .dz)   plain text, cut by `split`; bytes are kept as they are
//
// Documents without text are skipped and counted.  A file that cannot be read, a .gz that is none, a gzip stream that
// is truncated or followed by something else, a line that is not such an object or has a key twice, or another
// extension throws DataError with the file and line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kestrel {

enum class DocumentSplit : uint8_t {
  file,        // a file is a document
  blank_line,  // documents are separated by lines of white space alone, which belong to none of them
  line,        // a line, with its line break, is a document
};
std::optional<DocumentSplit> document_split_from(std::string_view name);  // "file", "blank-line", "line"

struct InputOptions {
  DocumentSplit split = DocumentSplit::file;
  std::string json_key = "text";
};

class DocumentReader {
 public:
  DocumentReader(const std::vector<std::string>& files_or_globs, InputOptions options);
  ~DocumentReader();
  DocumentReader(const DocumentReader&) = delete;
  DocumentReader& operator=(const DocumentReader&) = delete;

  // The next document in file order; false when there are no more.
  bool next(std::string& document);
  // Replaces `documents` by the next ones, until they hold `bytes` of text; false when there are no more.
  bool next_batch(std::vector<std::string>& documents, int64_t bytes);

  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  int64_t empty_documents() const { return empty_documents_; }  // skipped so far
  int64_t total_bytes() const { return total_bytes_; }          // of all files, as stored
  int64_t bytes_done() const;                                   // of them, read so far

 private:
  class Lines;
  bool open_next();
  bool next_in_file(std::string& document);
  bool next_block(std::string& document);
  std::string text_of_line(const std::string& line) const;

  std::vector<std::string> files_;
  InputOptions options_;
  size_t opened_ = 0;       // files opened so far
  bool file_read_ = false;  // DocumentSplit::file: the open one has been handed out
  int64_t empty_documents_ = 0;
  int64_t total_bytes_ = 0, finished_bytes_ = 0;
  std::unique_ptr<Lines> lines_;
};

}  // namespace kestrel
