// kestrel doctor: what this machine and this build offer, and what is odd about them.
#include <gnu/libc-version.h>
#include <omp.h>
#include <sched.h>
#include <spdlog/version.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/core/device.h"
#include "kernels/core/error.h"
#include "kernels/gemm/gemm.h"
#include "src/parallel/communicator.h"
#include "src/report/progress.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

void say(const char* what, const std::string& answer) {
  std::printf("%-12s %s\n", what, answer.c_str());
}

// The rest of the first line that starts with `key`, without blanks and colon; empty when there is none.
std::string line_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    if (!line.starts_with(key)) continue;
    const size_t at = line.find_first_not_of(" \t:", key.size());
    return at == std::string::npos ? "" : line.substr(at);
  }
  return {};
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? text(name, "=", value) : text(name, " not set");
}

std::string cpu_features() {
  std::string out;
#if defined(__x86_64__)
  // The builtin takes literals only.
  const std::pair<const char*, bool> features[] = {{"avx2", __builtin_cpu_supports("avx2")},
                                                   {"fma", __builtin_cpu_supports("fma")},
                                                   {"avx512f", __builtin_cpu_supports("avx512f")},
                                                   {"avx512bf16", __builtin_cpu_supports("avx512bf16")}};
  for (const auto& [name, there] : features) out += text(out.empty() ? "" : ", ", there ? "" : "no ", name);
#endif
  return out;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : omp_get_num_procs();
}

std::string build() {
  std::string out;
#ifdef KESTREL_VERSION
  out = text("kestrel ", KESTREL_VERSION, ", ");
#endif
#ifdef __clang__
  out += text("clang ", __clang_version__);
#else
  out += text("gcc ", __VERSION__);
#endif
#ifdef NDEBUG
  out += ", optimised";
#else
  out += ", with debug checks: slow";
#endif
#if defined(__AVX512F__)
  return out + ", for AVX-512 CPUs";
#elif defined(__AVX2__)
  return out + ", for AVX2 CPUs";
#else
  return out + ", for any CPU: slow";
#endif
}

// fp32 product of 768^3, best of a few; about 0.1 s.
double gemm_gflops() {
  constexpr int64_t n = 768;
  std::vector<float> a(n * n, 1.f), b(n * n, 0.5f), c(n * n);
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    cpu::sgemm(Trans::no, Trans::no, n, n, n, 1.f, a.data(), n, b.data(), n, 0.f, c.data(), n);
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2. * n * n * n / s * 1e-9);
  }
  return best;
}

std::string kilobytes(const std::string& line) {
  return count_text(std::strtod(line.c_str(), nullptr) * 1024) + "B";
}

std::string disk() {
  std::error_code ec;
  const auto space = std::filesystem::space(".", ec);
  if (ec) return text("unknown: ", ec.message());
  return text(count_text(static_cast<double>(space.available)), "B free of ",
              count_text(static_cast<double>(space.capacity)), "B at ", std::filesystem::current_path(ec).string());
}

std::string libraries() {
  return text("nlohmann-json ", NLOHMANN_JSON_VERSION_MAJOR, ".", NLOHMANN_JSON_VERSION_MINOR, ".",
              NLOHMANN_JSON_VERSION_PATCH, ", spdlog ", SPDLOG_VER_MAJOR, ".", SPDLOG_VER_MINOR, ".", SPDLOG_VER_PATCH,
              ", CLI11 ", CLI11_VERSION, ", glibc ", gnu_get_libc_version());
}

std::string cuda() {
  if (!kBuiltWithCuda) return "not built in: the CPU back end only (configure with -DKESTREL_CUDA=ON)";
  const DeviceCount gpus = device_count();
  if (gpus.count == 0) return text("built in, but no GPU: ", gpus.reason, "; runs use the CPU back end");
  const DeviceProperties p = device_properties(0);
  return text("built in; ", gpus.count, gpus.count == 1 ? " GPU, " : " GPUs, the first ", p.name, ", sm_", p.major,
              p.minor, ", ", p.memory >> 30, " GiB of memory, ", p.free_memory >> 30, " GiB free");
}

void threads_report() {
  const int cpus = usable_cpus(), threads = omp_get_max_threads();
  say("threads", text(threads, " for OpenMP ", _OPENMP, ", ", cpus, " CPUs usable of ", omp_get_num_procs(), "; ",
                      environment("OMP_NUM_THREADS")));
  if (threads > cpus) {
    say("", text("warning: more threads than CPUs makes every step slower; set OMP_NUM_THREADS=", cpus));
  }
}

void report() {
  utsname system{};
  uname(&system);
  say("build", build());
  say("system", text(system.sysname, " ", system.release, " ", system.machine, " on ", system.nodename));
  say("cpu", text(line_of("/proc/cpuinfo", "model name"), " (", cpu_features(), ")"));
  threads_report();
  const double gflops = gemm_gflops();
  say("gemm", text(cpu_gemm_description(), ", ", count_text(gflops), " GFLOP/s fp32; OpenBLAS ",
                   has_openblas() ? "built in" : "not built in"));
  say("mpi", mpi_description());
  say("cuda", cuda());
  say("memory", text(kilobytes(line_of("/proc/meminfo", "MemAvailable")), " available of ",
                     kilobytes(line_of("/proc/meminfo", "MemTotal"))));
  say("disk", disk());
  say("libraries", libraries());
}

}  // namespace

void add_doctor_command(CLI::App& app, int& exit_code) {
  CLI::App& command = add_command(app, "doctor", "Show what this machine and this build offer", "kestrel doctor");
  command.callback([&exit_code] {
    report();
    exit_code = static_cast<int>(ExitCode::done);
  });
}

}  // namespace kestrel::tools
