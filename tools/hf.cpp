// kestrel import-hf and export-hf: weights between Kestrel and Hugging Face's layout of the public K3 checkpoint.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "src/checkpoint/files.h"
#include "src/checkpoint/json_strict.h"
#include "src/infer/load_model.h"
#include "src/model/weights.h"
#include "tools/command.h"

namespace kestrel::tools {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

struct Options {
  std::string from, out, dtype = "fp32";
  std::optional<std::string> tokenizer;
};

// Working copies in the dtype of the file.  Norms, gates, convolutions and biases stay F32, as published.
std::vector<NamedTensor> converted(const ParameterStore& store, bool to_bf16, std::vector<std::vector<bf16>>& memory) {
  std::vector<NamedTensor> out;
  store.for_each([&](const NamedParameter& p) {
    const Tensor t = p.rows_of(p.member->block->master);
    if (!to_bf16 || p.member->block->keep_f32) {
      out.push_back({p.name, t, p.shape});
      return;
    }
    auto& copy = memory.emplace_back(static_cast<size_t>(t.numel()));
    for (size_t i = 0; i < copy.size(); ++i) copy[i] = bf16(t.f32()[i]);
    out.push_back({p.name, Tensor::of(copy.data(), {t.rows(), t.cols()}), p.shape});
  });
  return out;
}

std::string hf_config(const ModelConfig& config) {
  ordered_json j = ordered_json::parse(to_json(config));
  j["architectures"] = {"KimiLinearForCausalLM"};
  j["model_type"] = "kimi_linear";
  return j.dump(2) + "\n";
}

int export_model(const Options& o) {
  const InferenceModel m = load_model(o.from, o.tokenizer);
  std::vector<std::vector<bf16>> memory;
  const auto tensors = converted(m.model->parameters(), o.dtype == "bf16", memory);
  std::map<std::string, std::string> files;
  if (m.tokenizer) {
    const std::string path = o.tokenizer                      ? *o.tokenizer
                             : m.run && m.run->data.tokenizer ? *m.run->data.tokenizer
                                                              : o.from + "/tokenizer.json";
    files["tokenizer.json"] = read_file(path);
  }
  write_hf_model(o.out, tensors, hf_config(m.config), 5'000'000'000, files);
  std::printf("%zu tensors of %s written to %s (%s)\n", tensors.size(), m.source.c_str(), o.out.c_str(),
              o.dtype.c_str());
  return 0;
}

// The model section of a published config.json: its text_config where there is one.  Hugging Face's class reads an
// absent gate_lower_bound as the softplus gate; here that is spelled null.
std::string model_section(const std::string& path) {
  json j = parse_json_strict(read_file(path), path);
  if (j.contains("text_config")) j = j["text_config"];
  if (j.contains("linear_attn_config") && j["linear_attn_config"].is_object() &&
      !j["linear_attn_config"].contains("gate_lower_bound")) {
    j["linear_attn_config"]["gate_lower_bound"] = nullptr;
  }
  return j.dump();
}

int import_model(const Options& o) {
  const std::string config_path = o.from + "/config.json";
  const WeightSource weights_in(o.from);
  const ModelConfig config = parse_model_config(model_section(config_path), config_path);
  Model model(config);
  model.parameters().allocate(Device::cpu, DType::f32, false);
  load_weights(model.parameters(), weights_in);
  std::map<std::string, std::string> files;
  if (std::filesystem::exists(o.from + "/tokenizer.json"))
    files["tokenizer.json"] = read_file(o.from + "/tokenizer.json");
  const HostTensors weights = weights_of(model.parameters());
  const auto& tensors = weights.list();
  write_hf_model(o.out, tensors, to_json(config) + "\n", 5'000'000'000, files);
  std::printf("%zu tensors of %s written to %s as F32; train from them with train.init_from=%s\n", tensors.size(),
              o.from.c_str(), o.out.c_str(), o.out.c_str());
  return 0;
}

}  // namespace

void add_export_hf_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c = add_command(app, "export-hf",
                            "Write a trained model in Hugging Face's layout (safetensors, config.json, tokenizer.json)",
                            "kestrel export-hf runs/quickstart --out exported --dtype bf16");
  c.add_option("model", o->from,
               "Run directory, checkpoint folder, or directory with model.safetensors and config.json")
      ->required();
  c.add_option("--out", o->out, "Directory to make")->required();
  c.add_option("--dtype", o->dtype, "Matrices as bf16 or fp32; norms, gates, convolutions and biases stay fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  c.add_option("--tokenizer", o->tokenizer, "tokenizer.json to copy (default: the one the run was trained with)");
  c.callback([o, &exit_code] { exit_code = export_model(*o); });
}

void add_import_hf_command(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App& c =
      add_command(app, "import-hf", "Read a published K3 checkpoint (BF16, F32 or MXFP4 experts) into Kestrel's layout",
                  "kestrel import-hf tests/fixtures/model_k3 --out imported");
  c.add_option("model", o->from, "Directory with config.json and model.safetensors (or its index)")->required();
  c.add_option("--out", o->out, "Directory to make")->required();
  c.callback([o, &exit_code] { exit_code = import_model(*o); });
}

}  // namespace kestrel::tools
