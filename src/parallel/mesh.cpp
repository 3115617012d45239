#include "src/parallel/mesh.h"

#include "kernels/core/error.h"

namespace kestrel {

Mesh::Mesh(Communicator& world, int64_t expert) : world_(&world) {
  if (expert < 1 || world.size() % expert != 0) {
    throw ConfigError(text("parallel.expert is ", expert, ", but there are ", world.size(), " rank",
                           world.size() == 1 ? "" : "s", ": it must divide their number. Start a multiple of ", expert,
                           " with mpirun -np, or change parallel.expert."));
  }
  const int P = static_cast<int>(expert);
  experts_ = world.split(world.rank() / P);
  replicas_ = world.split(world.rank() % P);
}

std::string Mesh::description() const {
  if (world_->size() == 1) return "1 rank";
  const std::vector<std::string> hosts = world_->gather(host_name());
  std::string out =
      text(hosts.size(), " ranks over MPI, ", replicas_->size(), " data x ", experts_->size(), " expert: ");
  for (size_t first = 0; first < hosts.size();) {
    size_t last = first;
    while (last + 1 < hosts.size() && hosts[last + 1] == hosts[first]) ++last;
    out += text(first > 0 ? ", " : "", first);
    if (last > first) out += text("-", last);
    out += " on " + hosts[first];
    first = last + 1;
  }
  return out;
}

}  // namespace kestrel
