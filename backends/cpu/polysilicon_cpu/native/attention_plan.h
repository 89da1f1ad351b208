// How a step's attention is divided: what each query sees, and which thread-sized items of work
// read which parts of which contexts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "context.h"
#include "levels/attention.h"

namespace polysilicon {

struct KVLayout;

struct AttentionPlan {
  // A query sees the context indices [low, high), of its own step's tokens perhaps not all.
  struct Token {
    std::int32_t sequence;
    std::int32_t low, high;
    // Where several items share the parts of its context: the parts, and where their results begin
    // in the partial results, -1 where one item does all.
    std::int32_t first_part, last_part;
    std::ptrdiff_t partial;
  };

  struct Sequence {
    std::int32_t begin, end;     // tokens
    std::int32_t before;         // context before the step's tokens
    bool masked;                 // visibility is not a plain range: a tree, positions with gaps
    std::int32_t shared_parts;   // leading parts that are read together with other sequences
  };

  // Queries of some tokens (of one sequence, or of several that share pages) and one key head,
  // against the parts [first_part, last_part) of their context.
  struct Item {
    std::int32_t first, count;  // into `order`
    std::int32_t head;
    std::int32_t first_part, last_part;
  };

  std::vector<Sequence> sequences;
  std::vector<Token> tokens;
  std::vector<std::int32_t> order;  // tokens, as items name them
  std::vector<Item> items;          // the most expensive of a sequence first
  std::vector<std::int32_t> split;  // tokens with partial results
  std::size_t partial_rows = 0;     // results of one query against one part
  int item_tokens = 0;              // the most of one item

  // group: query heads of a key head. Allocates only where a step is larger than all before.
  void make(const KVLayout& layout, const BatchView& batch, int group, bool causal, int threads);

  // Of a query's result against a part, in `partial` rows.
  static std::size_t partial_row(const Token& token, int group, int head, int part, int query);

 private:
  struct Block {  // of tokens of one sequence
    std::int32_t first, count, first_part, last_part;
    std::int64_t cost;
  };

  void see(const KVLayout& layout, const BatchView& batch, bool causal);
  void share();
  void share_run(int first, int last, int part);
  bool same_part(int a, int b, int part) const;
  void add_items(int first, int count, int first_part, int last_part, int chunk);

  const std::int32_t* tables_ = nullptr;
  int table_width_ = 0, page_size_ = 0, heads_ = 0;
  std::vector<std::int32_t> sorted_, shareable_;
  std::vector<Block> blocks_, shared_blocks_;
};

}  // namespace polysilicon
