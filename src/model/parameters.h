// Every trainable tensor of a model: how it is laid out, what it is called, how it starts and who updates it.
//
// Layers declare blocks.  A block is one contiguous matrix [rows, cols] that a single product uses, for example all
// projections of a layer's input.  Its members are the tensors of the public K3 checkpoint: row ranges of the block
// under their Hugging Face names.  A member family ("experts.{}.w1.weight", count E) stands for E tensors at equal
// distances.
//
// All blocks lie in flat buffers: fp32 master weights, fp32 gradients, and - where the working precision differs -
// working weights.  On the CPU the working weights are the masters.
#pragma once

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
  int64_t count = 1;           // tensors in the family
  int64_t row_stride = 0;      // rows from one to the next
  std::vector<int64_t> shape;  // as the checkpoint records it
  Init init;
  Rule rule = Rule::muon;
  // Muon: rows of one orthogonalised block, repeated over the tensor; {rows} = whole; {nope, v} = alternating.
  std::vector<int64_t> muon_blocks;
  Block* block = nullptr;

  std::string name_of(int64_t i) const;
};

struct Block {
  int64_t rows = 0, cols = 0;
  bool keep_f32 = false;  // stays fp32 in the working weights (norms, gates, convolutions, biases)
  bool trained = true;    // false: the balance bias
  int64_t offset = 0;     // elements into the flat buffers
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

  // Shapes without storage: for planning a model that need not fit.  The addresses must not be touched.
  void plan(Device device, DType working);
  // Storage.  `gradients` false: inference.
  void allocate(Device device, DType working, bool gradients);
  bool allocated() const { return static_cast<bool>(memory_); }
  void initialize(uint64_t seed);
  // Values of one tensor from and to host memory (F32, p.rows_of(master) elements); masters and working weights follow.
  void write(const NamedParameter& p, const float* host);
  // After masters were changed on the device: casts them into the working weights.
  void refresh_working(Stream& s);
  void zero_gradients(Stream& s);

  const std::deque<Block>& blocks() const { return blocks_; }
  std::deque<Block>& blocks() { return blocks_; }
  // In declaration order.
  void for_each(const std::function<void(const NamedParameter&)>& fn) const;

  int64_t elements() const { return elements_; }   // padded, of the flat buffers
  int64_t trained_parameters() const;              // tensors' elements without padding and without balance biases
  Tensor gradients() const { return gradients_; }  // the whole flat buffer [elements]
  DType working_dtype() const { return working_; }

 private:
  std::deque<Block> blocks_;
  int64_t elements_ = 0;
  DType working_ = DType::f32;
  void place(Tensor master, Tensor work, Tensor gradients);

  std::unique_ptr<Arena> memory_;
  Tensor gradients_;
};

// A member over the rows [row, row + rows) of the block being declared; see declare.
Member matrix_member(std::string name, int64_t rows, int64_t cols, Init init, Rule rule,
                     std::vector<int64_t> muon_blocks = {});
Member vector_member(std::string name, int64_t n, Init init, Rule rule);

}  // namespace kestrel
