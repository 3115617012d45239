// Checks that need more than one field, and the values that follow from several.  Ranges of single fields are in the
// table (fields.h).
#pragma once

#include "src/config/fields.h"

namespace kestrel {

// Fills what follows from other fields (layer lists, defaults that depend on a choice, directories), then refuses what
// cannot be trained: each ConfigError names the field, the value, the limit and a way out.
void resolve_model(Draft& draft);
void resolve_run(Draft& draft);  // everything, the model first

// Where checkpoints go when checkpoint.dir does not say.
std::string default_checkpoint_dir(const RunConfig& config);

}  // namespace kestrel
