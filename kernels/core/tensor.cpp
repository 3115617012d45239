#include "kernels/core/tensor.h"

#include <sstream>

namespace kestrel {

std::string Tensor::describe() const {
  std::ostringstream s;
  s << name_of(dtype) << "[";
  for (int i = 0; i < rank; ++i) s << (i ? "," : "") << shape[static_cast<size_t>(i)];
  s << "]";
  if (rank >= 2 && ld != cols()) s << " ld " << ld;
  s << " " << name_of(device);
  return s.str();
}

}  // namespace kestrel
