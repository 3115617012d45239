// Ranks over MPI, on host memory: any number on any hosts.  Only in builds with MPI.
#pragma once

#include <memory>
#include <string>

#include "src/parallel/communicator.h"

namespace kestrel {

// Initialises MPI for the life of the process.  DeviceError when it cannot.
std::unique_ptr<Communicator> join_mpi();
std::string mpi_version();

}  // namespace kestrel
