#include "kernels/gemm/openblas.h"

#ifdef KESTREL_HAVE_OPENBLAS
#include <cblas.h>

#include <algorithm>
#include <climits>
#include <sstream>

#include "kernels/core/parallel.h"

namespace kestrel::cpu {
namespace {

struct Piece {
  int64_t rows, cols;
};

// About sixteen pieces, none so small that packing its operands outweighs the product.
Piece piece_of(int64_t M, int64_t N) {
  constexpr int64_t kPieces = 16;
  Piece p{64, 128};
  while (((M + p.rows - 1) / p.rows) * ((N + p.cols - 1) / p.cols) > kPieces) {
    const bool more_rows = p.cols >= N || (p.rows < M && p.rows < p.cols);
    (more_rows ? p.rows : p.cols) *= 2;
  }
  return p;
}

blasint narrow(const char* name, int64_t n) {
  KESTREL_CHECK(n <= INT_MAX, name, " is ", n, ", more than OpenBLAS takes (", INT_MAX, "); use the own product");
  return static_cast<blasint>(n);
}

}  // namespace

void openblas_parallel(const Product& p) {
  static const bool single = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(single);
  const CBLAS_TRANSPOSE ta = p.ta == Trans::no ? CblasNoTrans : CblasTrans;
  const CBLAS_TRANSPOSE tb = p.tb == Trans::no ? CblasNoTrans : CblasTrans;
  // A tensor of one row may carry any ld; OpenBLAS insists on ld >= columns.
  const blasint lda = narrow("lda", std::max(p.lda, p.ta == Trans::no ? p.K : p.M));
  const blasint ldb = narrow("ldb", std::max(p.ldb, p.tb == Trans::no ? p.N : p.K));
  const blasint ldc = narrow("ldc", std::max(p.ldc, p.N));
  const blasint depth = narrow("K", p.K);
  const Piece piece = piece_of(p.M, p.N);
  const int64_t across = (p.N + piece.cols - 1) / piece.cols, down = (p.M + piece.rows - 1) / piece.rows;
  parallel_for_dynamic(down * across, [&](int64_t t) {
    const int64_t i = t / across * piece.rows, j = t % across * piece.cols;
    const auto m = static_cast<blasint>(std::min(piece.rows, p.M - i));
    const auto n = static_cast<blasint>(std::min(piece.cols, p.N - j));
    const float* a = p.A + (p.ta == Trans::no ? i * p.lda : i);
    const float* b = p.B + (p.tb == Trans::no ? j : j * p.ldb);
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, depth, p.alpha, a, lda, b, ldb, p.beta, p.C + i * p.ldc + j, ldc);
  });
}

std::string openblas_description() {
  std::istringstream config(openblas_get_config());  // "OpenBLAS 0.3.21 NO_LAPACKE ..."
  std::string name, version;
  config >> name >> version;
  return name + " " + version + " (" + openblas_get_corename() + ")";
}

}  // namespace kestrel::cpu
#endif
