// Products of ragged groups on the GPU against the CPU.
//
// Read a failure from the top: OneTileNamesItsElements says which element of an operand arrived where; only if it
// passes do the random products say more.
#include <array>
#include <chrono>
#include <cstdio>
#include <limits>

#include "gpu/support.h"
#include "kernels/experts/experts.h"
#include "kernels/experts/grouped_cuda.h"

namespace kestrel::test {
namespace {

using cuda::GroupedPath;
constexpr GroupedPath kPaths[] = {GroupedPath::automatic, GroupedPath::portable, GroupedPath::hopper_128,
                                  GroupedPath::hopper_256};
const char* name_of_path(GroupedPath p) {
  constexpr const char* names[] = {"automatic", "portable", "hopper_128", "hopper_256"};
  return names[static_cast<int>(p)];
}
bool needs_hopper(GroupedPath p) {
  return p == GroupedPath::hopper_128 || p == GroupedPath::hopper_256;
}
bool is_hopper() {
  use_device(0);
  const DeviceProperties d = device_properties(0);
  return d.major == 9 && d.minor == 0;
}

void forward(Stream& s, GroupedPath path, Tensor y, Tensor x, Tensor w, Tensor offsets) {
  if (path == GroupedPath::automatic) return grouped_linear_forward(s, y, x, w, offsets);
  if (!s.planning()) cuda::grouped_linear_forward(s, y, x, w, offsets, path);
}
void backward_input(Stream& s, GroupedPath path, Tensor dx, Tensor dy, Tensor w, Tensor offsets) {
  if (path == GroupedPath::automatic) return grouped_linear_backward_input(s, dx, dy, w, offsets);
  if (!s.planning()) cuda::grouped_linear_backward_input(s, dx, dy, w, offsets, path);
}
void backward_weight(Stream& s, GroupedPath path, Tensor dw, Tensor dy, Tensor x, Tensor offsets) {
  if (path == GroupedPath::automatic) return grouped_linear_backward_weight(s, dw, dy, x, offsets);
  if (!s.planning()) cuda::grouped_linear_backward_weight(s, dw, dy, x, offsets, path);
}

// got against want, as expect_close; where want is NaN got must be NaN too.  Shows the first differences, and how many
// of each row and column remainder there are, since a wrong address shows as a pattern.
void expect_grouped(const char* name, const DeviceBuffer& got, const Tensor& want, double bound) {
  ASSERT_EQ(got->numel(), want.numel()) << name;
  const std::vector<float> g = got.values();
  const int64_t cols = want.cols();
  const auto wanted = [&](int64_t i) { return double{want.f32()[i / cols * want.ld + i % cols]}; };
  double difference = 0, norm = 0, largest = 0;
  for (int64_t i = 0; i < want.numel(); ++i) {
    if (std::isfinite(wanted(i))) largest = std::max(largest, std::fabs(wanted(i)));
  }
  int64_t bad = 0, bad_nan = 0;
  std::array<int64_t, 8> by_row{}, by_col{};
  std::string sample;
  for (int64_t i = 0; i < want.numel(); ++i) {
    const double w = wanted(i), x = g[static_cast<size_t>(i)];
    if (std::isnan(w) && std::isnan(x)) continue;
    const double d = std::fabs(x - w);
    if (std::isfinite(w) && std::isfinite(x)) difference += d * d, norm += w * w;
    if (d <= bound * (largest + 8 * std::fabs(w))) continue;
    ++bad;
    bad_nan += std::isnan(x) || std::isnan(w);
    ++by_row[static_cast<size_t>(i / cols % 8)];
    ++by_col[static_cast<size_t>(i % cols / 8 % 8)];
    if (bad <= 10) sample += text(" [", i / cols, ",", i % cols, "] ", x, " for ", w, ";");
  }
  const double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  if (bad == 0 && error <= bound) return;
  std::string rows, columns;
  for (size_t i = 0; i < 8; ++i) rows += text(" ", by_row[i]), columns += text(" ", by_col[i]);
  ADD_FAILURE() << name << " " << got->describe() << ": relative error " << error << ", bound " << bound << "; " << bad
                << " of " << want.numel() << " elements are wrong (" << bad_nan << " of them by a NaN):" << sample
                << " wrong ones by row % 8:" << rows << "; by column / 8 % 8:" << columns;
}

// Rows of `t` from `used` on still hold the poison.
void expect_spare(const char* name, const DeviceBuffer& t, int64_t used) {
  const std::vector<char> bytes = t.raw();
  const size_t from = static_cast<size_t>(used * t->cols() * size_of(t->dtype));
  const auto written =
      std::find_if(bytes.begin() + static_cast<std::ptrdiff_t>(from), bytes.end(), [](char c) { return c != '\xff'; });
  EXPECT_TRUE(written == bytes.end()) << name << ": spare row "
                                      << (written - bytes.begin()) / (t->cols() * size_of(t->dtype)) << " was written";
}

// ---------------------------------------------------------------- one tile, legible inputs

enum class Code { row, column };
// Element [r][c] is r or c: exact in BF16 up to 256.
void fill_code(const Tensor& t, Code code) {
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) t.f32()[r * t.ld + c] = static_cast<float>(code == Code::row ? r : c);
  }
}
void fill_identity(const Tensor& t) {
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) t.f32()[r * t.ld + c] = r == c ? 1.f : 0.f;
  }
}
// want[i][j] = coded[i][j], or coded[j][i]; 0 where there is none.
void fill_want(const Tensor& want, const Tensor& coded, bool transposed) {
  for (int64_t i = 0; i < want.rows(); ++i) {
    for (int64_t j = 0; j < want.cols(); ++j) {
      const int64_t r = transposed ? j : i, c = transposed ? i : j;
      want.f32()[i * want.ld + j] = r < coded.rows() && c < coded.cols() ? coded.f32()[r * coded.ld + c] : 0.f;
    }
  }
}

