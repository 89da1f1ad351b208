#include "sampling_candidates.h"

#include <algorithm>

namespace polysilicon::sampling {

int shortest_prefix(Entry* entries, int count, double mass) {
  int begin = 0, end = count;
  while (end - begin > 64) {  // quickselect: halve the entries among which the prefix ends
    const int middle = begin + (end - begin) / 2;
    std::nth_element(entries + begin, entries + middle, entries + end, better);
    double below = 0;
    for (int i = begin; i < middle; ++i) below += entries[i].weight;
    if (below >= mass) {
      end = middle;
    } else {
      mass -= below;
      begin = middle;
    }
  }
  std::sort(entries + begin, entries + end, better);
  double reached = 0;
  for (int i = begin; i < end; ++i) {
    reached += entries[i].weight;
    if (reached >= mass) return i + 1;
  }
  return end;
}

}  // namespace polysilicon::sampling
