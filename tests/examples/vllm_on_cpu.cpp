// The operators of vLLM that examples/vllm calls, for a CPU, so that its model goes the whole way where there is no
// GPU. The schemas are those of vLLM 0.33. The kernels are written with torch's operators, from what its documentation
// says.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void fused_add_rms_norm(Tensor& x, Tensor& residual, const OptionalTensor& weight, double epsilon) {
  residual.add_(x);
  const Tensor wide = residual.to(at::kFloat);
  const Tensor normed = wide * at::rsqrt(wide.square().mean(-1, true) + epsilon);
  x.copy_(weight ? normed.to(x.scalar_type()) * *weight : normed);
}

void rotate(Tensor x, const Tensor& cosine, const Tensor& sine, int64_t width) {
  const Tensor heads = x.view({x.size(0), -1, width});
  const auto halves = heads.clone().chunk(2, -1);
  heads.narrow(-1, 0, width / 2).copy_(halves[0] * cosine - halves[1] * sine);
  heads.narrow(-1, width / 2, width / 2).copy_(halves[1] * cosine + halves[0] * sine);
}

void rotary_embedding(const Tensor& positions, Tensor& query, const OptionalTensor& key, int64_t width,
                      const Tensor& turns, bool is_neox, int64_t offset, bool inverse) {
  TORCH_CHECK(is_neox && offset == 0 && !inverse, "rotary_embedding: rotates whole heads by halves");
  const auto parts = turns.index_select(0, positions).unsqueeze(1).chunk(2, -1);
  rotate(query, parts[0], parts[1], width);
  if (key) rotate(*key, parts[0], parts[1], width);
}

void silu_and_mul(Tensor& result, const Tensor& input) {
  const auto halves = input.chunk(2, -1);
  result.copy_(at::silu(halves[0]) * halves[1]);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                             const Tensor& slots, std::string_view dtype, const Tensor&, const Tensor&) {
  TORCH_CHECK(dtype == "auto", "reshape_and_cache_flash: caches of the keys' dtype only");
  const Tensor kept = at::nonzero(slots >= 0).view(-1), places = slots.index_select(0, kept);
  key_cache.flatten(0, 1).index_copy_(0, places, key.index_select(0, kept));
  value_cache.flatten(0, 1).index_copy_(0, places, value.index_select(0, kept));
}

// One split: no partial answers. A sequence's queries are its last tokens.
std::vector<Tensor> fwd(Tensor query, const Tensor& keys, const Tensor& values, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, OptionalTensor out, const OptionalTensor& begins,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor& queries,
                        const OptionalTensor& used, std::optional<int64_t>, std::optional<int64_t>,
                        const OptionalTensor& pages, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, double scale, bool is_causal, int64_t, int64_t,
                        double, bool, const OptionalTensor&, int64_t splits, std::optional<bool>, int64_t,
                        const OptionalTensor&, int64_t, int64_t, const OptionalTensor&) {
  TORCH_CHECK(is_causal && splits == 1 && !out && begins && used && pages, "fwd: not what the example asks");
  const Tensor counts = queries ? *queries : begins->diff();
  Tensor answer = at::zeros_like(query, at::MemoryFormat::Contiguous);
  const Tensor sums = at::zeros({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  for (int64_t row = 0; row < pages->size(0); ++row) {
    const int64_t begin = (*begins)[row].item<int64_t>(), count = counts[row].item<int64_t>();
    const int64_t known = (*used)[row].item<int64_t>(), shared = query.size(1) / keys.size(2);
    const auto context = [&](const Tensor& cache) {  // [heads, known, width]
      const Tensor tokens = cache.index_select(0, (*pages)[row].to(at::kLong)).flatten(0, 1).narrow(0, 0, known);
      return tokens.to(at::kFloat).repeat_interleave(shared, 1).transpose(0, 1);
    };
    const Tensor q = query.narrow(0, begin, count).to(at::kFloat).transpose(0, 1);
    Tensor scores = at::matmul(q, context(keys).transpose(1, 2)) * scale;  // [heads, count, known]
    const Tensor later = at::ones({count, known}, at::kBool).triu(known - count + 1);
    scores = scores.masked_fill(later, -std::numeric_limits<float>::infinity());
    answer.narrow(0, begin, count).copy_(at::matmul(scores.softmax(-1), context(values)).transpose(0, 1));
    sums.narrow(1, begin, count).copy_(scores.logsumexp(-1));
  }
  return {answer, sums, Tensor(), Tensor()};
}

}  // namespace

TORCH_LIBRARY(_C, m) {
  m.def("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()");
  m.def(
      "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool "
      "is_neox, "
      "int rope_dim_offset=0, bool inverse=False) -> ()");
  m.def("silu_and_mul(Tensor! result, Tensor input) -> ()");
}

TORCH_LIBRARY(_C_cache_ops, m) {
  m.def(
      "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
      "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()");
}

TORCH_LIBRARY(_vllm_fa3_C, m) {
  m.def(
      "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
      "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
      "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
      "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
      "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
      "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(_C, CPU, m) {
  m.impl("fused_add_rms_norm", &fused_add_rms_norm);
  m.impl("rotary_embedding", &rotary_embedding);
  m.impl("silu_and_mul", &silu_and_mul);
}

TORCH_LIBRARY_IMPL(_C_cache_ops, CPU, m) { m.impl("reshape_and_cache_flash", &reshape_and_cache_flash); }

TORCH_LIBRARY_IMPL(_vllm_fa3_C, CPU, m) { m.impl("fwd", &fwd); }
