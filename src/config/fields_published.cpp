// Rows for the fields that a published `text_config` holds besides those of fields_model.cpp, so that it can be pasted
// whole.  Where another value would make another model the row is `fixed` and refuses it; the rest changes nothing here
// and is declared as `informational`.
#include "src/config/fields.h"

namespace kestrel {
namespace {

struct Fixed {
  const char* name;
  std::vector<nlohmann::json> only;
  const char* meaning;
  const char* why;  // this value alone, and what to do with another
};

std::vector<Fixed> fixed_fields() {
  const nlohmann::json null = nullptr;
  return {
      {"model_type",
       {"kimi_linear"},
       "Architecture of the published text model.",
       "Kestrel trains this architecture; a text_config of another one cannot be pasted."},
      {"mla_use_nope",
       {true},
       "MLA without position encoding.",
       "Rotary position encoding does not exist here; set true, and train a new model."},
      {"moe_router_activation_func",
       {"sigmoid"},
       "Score of an expert.",
       "A softmax router does not exist here; set \"sigmoid\", and train a new model."},
      {"topk_method",
       {"noaux_tc"},
       "Choice of experts by biased score.",
       "Other choices do not exist here; model.balancing sets how the bias moves."},
      {"num_expert_group", {1, null}, "Groups of experts.", "Group-limited routing does not exist here; set 1."},
      {"topk_group", {1, null}, "Groups a token may use.", "Group-limited routing does not exist here; set 1."},
      {"num_nextn_predict_layers",
       {0, null},
       "Multi-token-prediction layers.",
       "Multi-token prediction does not exist yet; set 0."},
      {"attention_bias", {false}, "Biases in attention.", "No matrix here has a bias; set false."},
      {"attention_dropout", {0, null}, "Dropout in attention.", "Dropout does not exist here; set 0."},
      {"hidden_dropout", {0, null}, "Dropout in the residual stream.", "Dropout does not exist here; set 0."},
      {"is_encoder_decoder", {false}, "Encoder-decoder model.", "Only decoders exist here; set false."},
      {"add_cross_attention", {false}, "Cross attention.", "Only decoders exist here; set false."},
  };
}

struct Group {
  const char* meaning;
  std::vector<const char*> names;
};

std::vector<Group> informational_fields() {
  return {
      {"No effect: NoPE models rotate nothing.", {"rope_theta", "rope_scaling", "rope_parameters"}},
      {"No effect: derived by the published class and unused by it.", {"head_dim"}},
      {"No effect: groups do not exist (num_expert_group is 1).", {"use_grouped_topk"}},
      {"No effect: the context is data.sequence_length.", {"max_position_embeddings", "model_max_length"}},
      {"No effect: train.precision sets the precision of the run.", {"torch_dtype", "dtype", "use_bfloat16"}},
      {"No effect: how the published weights are packed; import reads that from the tensors.", {"quantization_config"}},
      {"No effect on the model: tokens of the published tokenizer.",
       {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
        "prefix"}},
      {"No effect: says which program wrote or reads the published file.",
       {"architectures", "auto_map", "transformers_version", "_name_or_path", "_attn_implementation_autoset",
        "attn_implementation"}},
      {"No effect: a switch of the published program's execution, not of the model.",
       {"use_cache", "return_dict", "output_hidden_states", "output_attentions", "torchscript", "tf_legacy_loss",
        "chunk_size_feed_forward", "pruned_heads", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"}},
      {"No effect: a label of fine-tuned models.",
       {"finetuning_task", "id2label", "label2id", "task_specific_params", "problem_type"}},
      {"No effect: a default of text generation (`top_k` here is not the number of experts).",
       {"max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens"}},
  };
}

}  // namespace

std::vector<Field> published_fields() {
  std::vector<Field> t;
  t.push_back(make_field(
                  "model.num_key_value_heads",
                  "Must equal num_attention_heads: every MLA head has its own keys and values.",
                  [](auto& d) -> auto& { return d.num_key_value_heads; })
                  .between(0, Field::kMaxSize)
                  .null_is("num_attention_heads")
                  .default_is("num_attention_heads")
                  .input_only());
  for (Fixed& row : fixed_fields()) {
    Field f;
    f.path = std::string("model.") + row.name;
    f.meaning = row.meaning;
    f.role = Field::Role::fixed;
    f.only = std::move(row.only);
    f.range_note = row.why;
    f.printed = false;
    t.push_back(std::move(f));
  }
  for (const Group& group : informational_fields()) {
    for (const char* name : group.names) {
      Field f;
      f.path = std::string("model.") + name;
      f.meaning = group.meaning;
      f.role = Field::Role::informational;
      f.printed = false;
      t.push_back(std::move(f));
    }
  }
  return t;
}

}  // namespace kestrel
