#include "src/parallel/mpi.h"

#ifdef KESTREL_HAVE_MPI

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <exception>

#include "kernels/core/error.h"

namespace kestrel {
namespace {

// Elements of one exchange: below the int of MPI's counts, and the scratch of a sum stays small.
constexpr int64_t kPiece = int64_t{1} << 22;

void check(int error, const char* operation) {
  if (error == MPI_SUCCESS) return;
  char why[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(error, why, &length);
  throw DeviceError(text("the ranks cannot go on: ", operation, " failed (", why,
                         "). Look for the first rank that reported an error; start again from the checkpoint."));
}

template <class T>
MPI_Datatype type_of();
template <>
MPI_Datatype type_of<float>() {
  return MPI_FLOAT;
}
template <>
MPI_Datatype type_of<double>() {
  return MPI_DOUBLE;
}
template <>
MPI_Datatype type_of<int32_t>() {
  return MPI_INT32_T;
}
template <>
MPI_Datatype type_of<int64_t>() {
  return MPI_INT64_T;
}

// A row of bytes as one element, so that counts and distances are rows: an int reaches further.
class RowType {
 public:
  explicit RowType(int64_t bytes) {
    KESTREL_CHECK(bytes > 0 && bytes <= INT_MAX, "a row of ", bytes, " bytes");
    check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_), "a row type");
    check(MPI_Type_commit(&type_), "a row type");
  }
  ~RowType() { MPI_Type_free(&type_); }
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// Counts of one collective by rank, and where each begins.
struct Counts {
  explicit Counts(std::span<const int64_t> counts) {
    int64_t at = 0;
    for (const int64_t c : counts) {
      KESTREL_CHECK(c >= 0, "a message of ", c, " elements");
      n.push_back(static_cast<int>(c));
      begin.push_back(static_cast<int>(at));
      at += c;
    }
    if (at > INT_MAX)
      throw DeviceError(text("the ranks exchange ", at, " rows at once, MPI counts to ", INT_MAX,
                             ". Lower train.micro_batch_size or data.sequence_length."));
  }
  std::vector<int> n, begin;
};

class OverMpi : public Communicator {
 public:
  // `owned`: a split one, freed at the end.
  OverMpi(MPI_Comm comm, bool owned) : comm_(comm), owned_(owned) {
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "the start of MPI");
    check(MPI_Comm_rank(comm_, &rank_), "the start of MPI");
    check(MPI_Comm_size(comm_, &size_), "the start of MPI");
  }
  ~OverMpi() override {
    int done = 0;
    MPI_Finalized(&done);
    if (done) return;
    if (owned_) {  // freeing is collective: not while an error takes this rank away
      if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
    } else {
      MPI_Finalize();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void sum(std::span<float> x) override { ordered_sum(x); }
  void sum(std::span<double> x) override { ordered_sum(x); }
  void sum(std::span<int32_t> x) override { reduce(x, MPI_SUM, "a sum"); }  // integers: any order is the same
  void sum(std::span<int64_t> x) override { reduce(x, MPI_SUM, "a sum"); }
  void max(std::span<float> x) override { reduce(x, MPI_MAX, "a maximum"); }
  void max(std::span<int64_t> x) override { reduce(x, MPI_MAX, "a maximum"); }

  void reduce_scatter(std::span<float> x, std::span<const int64_t> cuts) override { scatter_sums(x, cuts); }
  void reduce_scatter(std::span<double> x, std::span<const int64_t> cuts) override { scatter_sums(x, cuts); }
  void all_gather(std::span<float> x, std::span<const int64_t> cuts) override { gather_shares(x, cuts); }

  void exchange_rows(const void* send, std::span<const int64_t> send_rows, void* receive,
                     std::span<const int64_t> receive_rows, int64_t row_bytes) override {
    const RowType row(row_bytes);
    const Counts out(send_rows), in(receive_rows);
    check(MPI_Alltoallv(send, out.n.data(), out.begin.data(), row.get(), receive, in.n.data(), in.begin.data(),
                        row.get(), comm_),
          "an exchange of rows");
  }

  std::vector<int64_t> gather(std::span<const int64_t> mine) override { return gather_values(mine); }
  std::vector<double> gather(std::span<const double> mine) override { return gather_values(mine); }

  std::vector<std::string> gather(const std::string& mine) override {
    const auto bytes = static_cast<int64_t>(mine.size());
    const std::vector<int64_t> sizes = gather(std::span(&bytes, 1));
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) {
      std::string& t = all.emplace_back(mine);
      t.resize(static_cast<size_t>(sizes[static_cast<size_t>(r)]));
      for (size_t at = 0; at < t.size(); at += kPiece) {
        const size_t n = std::min<size_t>(kPiece, t.size() - at);
        check(MPI_Bcast(t.data() + at, static_cast<int>(n), MPI_BYTE, r, comm_), "a gathering of texts");
      }
    }
    return all;
  }

  void barrier() override { check(MPI_Barrier(comm_), "a barrier"); }

  std::unique_ptr<Communicator> split(int colour) override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, colour, rank_, &part), "the making of a group");
    return std::make_unique<OverMpi>(part, /*owned=*/true);
  }

  [[noreturn]] void abort(int exit_code) override {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  template <class T>
  void reduce(std::span<T> x, MPI_Op op, const char* operation) {
    for (size_t at = 0; at < x.size(); at += kPiece) {
      const size_t n = std::min<size_t>(kPiece, x.size() - at);
      check(MPI_Allreduce(MPI_IN_PLACE, x.data() + at, static_cast<int>(n), type_of<T>(), op, comm_), operation);
    }
  }

  template <class T>
  std::vector<T> gather_values(std::span<const T> mine) {
    std::vector<T> all(mine.size() * static_cast<size_t>(size_));
    const int n = static_cast<int>(mine.size());
    check(MPI_Allgather(mine.data(), n, type_of<T>(), all.data(), n, type_of<T>(), comm_), "a gathering of values");
    return all;
  }

  // Calls fn(first [P], count [P]) until every rank's share [cuts[r], cuts[r+1]) has been through, in pieces.
  template <class F>
  void in_pieces(std::span<const int64_t> cuts, F&& fn) {
    const auto P = static_cast<size_t>(size_);
    KESTREL_CHECK(cuts.size() == P + 1 && cuts[0] == 0, cuts.size(), " cuts for ", P, " ranks");
    const int64_t piece = std::max<int64_t>(kPiece / size_, 1);
    int64_t longest = 0;
    for (size_t r = 0; r < P; ++r) longest = std::max(longest, cuts[r + 1] - cuts[r]);
    std::vector<int64_t> first(P), count(P);
    for (int64_t at = 0; at < longest; at += piece) {
      for (size_t r = 0; r < P; ++r) {
        const int64_t length = cuts[r + 1] - cuts[r];
        first[r] = cuts[r] + std::min(at, length);
        count[r] = std::clamp<int64_t>(length - at, 0, piece);
      }
      fn(first, count);
    }
  }

  // Everybody's piece of rank r's share comes to rank r, which adds them up in the order of the ranks.
  template <class T>
  void scatter_sums(std::span<T> x, std::span<const int64_t> cuts) {
    const auto P = static_cast<size_t>(size_), me = static_cast<size_t>(rank_);
    std::vector<T> sent, received;
    in_pieces(cuts, [&](const std::vector<int64_t>& first, const std::vector<int64_t>& count) {
      sent.clear();
      for (size_t r = 0; r < P; ++r) sent.insert(sent.end(), x.data() + first[r], x.data() + first[r] + count[r]);
      const std::vector<int64_t> mine(P, count[me]);
      const Counts out(count), in(mine);
      received.resize(P * static_cast<size_t>(count[me]));
      check(MPI_Alltoallv(sent.data(), out.n.data(), out.begin.data(), type_of<T>(), received.data(), in.n.data(),
                          in.begin.data(), type_of<T>(), comm_),
            "a sum");
      T* share = x.data() + first[me];
      std::copy_n(received.data(), count[me], share);
      for (size_t r = 1; r < P; ++r) {
        const T* other = received.data() + static_cast<int64_t>(r) * count[me];
        for (int64_t i = 0; i < count[me]; ++i) share[i] += other[i];
      }
    });
  }

  template <class T>
  void gather_shares(std::span<T> x, std::span<const int64_t> cuts) {
    const auto P = static_cast<size_t>(size_), me = static_cast<size_t>(rank_);
    std::vector<T> received;
    in_pieces(cuts, [&](const std::vector<int64_t>& first, const std::vector<int64_t>& count) {
      const Counts in(count);
      received.resize(static_cast<size_t>(in.begin.back() + in.n.back()));
      check(MPI_Allgatherv(x.data() + first[me], in.n[me], type_of<T>(), received.data(), in.n.data(), in.begin.data(),
                           type_of<T>(), comm_),
            "a gathering of shares");
      for (size_t r = 0; r < P; ++r) std::copy_n(received.data() + in.begin[r], count[r], x.data() + first[r]);
    });
  }

  template <class T>
  void ordered_sum(std::span<T> x) {
    std::vector<int64_t> cuts;
    for (int64_t r = 0; r <= size_; ++r) cuts.push_back(static_cast<int64_t>(x.size()) * r / size_);
    scatter_sums(x, cuts);
    gather_shares(x, cuts);
  }

  MPI_Comm comm_;
  bool owned_;
  int rank_ = 0, size_ = 1;
};

}  // namespace

std::unique_ptr<Communicator> join_mpi() {
  int ready = 0;
  MPI_Initialized(&ready);
  if (!ready) {
    int provided = 0;  // threads of ours compute; the main one alone calls MPI
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "the start of MPI");
  }
  return std::make_unique<OverMpi>(MPI_COMM_WORLD, /*owned=*/false);
}

std::string mpi_version() {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(version, &length);
  const std::string all = version;
  return all.substr(0, all.find_first_of(",\n"));
}

}  // namespace kestrel

#endif  // KESTREL_HAVE_MPI
