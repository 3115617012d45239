// Embeddings on the GPU against the CPU.
#include <random>

#include "gpu/support.h"
#include "kernels/embedding/embedding.h"

namespace kestrel::test {
namespace {

constexpr DType kActivations[] = {DType::f32, DType::bf16};

enum class Ids { uniform, skewed, same, distinct };
struct Case {
  int64_t N, V, D, left, right;  // padding columns beside y and dy
  Ids ids;
};
// No token, one, a whole piece of 4096 and its edges, several pieces; every id the same (one list of N rows), none
// twice, and a few frequent among many; wide and ragged rows.
constexpr Case kCases[] = {{0, 3, 8, 0, 0, Ids::uniform},        {1, 1, 1, 0, 0, Ids::same},
                           {7, 5, 3, 0, 0, Ids::uniform},        {100, 50, 64, 8, 8, Ids::uniform},
                           {97, 1000, 36, 1, 2, Ids::skewed},    {4095, 33, 16, 0, 0, Ids::same},
                           {4096, 5000, 8, 0, 0, Ids::distinct}, {4097, 40000, 24, 0, 0, Ids::skewed},
                           {9001, 128, 520, 0, 0, Ids::skewed},  {300, 256, 2048, 0, 0, Ids::uniform}};

void fill_ids(const Tensor& ids, int64_t V, Ids kind) {
  std::mt19937 rng(7);
  for (int64_t n = 0; n < ids.numel(); ++n) {
    const int64_t any = static_cast<int64_t>(rng() % static_cast<uint64_t>(V));
    int64_t id = any;
    if (kind == Ids::same) id = V - 1;
    if (kind == Ids::distinct) id = (n * 7) % V;  // 7 and V are coprime in the case above
    if (kind == Ids::skewed && rng() % 4 != 0) id = static_cast<int64_t>(rng() % 3);
    ids.i32()[n] = static_cast<int32_t>(id);
  }
}

TEST(GpuEmbedding, ForwardCopiesRowsAndBackwardAddsThemInTokenOrder) {
  CudaStream cuda;
  CpuStream cpu;
  for (const DType t : kActivations) {
    for (const DType grad : kActivations) {
      for (const Case& c : kCases) {
        SCOPED_TRACE(text(name_of(t), " gradient ", name_of(grad), " N ", c.N, " V ", c.V, " D ", c.D));
        Buffer table({c.V, c.D}), dy({c.N, c.D}), y({c.N, c.D}), dtable({c.V, c.D}), ids({c.N}, DType::i32);
        table.normal(1);
        dy.normal(2);
        dtable.normal(3);
        round_to(t, table);
        round_to(grad, dy);
        fill_ids(ids, c.V, c.ids);
        DeviceBuffer xtable(table, t), xdy(dy, grad, c.left, c.right), xids(ids->view({1, c.N}), DType::i32);
        DeviceBuffer xy({c.N, c.D}, t, c.left, c.right), xdtable(dtable, DType::f32);
        const Tensor device_ids = xids->view({c.N});
        cuda.run([&](Stream& s) { embedding_forward(s, xy, device_ids, xtable); });
        cuda.run([&](Stream& s) { embedding_backward(s, xdtable, xdy, device_ids); });
        embedding_forward(cpu, y, ids, table);
        embedding_backward(cpu, dtable, dy, ids);
        expect_close("y", xy, y, 0.);                 // a copy
        expect_close("dtable", xdtable, dtable, 0.);  // the same additions in the same order
      }
    }
  }
}

TEST(GpuEmbedding, AnIdOutsideTheTableIsSeenAndHarmsNothing) {
  CudaStream cuda;
  Buffer table({4, 8}), dy({3, 8}), ids({3}, DType::i32);
  table.normal(1);
  dy.normal(2);
  ids->i32()[0] = -1;
  ids->i32()[1] = 2;
  ids->i32()[2] = 4;
  DeviceBuffer xtable(table, DType::bf16), xdy(dy, DType::f32), xids(ids->view({1, 3}), DType::i32);
  DeviceBuffer xy({3, 8}, DType::bf16), xdtable({4, 8});
  xdtable.zero();
  cuda.run([&](Stream& s) {
    embedding_forward(s, xy, xids->view({3}), xtable);
    embedding_backward(s, xdtable, xdy, xids->view({3}));
  });
  const std::vector<float> y = xy.values(), d = xdtable.values();
  for (size_t c = 0; c < 8; ++c) {
    EXPECT_TRUE(std::isnan(y[c]));
    EXPECT_EQ(y[8 + c], rounded(table[static_cast<int64_t>(16 + c)], DType::bf16));
    EXPECT_TRUE(std::isnan(y[16 + c]));
    for (size_t row : {0, 1, 3}) EXPECT_EQ(d[row * 8 + c], 0.f);
    EXPECT_EQ(d[16 + c], dy[static_cast<int64_t>(8 + c)]);
  }
}

}  // namespace
}  // namespace kestrel::test
