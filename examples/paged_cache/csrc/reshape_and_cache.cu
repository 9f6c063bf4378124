#include "common.cuh"
#include "reshape_and_cache.h"

namespace paged_cache {
namespace {

constexpr int kCopyThreads = 256;

// A thread copies a word of a token's keys, and the same one of its values. `width` and the strides count words.
template <class Word>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(ReshapeAndCache call) {
  const int64_t token = call.heads * call.width, words = call.tokens * token, all = call.blocks * call.size;
  for (int64_t i = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x; i < words;
       i += int64_t(gridDim.x) * kCopyThreads) {
    const int64_t t = i / token, within = i - t * token, head = within / call.width, d = within - head * call.width;
    const int64_t slot = call.slots[t];
    if (slot < 0 || slot >= all) continue;
    const int64_t block = slot / call.size, place = slot - block * call.size;
#pragma unroll
    for (const Written& cache : call.caches) {
      Word* to = reinterpret_cast<Word*>(cache.to) + block * cache.block + place * cache.place + head * cache.head;
      to[d * cache.element] = reinterpret_cast<const Word*>(cache.from)[i];
    }
  }
}

template <class Word>
void launch(const Cuda& device, const ReshapeAndCache& call) {
  const int64_t words = call.tokens * call.heads * call.width;
  copy_kernel<Word><<<blocks_for(words, kCopyThreads), kCopyThreads, 0, device.stream()>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

bool takes_vectors(const ReshapeAndCache& call, const Written& cache) {
  return cache.element == 1 && has_whole_vectors(cache.from, call.element_size, {call.width}) &&
         has_whole_vectors(cache.to, call.element_size, {cache.block, cache.place, cache.head});
}

}  // namespace

void run(const Cuda& device, const ReshapeAndCache& call) {
  if (takes_vectors(call, call.caches[0]) && takes_vectors(call, call.caches[1])) {
    ReshapeAndCache vectors = call;
    const int64_t elements = 16 / call.element_size;
    vectors.width /= elements;
    for (Written& cache : vectors.caches)
      for (int64_t* stride : {&cache.block, &cache.place, &cache.head}) *stride /= elements;
    return launch<uint4>(device, vectors);
  }
  if (call.element_size == 2) return launch<uint16_t>(device, call);
  if (call.element_size == 4) return launch<uint32_t>(device, call);
  launch<uint64_t>(device, call);
}

STABLE_TORCH_LIBRARY_IMPL(paged_cache, CUDA, m) { m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache<Cuda>)); }

}  // namespace paged_cache
