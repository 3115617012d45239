// Packing: copies a panel of an operand so that the microkernel reads it in order.
#pragma once

#include <cstdint>

namespace kestrel::cpu {

// out[k * width + i] = in[i * own + k * step] for i < count and k < depth, 0 for count <= i < width.
// One of own and step must be 1.
void pack_panel(float* out, int width, int count, int64_t depth, const float* in, int64_t own, int64_t step);

}  // namespace kestrel::cpu
