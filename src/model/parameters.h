// Every trainable tensor of a model: how it is laid out, what it is called, how it starts and who updates it.
//
// Layers declare blocks.  A block is one contiguous matrix [rows, cols] that a single product uses, for example all
// projections of a layer's input.  Its members are the tensors of the public K3 checkpoint: row ranges of the block
// under their Hugging Face names.  A member family ("experts.{}.w1.weight", count E) stands for E tensors at equal
// distances.
//
// All blocks lie in flat buffers: fp32 master weights, fp32 gradients, and - where the working precision differs -
// working weights.  On the CPU the working weights are the masters.  A buffer has two regions, one after the other:
// what every rank has, and the experts of this rank (src/parallel/mesh.h).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/core/stream.h"

namespace kestrel {

// How a tensor starts (k3_spec: A_log 0, Mamba-style dt_bias, depth queries 0, gains 1, the rest normal).
struct Init {
  enum class Kind : uint8_t { zeros, ones, normal, uniform, dt_bias, constant } kind = Kind::normal;
  double scale = 0.02;  // normal: std; uniform: half width; constant: the value
};

// Who updates it (kernels/optimizer/README.md).
enum class Rule : uint8_t { muon, adamw, adamw_no_decay, balance };

struct Block;

struct Member {
  std::string name;            // "{}" stands for the index of a family
  int64_t row = 0;             // first row in the block
  int64_t rows = 0;            // rows of one tensor
  int64_t count = 1;           // tensors in the family; of experts that ranks share out, those here
  int64_t first = 0;           // index of the first of them
  int64_t family = 1;          // tensors in all
  int64_t row_stride = 0;      // rows from one to the next
  std::vector<int64_t> shape;  // as the checkpoint records it
  Init init;
  Rule rule = Rule::muon;
  // Muon: rows of one orthogonalised block, repeated over the tensor; {rows} = whole; {nope, v} = alternating.
  std::vector<int64_t> muon_blocks;
  Block* block = nullptr;

  std::string name_of(int64_t i) const;  // of the i-th tensor here
};

// Who holds a block: all ranks the same, or the ranks of an expert group each their own experts.
enum class Region : uint8_t { common, experts };

struct Block {
  int64_t rows = 0, cols = 0;
  Region region = Region::common;
  bool keep_f32 = false;  // stays fp32 in the working weights (norms, gates, convolutions, biases)
  bool trained = true;    // false: the balance bias
  int64_t offset = 0;     // elements into its region of the flat buffers
  std::vector<Member> members;
  Tensor master;  // F32 [rows, cols]
  Tensor w;       // working weights [rows, cols]; the same memory as master when the precision is fp32
  Tensor g;       // F32 gradient, empty when not trained

  int64_t numel() const { return rows * cols; }
  Tensor vector() const { return w.view({w.numel()}); }  // of a one-row block
  Tensor grad_vector() const { return g.view({g.numel()}); }
};

// One named tensor as the checkpoint sees it.
struct NamedParameter {
  std::string name;
  std::vector<int64_t> shape;
  const Member* member = nullptr;
  int64_t first_row = 0;  // in the block

  Tensor rows_of(const Tensor& block_tensor) const { return block_tensor.slice(first_row, member->rows); }
};

class ParameterStore {
 public:
  // While the model is built.  Names must be new; the block's rows must be covered once by its members.
  Block* declare(int64_t cols, std::vector<Member> members, bool keep_f32 = false, bool trained = true);
  // Of experts: families of which this rank may have a part.
  Block* declare_experts(int64_t cols, std::vector<Member> members);

  // Shapes without storage: for planning a model that need not fit.  The addresses must not be touched.
  void plan(Device device, DType working);
  // Storage.  `gradients` false: inference.  `sums`: of a run on the CPU with several micro-batches a step, see
  // fold_gradients.
  void allocate(Device device, DType working, bool gradients, bool sums = false);
  bool allocated() const { return static_cast<bool>(memory_); }
  void initialize(uint64_t seed);
  // Values of one tensor from and to host memory (F32, p.rows_of(master) elements); masters and working weights follow.
  void write(const NamedParameter& p, const float* host);
  // After masters were changed on the device: casts them into the working weights.
  void refresh_working(Stream& s);
  void zero_gradients(Stream& s);

  // With `sums`, every micro-batch leaves gradients of its own, which are then folded into fp64 sums and cleared.  Sums
  // of a few fp32 numbers in fp64 are exact but for numbers 2^26 times smaller than another, so they do not depend on
  // which rank computes which micro-batch: a step has the same bits on any number of ranks.  Without sums (on a GPU)
  // micro-batches add up in fp32 and these do nothing.
  void fold_gradients(Stream& s);
  void fold_gradients(Stream& s, const Block& b);
  bool has_sums() const { return static_cast<bool>(sums_); }
  Tensor gradient_sums(Region r) const { return region_of(sums_, r); }  // F64
  // Gradients [begin, end) of a region = their sums.
  void round_sums(Stream& s, Region r, int64_t begin, int64_t end);

  const std::deque<Block>& blocks() const { return blocks_; }
  std::deque<Block>& blocks() { return blocks_; }
  // In declaration order.
  void for_each(const std::function<void(const NamedParameter&)>& fn) const;

  // In declaration order, on all ranks: names of tensors that others hold.
  void for_each_elsewhere(const std::function<void(const std::string& name)>& fn) const;

  int64_t elements() const { return elements_[0] + elements_[1]; }  // padded, of the flat buffers
  int64_t elements(Region r) const { return elements_[static_cast<size_t>(r)]; }
  int64_t trained_parameters() const;              // tensors' elements without padding and without balance biases
  Tensor gradients() const { return gradients_; }  // the whole flat buffer [elements]
  Tensor gradients(Region r) const { return region_of(gradients_, r); }
  Tensor masters(Region r) const { return region_of(masters_, r); }
  DType working_dtype() const { return working_; }

 private:
  std::deque<Block> blocks_;
  std::array<int64_t, 2> elements_{};  // by region
  DType working_ = DType::f32;
  Block* declare(Region region, int64_t cols, std::vector<Member> members, bool keep_f32, bool trained);
  void place(Tensor master, Tensor work, Tensor gradients);
  Tensor region_of(const Tensor& flat, Region r) const {
    return r == Region::common ? flat.slice(0, elements_[0]) : flat.slice(elements_[0], elements_[1]);
  }

  std::unique_ptr<Arena> memory_;
  Tensor masters_, gradients_, sums_;
};

// A member over the rows [row, row + rows) of the block being declared; see declare.
Member matrix_member(std::string name, int64_t rows, int64_t cols, Init init, Rule rule,
                     std::vector<int64_t> muon_blocks = {});
Member vector_member(std::string name, int64_t n, Init init, Rule rule);

}  // namespace kestrel
