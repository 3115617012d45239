// TensorBoard event files, written by hand: no protobuf library.
//
//   record = u64 length | u32 masked CRC32C of those 8 bytes | payload | u32 masked CRC32C of the payload
//   payload = an `Event` message: 1 wall_time (double), 2 step (varint), then one of 3 file_version, 5 summary,
//             7 session_log; the first record says "brain.Event:2".
// Source: tensorflow's public event.proto and summary.proto, and the record format of its TFRecord files.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "src/report/append_file.h"

namespace kestrel {

uint32_t crc32c(const void* data, size_t bytes);

std::string tensorboard_version_record(double wall_time);
std::string tensorboard_scalar_record(double wall_time, int64_t step,
                                      const std::vector<std::pair<std::string, double>>& scalars);
// Tells readers to forget what earlier files of the folder say of `step` and later steps.
std::string tensorboard_restart_record(double wall_time, int64_t step);

class TensorBoardWriter {
 public:
  // Starts a new event file in `dir` (made when missing).  A run resumed after `resumed_step` > 0 takes back the later
  // steps of the files before it.  DataError with the system's reason.
  TensorBoardWriter(const std::string& dir, int64_t resumed_step);

  const std::string& path() const { return file_.path(); }
  // {{"train/loss", 3.25}, ...}; TensorBoard shows NaN as such.
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);

 private:
  AppendFile file_;
};

}  // namespace kestrel