// One expert; one operand is the identity, so that the result is the other operand, whose elements say where they are
// from: "[3,17] 25 for 17" under Code::column means that column 25 arrived where column 17 belongs.  No tolerance: all
// numbers are exact.
TEST(GpuGrouped, OneTileNamesItsElements) {
  CudaStream cuda;
  const bool hopper = is_hopper();
  struct Size {
    int64_t rows, in, out;
  };
  for (const Size& n : {Size{128, 64, 64}, Size{64, 64, 128}, Size{128, 128, 128}, Size{128, 256, 64},
                        Size{200, 64, 256}, Size{77, 256, 256}}) {
    for (const GroupedPath path : kPaths) {
      if (needs_hopper(path) && !hopper) continue;
      for (const DType t : {DType::bf16, DType::f32}) {
        if (needs_hopper(path) && t != DType::bf16) continue;
        for (const Code code : {Code::row, Code::column}) {
          SCOPED_TRACE(text("rows ", n.rows, " in ", n.in, " out ", n.out, " ", name_of(t), " ", name_of_path(path),
                            code == Code::row ? " elements say their row" : " elements say their column"));
          Buffer offsets({2}, DType::i64), x({n.rows, n.in}), dy({n.rows, n.out}), w({1, n.out, n.in});
          offsets->as<int64_t>()[0] = 0, offsets->as<int64_t>()[1] = n.rows;
          DeviceBuffer xo({2}, DType::i64), xx({n.rows, n.in}, t), xdy({n.rows, n.out}, t), xw({1, n.out, n.in}, t);
          xo.upload(offsets);
          for (const bool coded_rows : {true, false}) {  // the rows are coded and the weight is 1, or the other way
            Buffer y({n.rows, n.out}), dx({n.rows, n.in});
            if (coded_rows) {
              fill_code(x, code);
              fill_code(dy, code);
              fill_identity(w->matrix());
            } else {
              fill_identity(x);
              fill_identity(dy);
              fill_code(w->matrix(), code);
            }
            const int64_t narrow = std::min(n.in, n.out);
            // y[r][j] = x[r][j], or w[j][r];  dx[r][j] = dy[r][j], or w[r][j]
            for (int64_t r = 0; r < n.rows; ++r) {
              for (int64_t j = 0; j < n.out; ++j) {
                y[r * n.out + j] =
                    coded_rows ? (j < narrow ? x[r * n.in + j] : 0.f) : (r < n.in ? w[j * n.in + r] : 0.f);
              }
              for (int64_t j = 0; j < n.in; ++j) {
                dx[r * n.in + j] =
                    coded_rows ? (j < narrow ? dy[r * n.out + j] : 0.f) : (r < n.out ? w[r * n.in + j] : 0.f);
              }
            }
            xx.upload(x);
            xdy.upload(dy);
            xw.upload(w);
            DeviceBuffer xy({n.rows, n.out}, t), xdx({n.rows, n.in}, t);
            cuda.run([&](Stream& s) {
              forward(s, path, xy, xx, xw, xo);
              backward_input(s, path, xdx, xdy, xw, xo);
            });
            const char* which = coded_rows ? " (A is read)" : " (B is read)";
            expect_grouped(text("y", which).c_str(), xy, y, 0);
            expect_grouped(text("dx", which).c_str(), xdx, dx, 0);

            // dw[i][j] = x[i][j] where dy is the identity, dy[j][i] where x is
            Buffer dw({1, n.out, n.in});
            fill_code(coded_rows ? x : dy, code);
            fill_identity(coded_rows ? dy : x);
            fill_want(dw->matrix(), coded_rows ? *x : *dy, !coded_rows);
            xx.upload(x);
            xdy.upload(dy);
            DeviceBuffer xdw({1, n.out, n.in});
            xdw.zero();
            cuda.run([&](Stream& s) { backward_weight(s, path, xdw, xdy, xx, xo); });
            expect_grouped(text("dw", coded_rows ? " (B is read)" : " (A is read)").c_str(), xdw, dw, 0);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------- random products

struct Case {
  std::vector<int64_t> counts;
  int64_t in, out, spare;       // spare rows after the last expert's
  int64_t left = 0, right = 0;  // padding columns beside every matrix of rows
  int64_t nan_expert = -1;      // whose rows of x and dy are NaN
};
std::string name(const Case& c, DType t, GroupedPath path) {
  std::string counts;
  for (int64_t n : c.counts) counts += text(" ", n);
  return text(name_of(t), " ", name_of_path(path), " rows", counts, " in ", c.in, " out ", c.out, " spare ", c.spare,
              " padded ", c.left, "+", c.right, c.nan_expert >= 0 ? text(" NaN expert ", c.nan_expert) : "");
}
bool hopper_takes(const Case& c) {
  return c.in >= 64 && c.out >= 64 && c.in % 8 == 0 && c.out % 8 == 0 && c.left % 8 == 0 && c.right % 8 == 0;
}

struct Problem {
  int64_t E, used, room;
  Buffer offsets, x, w, dy, y, dx, dw, dw_before;
  Problem(const Case& c, DType t)
      : E(static_cast<int64_t>(c.counts.size())),
        used(sum(c.counts)),
        room(used + c.spare),
        offsets({E + 1}, DType::i64),
        x({room, c.in}),
        w({E, c.out, c.in}),
        dy({room, c.out}),
        y({room, c.out}),
        dx({room, c.in}),
        dw({E, c.out, c.in}),
        dw_before({E, c.out, c.in}) {
    int64_t* o = offsets->as<int64_t>();
    o[0] = 0;
    for (int64_t e = 0; e < E; ++e) o[e + 1] = o[e] + c.counts[static_cast<size_t>(e)];
    x.normal(1);
    w.normal(2);
    dy.normal(3);
    dw_before.normal(4);
    for (const Buffer* b : {&x, &w, &dy}) round_to(t, *b);
    for (int64_t e = 0; e < E; ++e) {
      if (o[e] == o[e + 1]) std::fill_n(dw_before.f() + e * c.out * c.in, c.out * c.in, kNan);  // must stay as it is
    }
    if (c.nan_expert >= 0) spoil(c, o[c.nan_expert], o[c.nan_expert + 1]);
    spoil(c, used, room);
    dw.copy(dw_before);
    CpuStream cpu;
    grouped_linear_forward(cpu, y, x, w, offsets);
    grouped_linear_backward_input(cpu, dx, dy, w, offsets);
    grouped_linear_backward_weight(cpu, dw, dy, x, offsets);
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static int64_t sum(const std::vector<int64_t>& counts) {
    int64_t n = 0;
    for (int64_t c : counts) n += c;
    return n;
  }
  void spoil(const Case& c, int64_t begin, int64_t end) {
    std::fill_n(x.f() + begin * c.in, (end - begin) * c.in, kNan);
    std::fill_n(dy.f() + begin * c.out, (end - begin) * c.out, kNan);
  }
};

// The three results of a problem on the device.
struct Results {
  DeviceBuffer y, dx, dw;
  Results(CudaStream& cuda, const Case& c, DType t, GroupedPath path, const Problem& p)
      : y({p.room, c.out}, t, c.left, c.right), dx({p.room, c.in}, t, c.right, c.left), dw({p.E, c.out, c.in}) {
    DeviceBuffer offsets({p.E + 1}, DType::i64), w({p.E, c.out, c.in}, t);
    DeviceBuffer x(p.x, t, c.left, c.right), dy(p.dy, t, c.right, c.left);
    offsets.upload(p.offsets);
    w.upload(p.w);
    dw.upload(p.dw_before);
    cuda.run([&](Stream& s) {
      forward(s, path, y, x, w, offsets);
      backward_input(s, path, dx, dy, w, offsets);
      backward_weight(s, path, dw, dy, x, offsets);
    });
    EXPECT_EQ(cuda.scratch(), 0);
  }
};

void run_case(CudaStream& cuda, const Case& c, DType t, bool hopper) {
  const Problem p(c, t);
  for (const GroupedPath path : kPaths) {
    if (needs_hopper(path) && (t != DType::bf16 || !hopper || !hopper_takes(c))) continue;
    SCOPED_TRACE(name(c, t, path));
    const Results got(cuda, c, t, path, p), again(cuda, c, t, path, p);
    expect_grouped("y", got.y, p.y, tolerance(t));
    expect_grouped("dx", got.dx, p.dx, tolerance(t));
    // F32 sums of BF16 products: tensor cores truncate where they add, see GpuGemm; 3e-5 covers the rows used here.
    expect_grouped("dw", got.dw, p.dw, t == DType::bf16 ? 3e-5 : tolerance(DType::f32));
    expect_spare("y", got.y, p.used);
    expect_spare("dx", got.dx, p.used);
    expect_same_bits("y again", again.y, got.y);
    expect_same_bits("dx again", again.dx, got.dx);
    expect_same_bits("dw again", again.dw, got.dw);
  }
}

// One expert and one step, then borders: tiles of 128 rows, steps of 64 (a whole one, one row more, one less), experts
// without rows first, last and between, one row; spare rows.
TEST(GpuGrouped, RowsOfAllKinds) {
  CudaStream cuda;
  const bool hopper = is_hopper();
  for (const auto& counts : {std::vector<int64_t>{128},
                             {64},
                             {1},
                             {63},
                             {65},
                             {0},
                             {4, 0, 3},
                             {0, 0},
                             {0, 0, 129, 0, 128, 1, 0},
                             {300, 2, 65, 63, 64, 0, 127}}) {
    for (const DType t : {DType::f32, DType::bf16}) run_case(cuda, {counts, 64, 64, 0}, t, hopper);
    for (const DType t : {DType::f32, DType::bf16}) run_case(cuda, {counts, 128, 192, 5}, t, hopper);
  }
}

// Widths within a tile, across tiles of 128 and 256, ragged ones that TMA can take and ones that it cannot; column
// blocks on 16-byte borders and off them.
TEST(GpuGrouped, WidthsOfAllKinds) {
  CudaStream cuda;
  const bool hopper = is_hopper();
  const std::vector<int64_t> counts{70, 0, 131, 9};
  struct Width {
    int64_t in, out, left, right;
  };
  for (const Width& n :
       {Width{64, 64, 0, 0}, Width{256, 64, 0, 0}, Width{64, 256, 0, 0}, Width{72, 136, 0, 0}, Width{200, 320, 8, 16},
        Width{512, 256, 64, 0}, Width{1032, 88, 0, 0}, Width{96, 1280, 0, 8}, Width{8, 16, 0, 0}, Width{1, 1, 0, 0},
        Width{19, 33, 0, 0}, Width{64, 130, 0, 0}, Width{130, 64, 0, 0}, Width{128, 64, 3, 1}, Width{31, 257, 5, 2}}) {
    for (const DType t : {DType::f32, DType::bf16}) {
      run_case(cuda, {counts, n.in, n.out, 3, n.left, n.right}, t, hopper);
    }
  }
}

// Tiles load rows beyond their expert's: what the next expert holds must not matter, not even a NaN.
TEST(GpuGrouped, ANeighboursNaNStaysThere) {
  CudaStream cuda;
  const bool hopper = is_hopper();
  for (const auto& counts : {std::vector<int64_t>{65, 10, 100}, {1, 1, 1}, {130, 200, 67}}) {
    for (int64_t e = 0; e < 3; ++e) {
      for (const DType t : {DType::f32, DType::bf16}) {
        run_case(cuda, {counts, 128, 256, 70, 0, 0, e}, t, hopper);
      }
    }
  }
}

// Widths of zero: y is a sum of no terms; nothing else has elements.
TEST(GpuGrouped, SizesOfZero) {
  CudaStream cuda;
  for (const DType t : {DType::f32, DType::bf16}) {
    run_case(cuda, {{3, 0, 130}, 0, 5, 2}, t, false);
    run_case(cuda, {{3, 0, 130}, 5, 0, 2}, t, false);
    run_case(cuda, {{3, 0, 130}, 0, 16, 2}, t, false);
    run_case(cuda, {{0, 0}, 16, 8, 4}, t, false);
    run_case(cuda, {{0, 0}, 16, 8, 0}, t, false);
  }
}

// The two tile widths sum every element in the same order, so which one serves is not a matter of bits.  Enough tiles
// for blocks to take several each, and for the ring of stages to go round many times.
TEST(GpuGrouped, TheTileIsNotAMatterOfBits) {
  if (!is_hopper()) GTEST_SKIP() << "needs a device of compute capability 9.0";
  CudaStream cuda;
  Case c{{}, 256, 768, 100};
  for (int64_t e = 0; e < 40; ++e) c.counts.push_back(e % 7 == 3 ? 0 : (e * 97) % 700);
  const Problem p(c, DType::bf16);
  const Results narrow(cuda, c, DType::bf16, GroupedPath::hopper_128, p);
  const Results wide(cuda, c, DType::bf16, GroupedPath::hopper_256, p);
  expect_grouped("y", narrow.y, p.y, tolerance(DType::bf16));
  expect_grouped("dx", narrow.dx, p.dx, tolerance(DType::bf16));
  expect_grouped("dw", narrow.dw, p.dw, 3e-5);  // as above
  expect_same_bits("y", wide.y, narrow.y);
  expect_same_bits("dx", wide.dx, narrow.dx);
  expect_same_bits("dw", wide.dw, narrow.dw);
}

// A layer of the model's size, every path against the portable one, and how long each took.
TEST(GpuGrouped, LargeProductsAgree) {
  CudaStream cuda;
  const bool hopper = is_hopper();
  const int64_t E = 8, rows = 32768, in = 1024, out = 1024, spare = 128;
  Buffer offsets({E + 1}, DType::i64), x({rows + spare, in}), dy({rows + spare, out}), w({E, out, in});
  for (int64_t e = 0; e <= E; ++e) {  // near 4096 each
    offsets->as<int64_t>()[e] = e == E ? rows : e * (rows / E) + (e % 2) * 37;
  }
  x.normal(1);
  dy.normal(2);
  w.normal(3);
  DeviceBuffer xo({E + 1}, DType::i64), xx(x, DType::bf16), xdy(dy, DType::bf16), xw({E, out, in}, DType::bf16);
  xo.upload(offsets);
  xw.upload(w);
  std::vector<float> want[3];
  for (const GroupedPath path :
       {GroupedPath::portable, GroupedPath::automatic, GroupedPath::hopper_128, GroupedPath::hopper_256}) {
    if (needs_hopper(path) && !hopper) continue;
    SCOPED_TRACE(name_of_path(path));
    DeviceBuffer y({rows + spare, out}, DType::bf16), dx({rows + spare, in}, DType::bf16), dw({E, out, in});
    dw.zero();
    const auto run = [&](Stream& s, int what) {
      if (what == 0) forward(s, path, y, xx, xw, xo);
      if (what == 1) backward_input(s, path, dx, xdy, xw, xo);
      if (what == 2) backward_weight(s, path, dw, xdy, xx, xo);
    };
    cuda.run([&](Stream& s) {
      for (int what = 0; what < 3; ++what) run(s, what);
    });
    const DeviceBuffer* results[] = {&y, &dx, &dw};
    for (int i = 0; i < 3; ++i) {
      std::vector<float> got = results[i]->values();
      const size_t used = i == 2 ? got.size() : static_cast<size_t>(rows) * 1024;
      if (path == GroupedPath::portable) {
        want[i] = std::move(got);
        continue;
      }
      double difference = 0, norm = 0;
      for (size_t j = 0; j < used; ++j) {
        const double d = double{got[j]} - double{want[i][j]};
        difference += d * d;
        norm += double{want[i][j]} * double{want[i][j]};
      }
      const double error = std::sqrt(difference / norm);
      // Two roundings of one BF16 number, or F32 sums of 4096 truncated products (see GpuGemm).
      EXPECT_LE(error, i == 2 ? 6e-5 : 3e-3) << "product " << i;
    }
    expect_spare("y", y, rows);
    expect_spare("dx", dx, rows);
    cuda.run([&](Stream& s) {
      if (s.planning()) return;
      const char* const names[] = {"forward", "backward_input", "backward_weight"};
      for (int what = 0; what < 3; ++what) {
        run(s, what);
        wait(s);
        const int times = 20;
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < times; ++i) run(s, what);
        wait(s);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / times;
        std::printf("grouped %s, %s: %.0f us, %.0f TFLOP/s\n", name_of_path(path), names[what], seconds * 1e6,
                    2e-12 * static_cast<double>(rows * in * out) / seconds);
      }
    });
  }
}

}  // namespace
}  // namespace kestrel::test
