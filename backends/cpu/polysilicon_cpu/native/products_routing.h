// Which experts a token goes to, and with what weight.
#pragma once

#include <cstdint>

#include "products.h"

namespace polysilicon {

// Floats of memory that `route` works in.
int route_scratch(int experts);

// logits [experts] to the chosen experts [top_k], best first, and their weights.
void route(const float* logits, int experts, const Routing& routing, float* scratch,
           std::int32_t* chosen, float* weights);

}  // namespace polysilicon
