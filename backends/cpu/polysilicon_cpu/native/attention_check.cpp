// Whether a step's arrays fit a pool.

#include <string>

#include "attention.h"

namespace polysilicon {

void check_batch(const KVPool& pool, const BatchView& batch) {
  const KVLayout& layout = pool.layout();
  if (layout.group >= batch.group_count) throw Error("the batch has no KV group of this pool");
  const GroupView& tables = batch.groups[layout.group];
  const int tokens = batch.query_start[batch.sequence_count];
  if (batch.query_start[0] != 0 || tokens > batch.token_count) {
    throw Error("query_start must rise from 0 to at most the number of tokens");
  }
  const std::int64_t slots = static_cast<std::int64_t>(pool.pages()) * layout.page_size;
  for (int token = 0; token < tokens; ++token) {
    if (tables.slots[token] < 0 || tables.slots[token] >= slots) {
      throw Error("slots must lie in 0.." + std::to_string(slots - 1) + ", got " +
                  std::to_string(tables.slots[token]));
    }
  }
  for (int s = 0; s < batch.sequence_count; ++s) {
    const int count = batch.query_start[s + 1] - batch.query_start[s];
    const int context = batch.context_len[s];
    const std::string which = "sequence " + std::to_string(s);
    if (count < 0) throw Error("query_start must not fall, as it does at " + which);
    if (context < count) {
      throw Error(which + " has " + std::to_string(count) + " tokens in a context of " +
                  std::to_string(context));
    }
    const int pages = (context + layout.page_size - 1) / layout.page_size;
    if (pages > tables.width) {
      throw Error("the page table of " + which + " ends before its context does");
    }
    const std::int32_t* table = tables.page_table + static_cast<std::size_t>(s) * tables.width;
    for (int page = 0; page < pages; ++page) {
      if (table[page] < 0 || table[page] >= pool.pages()) {
        throw Error("pages of " + which + " must lie in 0.." + std::to_string(pool.pages() - 1) +
                    ", got " + std::to_string(table[page]));
      }
    }
    if (batch.tree_mask != nullptr && batch.tree_width < count) {
      throw Error("the tree mask has " + std::to_string(batch.tree_width) + " columns for " +
                  std::to_string(count) + " tokens");
    }
  }
}

}  // namespace polysilicon
