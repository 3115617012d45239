#include "src/parallel/communicator.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "kernels/core/error.h"
#include "src/parallel/mpi.h"

namespace kestrel {
namespace {

class Alone : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void sum(std::span<float>) override {}
  void sum(std::span<double>) override {}
  void sum(std::span<int32_t>) override {}
  void sum(std::span<int64_t>) override {}
  void max(std::span<float>) override {}
  void max(std::span<int64_t>) override {}
  void reduce_scatter(std::span<float>, std::span<const int64_t>) override {}
  void reduce_scatter(std::span<double>, std::span<const int64_t>) override {}
  void all_gather(std::span<float>, std::span<const int64_t>) override {}
  void exchange_rows(const void* send, std::span<const int64_t> send_rows, void* receive,
                     std::span<const int64_t> receive_rows, int64_t row_bytes) override {
    KESTREL_CHECK(send_rows[0] == receive_rows[0], send_rows[0], " rows sent, ", receive_rows[0], " received");
    if (send_rows[0] > 0) std::memcpy(receive, send, static_cast<size_t>(send_rows[0] * row_bytes));
  }
  std::vector<int64_t> gather(std::span<const int64_t> mine) override { return {mine.begin(), mine.end()}; }
  std::vector<double> gather(std::span<const double> mine) override { return {mine.begin(), mine.end()}; }
  std::vector<std::string> gather(const std::string& mine) override { return {mine}; }
  void barrier() override {}
  std::unique_ptr<Communicator> split(int) override { return std::make_unique<Alone>(); }
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }
};

#ifdef KESTREL_HAVE_MPI
constexpr bool kBuiltWithMpi = true;
#else
constexpr bool kBuiltWithMpi = false;
#endif

// A launcher that says to its processes how many they are.
struct Launcher {
  const char *name, *ranks;
  bool speaks_mpi;
};
constexpr Launcher kLaunchers[] = {
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE", true},
    {"mpirun or srun (PMI)", "PMI_SIZE", true},
    {"srun", "SLURM_STEP_NUM_TASKS", true},
    {"torchrun", "WORLD_SIZE", false},
};

int64_t number(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? std::strtol(value, nullptr, 10) : 0;
}

const Launcher* launcher() {
  for (const Launcher& l : kLaunchers) {
    if (number(l.ranks) > 1) return &l;
  }
  return nullptr;
}

}  // namespace

std::string host_name() {
  char host[256] = "unknown host";
  gethostname(host, sizeof host - 1);
  return host;
}

Communicator& alone() {
  static Alone one;
  return one;
}

std::unique_ptr<Communicator> join_ranks() {
  const Launcher* l = launcher();
  if (!l) return std::make_unique<Alone>();
#ifdef KESTREL_HAVE_MPI
  if (l->speaks_mpi) {
    auto ranks = join_mpi();
    if (ranks->size() == number(l->ranks)) return ranks;
    throw DeviceError(text(l->name, " started ", number(l->ranks), " processes, but MPI sees ", ranks->size(),
                           ": the launcher belongs to another MPI than this build (", mpi_version(),
                           "). Start with the mpirun of that MPI, or srun --mpi=pmix."));
  }
#endif
  throw DeviceError(text(
      "this process is one of ", number(l->ranks), " that ", l->name, " started (", l->ranks, "=", number(l->ranks),
      "), ",
      kBuiltWithMpi ? "and ranks meet over MPI only. Start with mpirun -np "
                    : "but this build has no MPI and each would train the same model alone. Build with MPI (Debian: "
                      "libopenmpi-dev; -DKESTREL_MPI=ON), then start with mpirun -np ",
      number(l->ranks), " kestrel train RUN.json; or start one process."));
}

std::string mpi_description() {
#ifdef KESTREL_HAVE_MPI
  return text("built in (", mpi_version(), "): mpirun -np N kestrel train RUN.json spreads a run over CPU ranks");
#else
  return "not built in: a run is one process (Debian: libopenmpi-dev; configure with -DKESTREL_MPI=ON)";
#endif
}

}  // namespace kestrel
