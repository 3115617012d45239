#include "kernels/core/error.h"

namespace kestrel {

void contract_failure(const char* expression, const char* file, int line, const std::string& message) {
  throw ContractError(text(file, ":", line, ": ", message, " [", expression, "]"));
}

}  // namespace kestrel
