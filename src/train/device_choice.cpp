#include "src/train/device_choice.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "kernels/core/device.h"

namespace kestrel {

Device choose_device(const TrainConfig& config) {
  using Choice = TrainConfig::DeviceChoice;
  if (config.device == Choice::cpu) return Device::cpu;
  const DeviceCount gpus = device_count();
  if (gpus.count > 0) return Device::cuda;
  if (config.device == Choice::automatic) return Device::cpu;
  throw DeviceError(text("train.device is \"cuda\", but there is no GPU to train on: ", gpus.reason,
                         ". Set train.device to \"auto\" or \"cpu\" to train on the CPU."));
}

int64_t device_memory(Device device) {
  if (device == Device::cuda) return device_properties(0).memory;
  int64_t bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE), limit = 0;
  // The two versions of control groups, as a container sees its own; "max" is no number and no limit.
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (std::ifstream(file) >> limit) bytes = std::min(bytes, limit);
  }
  rlimit address_space{};  // ulimit -v
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    bytes = std::min(bytes, static_cast<int64_t>(address_space.rlim_cur));
  }
  return bytes;
}

DType working_dtype(const TrainConfig& config, Device device) {
  return device == Device::cuda && config.precision == TrainConfig::Precision::bf16 ? DType::bf16 : DType::f32;
}

bool sums_gradients(const TrainConfig& config, Device device) {
  return device == Device::cpu && config.global_batch_size > config.micro_batch_size;
}

Model::PassOptions pass_options(const TrainConfig& config, Device device) {
  Model::PassOptions pass;
  pass.dtype = working_dtype(config, device);
  pass.recompute = config.recompute;
  pass.batch_share = static_cast<double>(config.micro_batch_size) / static_cast<double>(config.global_batch_size);
  return pass;
}

}  // namespace kestrel
