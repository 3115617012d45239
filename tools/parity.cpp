// kestrel parity: one batch through given weights, for comparison with any other implementation.
#include <cmath>
#include <cstdio>
#include <memory>

#include "src/checkpoint/files.h"
#include "src/data/files.h"
#include "src/model/evaluation.h"
#include "src/model/weights.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

struct Options {
  std::string model, tokens, out;
  ComputeChoice where;
  bool gradients = false;
};

int run(const Options& o) {
  Evaluation::Options where;
  where.device = o.where.chosen_device();
  where.dtype = o.where.dtype();
  const std::string config_path = o.model + "/config.json";
  const WeightSource weights(o.model);
  std::vector<std::string> inputs = weights.files();
  inputs.insert(inputs.end(), {config_path, o.tokens});
  refuse_to_overwrite(o.out, inputs);
  Evaluation evaluation(parse_model_config(read_file(config_path), config_path), where);
  ParameterStore& store = evaluation.model().parameters();
  load_weights(store, weights);
  const Evaluation::Result r = evaluation.run(SafetensorsFile(o.tokens), o.gradients);
  if (!std::isfinite(r.loss))
    throw DivergedError(text("the loss of ", o.model, " on ", o.tokens, " is ", r.loss,
                             ": its weights are too large to compute with. Nothing was written."));

  double loss = r.loss;
  const SafetensorsFile input(o.tokens);
  const Tensor ids = input.tensor("tokens");
  std::vector<NamedTensor> out{{"loss", Tensor::of(&loss, {1})},
                               {"logits", r.logits, {ids.dim(0), ids.dim(1), r.logits.cols()}}};
  // Gradients and loads are copied from the device where they lie on one.
  HostTensors gradients;
  Arena none(where.device, 0);
  Stream s(none);
  if (o.gradients) {
    store.for_each([&](const NamedParameter& p) {
      if (p.member->block->trained) gradients.add(s, "grad." + p.name, p.shape, p.rows_of(p.member->block->g));
    });
  }
  for (size_t i = 0; i < evaluation.model().moe_layers().size(); ++i) {
    const Tensor load = evaluation.model().moe_layers()[i]->balancer().load();
    if (o.gradients) gradients.add(s, "load." + evaluation.model().moe_names()[i], {load.numel()}, load);
  }
  out.insert(out.end(), gradients.list().begin(), gradients.list().end());
  write_safetensors(o.out, out, {{"format", "pt"}});
  std::printf("loss %.9g nats over %lld targets (%s, %s); %zu tensors in %s\n", r.loss,
              static_cast<long long>(r.targets), o.where.device.c_str(), o.where.precision.c_str(), out.size(),
              o.out.c_str());
  return 0;
}

}  // namespace

void add_parity_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "parity", "Loss, logits and gradients of given weights on given tokens",
                            "kestrel parity --model tests/fixtures/model_k3 --tokens "
                            "tests/fixtures/model_k3/expected.safetensors --out /tmp/parity.safetensors --grads");
  c.add_option("--model", o->model, "Directory with config.json (a model section) and model.safetensors")->required();
  c.add_option("--tokens", o->tokens, "Safetensors file with tokens, targets [B,T] and maybe segment [B,T]")
      ->required();
  c.add_option("--out", o->out,
               "File to write: loss, logits, grad.<tensor>, load.<layer> (tokens per expert, with --grads)")
      ->required();
  add_compute_choice(c, o->where);
  c.add_flag("--grads", o->gradients, "Write the gradient of every tensor too");
  c.callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace kestrel::tools
