// The ranks of a run, and what they do together.
//
// Two back ends: one rank alone, and MPI on host memory (mpi.h).  Every operation is collective: all ranks of the
// communicator call the same ones in the same order.  Sums of floats are taken element by element in the order of the
// ranks, so all ranks get the same bits, and a second run gets them again; another number of ranks is another order.
//
// A failure of the transport is a DeviceError.  A rank that fails otherwise must call `abort`, or the others wait for
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kestrel {

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  bool is_root() const { return rank() == 0; }

  // x = sum over ranks of x
  virtual void sum(std::span<float> x) = 0;
  virtual void sum(std::span<double> x) = 0;
  virtual void sum(std::span<int32_t> x) = 0;
  virtual void sum(std::span<int64_t> x) = 0;
  // x = the largest over ranks of x
  virtual void max(std::span<float> x) = 0;
  virtual void max(std::span<int64_t> x) = 0;
  // Rank r has its share [cuts[r], cuts[r+1]) of x summed over ranks; what lies outside its share is left undefined.
  // cuts [size+1], ascending, from 0 to the length of x, the same on all ranks; shares may be empty.
  virtual void reduce_scatter(std::span<float> x, std::span<const int64_t> cuts) = 0;
  virtual void reduce_scatter(std::span<double> x, std::span<const int64_t> cuts) = 0;
  // Everybody's share to everybody: the other half of a sum.
  virtual void all_gather(std::span<float> x, std::span<const int64_t> cuts) = 0;
  // Rows of row_bytes bytes: send_rows[r] of them to each rank r, in its order, receive_rows[r] from it; `send` and
  // `receive` hold the rows of all ranks one after another.  Empty messages are legal.
  virtual void exchange_rows(const void* send, std::span<const int64_t> send_rows, void* receive,
                             std::span<const int64_t> receive_rows, int64_t row_bytes) = 0;
  // Everybody's values (as many on each rank), by rank.
  virtual std::vector<int64_t> gather(std::span<const int64_t> mine) = 0;
  virtual std::vector<double> gather(std::span<const double> mine) = 0;
  // Everybody's text or bytes (of any length), by rank.
  virtual std::vector<std::string> gather(const std::string& mine) = 0;
  virtual void barrier() = 0;
  // Those ranks that give the same colour, in the order they have here.  The parent must outlive it.
  virtual std::unique_ptr<Communicator> split(int colour) = 0;
  // Ends all ranks of the run with this exit code.
  [[noreturn]] virtual void abort(int exit_code) = 0;

  int64_t sum_of(int64_t x) {
    sum(std::span(&x, 1));
    return x;
  }
  double sum_of(double x) {
    sum(std::span(&x, 1));
    return x;
  }
  int64_t max_of(int64_t x) {
    max(std::span(&x, 1));
    return x;
  }

 protected:
  Communicator() = default;
};

// One rank: every operation leaves its data as it is.
Communicator& alone();

// The ranks this process was started among: MPI under mpirun or srun, alone otherwise.  A process that a launcher
// started as one of several without a way to reach the others is refused with a DeviceError.
std::unique_ptr<Communicator> join_ranks();

// The name of this machine.
std::string host_name();

// What `kestrel doctor` says of MPI.
std::string mpi_description();

}  // namespace kestrel
