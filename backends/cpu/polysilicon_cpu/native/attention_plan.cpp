#include "attention_plan.h"

#include <algorithm>
#include <cstring>

#include "kv.h"

namespace polysilicon {
namespace {

constexpr int kItemRows = 96;  // queries that read a part one after the other, from the cache
constexpr int kItemsPerThread = 4;
constexpr int kReadingCost = 8;  // reading a key costs as much as the products of so many queries

int parts_up_to(int keys) { return (keys + kPart - 1) / kPart; }

}  // namespace

std::size_t AttentionPlan::partial_row(const Token& token, int group, int head, int part,
                                       int query) {
  const int parts = token.last_part - token.first_part;
  return token.partial +
         (static_cast<std::size_t>(head) * parts + part - token.first_part) * group + query;
}

void AttentionPlan::make(const KVLayout& layout, const BatchView& batch, int group, bool causal,
                         int threads) {
  heads_ = layout.heads;
  page_size_ = layout.page_size;
  tables_ = batch.groups[layout.group].page_table;
  table_width_ = batch.groups[layout.group].width;
  item_tokens = std::max(1, kItemRows / group);
  order.clear();
  items.clear();
  split.clear();
  blocks_.clear();
  shared_blocks_.clear();
  partial_rows = 0;
  see(layout, batch, causal);
  order.resize(tokens.size());
  for (std::size_t token = 0; token < tokens.size(); ++token) {
    order[token] = static_cast<std::int32_t>(token);
  }
  share();

  std::int64_t total = 0;
  const auto add_block = [&](std::vector<Block>& blocks, Block block) {
    const std::int64_t keys = static_cast<std::int64_t>(block.last_part - block.first_part) * kPart;
    block.cost = std::max<std::int64_t>(keys * (block.count * group + kReadingCost), 1);
    total += block.cost;
    blocks.push_back(block);
  };
  // The last tokens of a long prompt see most: they come first, so that the end is balanced.
  for (const Sequence& sequence : sequences) {
    for (int end = sequence.end; end > sequence.begin; end -= item_tokens) {
      const int first = std::max(sequence.begin, end - item_tokens);
      int low = tokens[first].low, high = tokens[first].high;
      for (int token = first; token < end; ++token) {
        low = std::min(low, tokens[token].low);
        high = std::max(high, tokens[token].high);
      }
      const int first_part = std::max(low / kPart, sequence.shared_parts);
      add_block(blocks_, {first, end - first, first_part,
                          std::max(first_part, parts_up_to(high)), 0});
    }
  }
  for (Block& block : shared_blocks_) {
    block.cost = static_cast<std::int64_t>(block.last_part - block.first_part) * kPart *
                 (block.count * group + kReadingCost);
    total += block.cost;
  }
  const std::int64_t target =
      std::max<std::int64_t>(total * heads_ / (threads * kItemsPerThread), 1);
  const auto chunk_of = [&](const Block& block) {
    const std::int64_t parts = block.last_part - block.first_part;
    return threads == 1 || block.cost <= target
               ? static_cast<int>(std::max<std::int64_t>(parts, 1))
               : static_cast<int>(std::max<std::int64_t>(parts * target / block.cost, 1));
  };
  for (const Block& block : shared_blocks_) {
    add_items(block.first, block.count, block.first_part, block.last_part, chunk_of(block));
  }
  for (const Block& block : blocks_) {
    const int chunk = chunk_of(block);
    const int shared = sequences[tokens[block.first].sequence].shared_parts;
    if (shared > 0 || block.last_part - block.first_part > chunk) {
      for (int token = block.first; token < block.first + block.count; ++token) {
        tokens[token].first_part = shared > 0 ? 0 : block.first_part;
        tokens[token].last_part = block.last_part;
        tokens[token].partial = static_cast<std::ptrdiff_t>(partial_rows);
        partial_rows += static_cast<std::size_t>(tokens[token].last_part -
                                                 tokens[token].first_part) * heads_ * group;
        split.push_back(token);
      }
    }
    add_items(block.first, block.count, block.first_part, block.last_part, chunk);
  }
}

void AttentionPlan::add_items(int first, int count, int first_part, int last_part, int chunk) {
  for (int head = 0; head < heads_; ++head) {
    int part = first_part;
    do {  // an item without parts still has results: zeros
      const int end = std::min(part + chunk, last_part);
      items.push_back({first, count, head, part, end});
      part = end;
    } while (part < last_part);
  }
}

void AttentionPlan::see(const KVLayout& layout, const BatchView& batch, bool causal) {
  const int window = layout.window;
  sequences.resize(batch.sequence_count);
  tokens.resize(batch.query_start[batch.sequence_count]);
  for (int s = 0; s < batch.sequence_count; ++s) {
    Sequence& sequence = sequences[s];
    sequence.begin = batch.query_start[s];
    sequence.end = batch.query_start[s + 1];
    sequence.before = batch.context_len[s] - (sequence.end - sequence.begin);
    sequence.shared_parts = 0;
    sequence.masked = batch.tree_mask != nullptr;
    for (int t = sequence.begin; t < sequence.end && window > 0 && !sequence.masked; ++t) {
      sequence.masked = batch.positions[t] != sequence.before + t - sequence.begin;
    }
    for (int t = sequence.begin; t < sequence.end; ++t) {
      const int low = window > 0 ? std::max(0, batch.positions[t] - window + 1) : 0;
      const bool whole = sequence.masked || !causal;
      tokens[t] = {s,
                   sequence.masked ? std::min(low, sequence.before) : low,
                   whole ? batch.context_len[s] : sequence.before + t - sequence.begin + 1,
                   0,
                   0,
                   -1};
    }
  }
}

bool AttentionPlan::same_part(int a, int b, int part) const {
  const int first = part * kPart / page_size_;
  const int last = ((part + 1) * kPart + page_size_ - 1) / page_size_;
  const std::size_t bytes = sizeof(std::int32_t) * (last - first);
  return std::memcmp(tables_ + static_cast<std::size_t>(a) * table_width_ + first,
                     tables_ + static_cast<std::size_t>(b) * table_width_ + first, bytes) == 0;
}

void AttentionPlan::share() {
  const int count = static_cast<int>(sequences.size());
  sorted_.clear();
  shareable_.assign(sequences.size(), 0);
  for (int s = 0; s < count; ++s) {
    const Sequence& sequence = sequences[s];
    if (sequence.begin == sequence.end) continue;
    bool all = true;
    for (int t = sequence.begin; t < sequence.end; ++t) all = all && tokens[t].low == 0;
    // Only parts of whole pages: a later page may begin inside the part where pages are large.
    const int pages = sequence.before / page_size_;
    shareable_[s] = all ? static_cast<int>(static_cast<std::int64_t>(pages) * page_size_ / kPart)
                        : 0;
    if (shareable_[s] > 0) sorted_.push_back(s);
  }
  const auto before = [&](int a, int b) {
    const std::int32_t* x = tables_ + static_cast<std::size_t>(a) * table_width_;
    const std::int32_t* y = tables_ + static_cast<std::size_t>(b) * table_width_;
    for (int i = 0; i < table_width_; ++i) {
      if (x[i] != y[i]) return x[i] < y[i];
    }
    return a < b;
  };
  std::sort(sorted_.begin(), sorted_.end(), before);
  share_run(0, static_cast<int>(sorted_.size()), 0);
}

// Sequences sorted_[first, last) have all parts before `part` in common.
void AttentionPlan::share_run(int first, int last, int part) {
  while (first < last) {
    // The run of sequences that go on together from here.
    int end = first + 1;
    const bool goes_on = shareable_[sorted_[first]] > part;
    while (goes_on && end < last && shareable_[sorted_[end]] > part &&
           same_part(sorted_[first], sorted_[end], part)) {
      ++end;
    }
    if (end - first > 1) {
      int next = part + 1;
      const auto all_go_on = [&] {
        for (int i = first; i < end; ++i) {
          if (shareable_[sorted_[i]] <= next) return false;
          if (i > first && !same_part(sorted_[first], sorted_[i], next)) return false;
        }
        return true;
      };
      while (all_go_on()) ++next;
      const int start = static_cast<int>(order.size());
      for (int i = first; i < end; ++i) {
        Sequence& sequence = sequences[sorted_[i]];
        sequence.shared_parts = next;
        for (int t = sequence.begin; t < sequence.end; ++t) order.push_back(t);
      }
      const int stop = static_cast<int>(order.size());
      for (int token = start; token < stop; token += item_tokens) {
        shared_blocks_.push_back({token, std::min(item_tokens, stop - token), part, next, 0});
      }
      share_run(first, end, next);
    }
    first = end;
  }
}

}  // namespace polysilicon
