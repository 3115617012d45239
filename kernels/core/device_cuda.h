// The CUDA side of kernels/core, in terms a host compiler knows: no CUDA header is needed to call it.
#pragma once

#include "kernels/core/device.h"

namespace kestrel::cuda {

DeviceCount device_count();
DeviceProperties device_properties(int index);
void use_device(int index);

void* allocate(int64_t bytes, const char* what);  // device memory; throws DeviceError naming `what`
void release(void* p) noexcept;
void* allocate_pinned(int64_t bytes);  // host memory that copies run from and to without a detour
void release_pinned(void* p) noexcept;

void* create_queue();
void destroy_queue(void* queue) noexcept;
void wait(void* queue);

void* create_event();  // with timing
void destroy_event(void* event) noexcept;
void record_event(void* event, void* queue);
float milliseconds_between(void* first, void* last);  // both done: the caller has waited

// NVTX ranges of the calling thread; nothing where the toolkit has no NVTX headers.
void push_range(const char* name);
void pop_range();

// Rows of `row_bytes` bytes, `*_pitch` bytes apart, in any direction between host and device; queued, not waited for.
void copy_rows(void* queue, void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t row_bytes,
               int64_t rows);

}  // namespace kestrel::cuda
