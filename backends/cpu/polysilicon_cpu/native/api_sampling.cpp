// Sampling from a step's logits.

#include "api.h"
#include "sampling.h"

using namespace polysilicon;

// The arrays that the view points to must stay until the call has ended; the view need not.
// after: the call that computes the logits.
PS_API Queue::Ticket ps_sample(Device* device, const SamplingView* view, Queue::Ticket after) {
  return device->queue.submit([device, view = *view] { sample(device->context, view); }, after);
}
