// Large memory that comes and goes: what is given is kept for what is taken next.
//
// A fresh page is dear: the kernel clears it, and on a virtual machine its host may have to find it first. So a block
// that is given is kept. One of the same size is handed out as it is; else others leave their huge pages to a new
// mapping: mremap moves their entries in the page table, nothing is copied or cleared, and they stay huge, which direct
// transfers to disks want. What of a block is less than a huge page moves likewise, to where no more than that is wanted,
// or to where a huge page is and it would have to go; and huge pages are cut before fresh memory takes their place.
// Blocks that are small beside a huge page share one, and leave it when the last of them is given. No more is mapped than
// was ever out at once. Contents are undefined.
//
// One pool for the process: what chunks leave, activations and gradients have next (allocator.cpp).

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t WHOLE = size_t(2) << 20;  // a huge page
// Pages that have moved may be a mapping each to the kernel, and it has no more than 65,530 for a process.
constexpr size_t MOVED_AT_MOST = size_t(1) << 14;
// Rests that nobody has are a mapping each, too.
constexpr size_t RESTS_AT_MOST = size_t(1) << 14;
constexpr size_t LEAST_REST = size_t(1) << 16;
#ifdef MREMAP_FIXED
constexpr bool MOVES = true;  // the system can move pages
#else
constexpr bool MOVES = false;
#endif
constexpr int READ_WRITE = PROT_READ | PROT_WRITE;
constexpr int PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS;

struct Block {
  char *start;
  size_t moved;               // what came from elsewhere: huge pages, and pieces
  std::vector<size_t> small;  // pieces that are no huge pages, at its end: each may be moved by itself
};

// A huge page in equal parts.
struct Shared {
  size_t part;
  std::vector<char *> free;
  size_t used;
};

struct Pool {
  std::mutex lock;
  std::unordered_map<void *, std::pair<size_t, Block>> out;   // with their sizes, by address
  std::map<size_t, std::vector<Block>> kept;                  // by size; no empty ones
  std::vector<char *> loose;                                  // huge pages that nobody has
  std::map<size_t, std::vector<char *>> rests;                // other pieces, by size; no empty ones
  std::unordered_map<char *, Shared> shared;                  // by huge page
  std::unordered_map<size_t, std::set<char *>> roomy;         // shared pages that have free parts, by their size
  size_t rest_count = 0, rest_bytes = 0;
  size_t live = 0, spare = 0, most = 0, moved = 0;            // bytes out, bytes kept, their highest sum, pages
  size_t mapped = 0;                                          // bytes that were ever fresh
};

// Never destroyed: at exit, tensors may go after whatever ends a library.
Pool &pool() {
  static Pool *made = [] {
    // Else a child that is forked while another thread has the lock would wait for ever.
    pthread_atfork([] { pool().lock.lock(); }, [] { pool().lock.unlock(); }, [] { pool().lock.unlock(); });
    return new Pool;
  }();
  return *made;
}

size_t rounded(size_t count, size_t to) { return (count + to - 1) / to * to; }

void ask_for_huge(char *start, size_t count) {
#ifdef MADV_HUGEPAGE
  // Private: the kernel has no huge pages for shared mappings unless an administrator asks for them.
  madvise(start, count, MADV_HUGEPAGE);
#endif
}

// Where it is large it begins at a huge page. Null where the system has none left.
char *fresh(size_t count) {
  const size_t slack = count >= WHOLE ? WHOLE : 0;
  void *found = mmap(nullptr, count + slack, READ_WRITE, PRIVATE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char *first = static_cast<char *>(found);
  if (!slack) return first;
  char *start = reinterpret_cast<char *>(rounded(reinterpret_cast<uintptr_t>(first), WHOLE));
  const size_t before = start - first;
  if (before) munmap(first, before);
  if (before < slack) munmap(start + count, slack - before);
  ask_for_huge(start, count);
  return start;
}

// A kept block of that size, out of the books.
Block pop(Pool &all, decltype(Pool::kept)::iterator found) {
  Block block = std::move(found->second.back());
  found->second.pop_back();
  if (found->second.empty()) all.kept.erase(found);
  return block;
}

// A piece that is nobody's now is kept if it is worth it.
void leave_rest(Pool &all, char *start, size_t size) {
  if (MOVES && size >= LEAST_REST && all.rest_count < RESTS_AT_MOST) {
    all.rests[size].push_back(start);
    ++all.rest_count;
    all.rest_bytes += size;
    return;
  }
  munmap(start, size);
  all.spare -= size;
}

// A kept block of that size leaves its pages to whoever wants them.
void take_apart(Pool &all, decltype(Pool::kept)::iterator found) {
  const size_t size = found->first;
  const Block block = pop(all, found);
  all.moved -= block.moved;
  const size_t small = std::accumulate(block.small.begin(), block.small.end(), size_t(0));
  size_t place = 0;
  for (; place < size - small; place += WHOLE) {
    if (MOVES) {
      all.loose.push_back(block.start + place);
    } else {
      leave_rest(all, block.start + place, WHOLE);
    }
  }
  for (const size_t piece : block.small) {
    leave_rest(all, block.start + place, piece);
    place += piece;
  }
}

// Takes one of the rests, cut to `count` bytes where it is larger, which `count` becomes where it is smaller.
char *rest_of(Pool &all, decltype(Pool::rests)::iterator found, size_t &count) {
  const size_t size = found->first;
  char *start = found->second.back();
  found->second.pop_back();
  if (found->second.empty()) all.rests.erase(found);
  --all.rest_count;
  all.rest_bytes -= size;
  if (size > count) leave_rest(all, start + count, size - count);
  count = std::min(count, size);
  return start;
}

// A kept block that has a piece of at least `count` bytes, or the end.
decltype(Pool::kept)::iterator with_piece(Pool &all, size_t count) {
  return std::find_if(all.kept.begin(), all.kept.end(), [&](const auto &blocks) {
    const std::vector<size_t> &small = blocks.second.back().small;
    return std::any_of(small.begin(), small.end(), [&](size_t piece) { return piece >= count; });
  });
}

// The smallest rest of at least `count` bytes, or else the largest, which `count` becomes; null where nobody has any.
// `cut`: then a huge page is taken apart.
char *find_rest(Pool &all, size_t &count, bool cut) {
  auto found = all.rests.lower_bound(count);
  if (found == all.rests.end()) {
    const auto block = with_piece(all, count);
    if (block != all.kept.end()) take_apart(all, block);
    if (all.rests.empty() && cut && all.loose.empty() && !all.kept.empty()) take_apart(all, std::prev(all.kept.end()));
    if (all.rests.empty() && cut && !all.loose.empty()) {
      leave_rest(all, all.loose.back(), WHOLE);
      all.loose.pop_back();
    }
    found = all.rests.lower_bound(count);
  }
  if (found == all.rests.end() && !all.rests.empty()) --found;
  return found == all.rests.end() ? nullptr : rest_of(all, found, count);
}

// Gives back to the system until no more than `most` bytes are kept: what is of least use to others first.
void shrink(Pool &all, size_t most) {
  while (all.spare > most) {
    if (!all.rests.empty()) {
      size_t size = all.rests.begin()->first;
      munmap(rest_of(all, all.rests.begin(), size), size);
      all.spare -= size;
    } else if (!all.kept.empty() && all.kept.begin()->first < WHOLE) {
      take_apart(all, all.kept.begin());
    } else if (!all.loose.empty()) {
      munmap(all.loose.back(), WHOLE);
      all.loose.pop_back();
      all.spare -= WHOLE;
    } else {
      take_apart(all, std::prev(all.kept.end()));
    }
  }
}

// Moves pages to a place in a fresh block: 1 where they are there, 0 where it has fresh ones still, -1 where it has a hole
// now: the system could not even map what it just had.
int move_to(char *place, char *pages, size_t count) {
#ifdef MREMAP_FIXED
  if (mremap(pages, count, count, MREMAP_MAYMOVE | MREMAP_FIXED, place) != MAP_FAILED) return 1;
  // What was there may be gone (too many mappings, say): a fresh page takes its place.
  const bool whole = mmap(place, count, READ_WRITE, PRIVATE | MAP_FIXED_NOREPLACE, -1, 0) != MAP_FAILED || errno == EEXIST;
  ask_for_huge(place, count);
  return whole ? 0 : -1;
#else
  return 0;
#endif
}

// Moves pages that somebody left to a place in a fresh block, and counts them.
int give_to(Pool &all, Block &block, size_t place, char *pages, size_t count) {
  const int found = move_to(block.start + place, pages, count);
  if (found < 1) return found;
  all.spare -= count;
  all.mapped -= count;
  ++all.moved;
  ++block.moved;
  return found;
}

// How many places of huge pages in a fresh block are to be made up of smaller pieces. `open`: what loose pages leave of
// them; `excess`: what has to go otherwise.
size_t made_up(Pool &all, size_t open, size_t rest, size_t excess) {
  if (!open || excess <= rest) return 0;
  const size_t wanted = std::min(excess, open + rest);
  while (all.rest_bytes < wanted && !all.kept.empty()) take_apart(all, all.kept.begin());
  const size_t found = std::min(wanted, all.rest_bytes);
  return found > rest ? (found - rest) / WHOLE : 0;
}

// Loose pages for the first places of a fresh block, and pieces for the last, as far as there are any; whether it is whole.
bool move_in(Pool &all, Block &block, size_t size) {
  const auto more = [&] { return MOVES && all.moved < MOVED_AT_MOST; };
  while (more() && all.loose.size() < size / WHOLE && !all.kept.empty() && std::prev(all.kept.end())->first >= WHOLE) {
    take_apart(all, std::prev(all.kept.end()));
  }
  const size_t allowed = std::max(all.most, all.live + size) - all.live - size;  // may be kept beside this block
  const auto excess = [&] { return all.spare > allowed ? all.spare - allowed : 0; };
  all.mapped += size;
  int found = 1;
  // Neighbours stay neighbours: to the kernel they are one mapping then.
  size_t place = 0, first = all.loose.size() - std::min(size / WHOLE, all.loose.size());
  for (auto next = first; found == 1 && next < all.loose.size() && more(); ++next, place += WHOLE) {
    found = give_to(all, block, place, all.loose[next], WHOLE);
  }
  if (found < 1) place -= WHOLE;
  all.loose.erase(all.loose.begin() + first, all.loose.begin() + first + place / WHOLE);
  const size_t rest = size % WHOLE, open = size - rest - place;
  for (place = size - rest - (more() ? made_up(all, open, rest, excess()) * WHOLE : 0); found == 1 && place < size && more();) {
    size_t count = size - place;
    char *pages = find_rest(all, count, excess() > 0);
    if (!pages) break;
    found = give_to(all, block, place, pages, count);
    if (found == 1) {
      block.small.push_back(count);
      place += count;
    } else {
      leave_rest(all, pages, count);
    }
  }
  if (place < size) block.small.push_back(size - place);
  return found >= 0;
}

// A block that nobody kept: fresh, but for the pages that others leave it.
bool make(Pool &all, size_t size, Block &block) {
  block.start = fresh(size);
  if (!block.start) {
    shrink(all, 0);
    block.start = fresh(size);
  }
  if (!block.start) return false;
  if (move_in(all, block, size)) return true;
  munmap(block.start, size);
  all.moved -= block.moved;
  return false;
}

// A block that shares no page with others.
void *take_whole(Pool &all, size_t size) {
  Block block{nullptr, 0, {}};
  const auto same = all.kept.find(size);
  if (same != all.kept.end()) {
    block = pop(all, same);
    all.spare -= size;
  } else if (!make(all, size, block)) {
    return nullptr;
  }
  char *start = block.start;
  all.out[start] = {size, std::move(block)};
  all.live += size;
  return start;
}

void give_whole(Pool &all, decltype(Pool::out)::iterator found) {
  const size_t size = found->second.first;
  all.kept[size].push_back(std::move(found->second.second));
  all.out.erase(found);
  all.live -= size;
  all.spare += size;
}

// A part of a page that others have parts of, too.
void *take_part(Pool &all, size_t part) {
  std::set<char *> &roomy = all.roomy[part];
  if (roomy.empty()) {
    char *page = static_cast<char *>(take_whole(all, WHOLE));
    if (!page) return nullptr;
    Shared &made = all.shared[page] = {part, {}, 0};
    for (size_t count = WHOLE / part; count--;) made.free.push_back(page + count * part);
    roomy.insert(page);
  }
  char *page = *roomy.begin();  // the first, so that the last may become free
  Shared &from = all.shared[page];
  char *start = from.free.back();
  from.free.pop_back();
  ++from.used;
  if (from.free.empty()) roomy.erase(page);
  return start;
}

void give_part(Pool &all, decltype(Pool::shared)::iterator found, char *start) {
  Shared &to = found->second;
  char *page = found->first;
  if (to.free.empty()) all.roomy[to.part].insert(page);
  to.free.push_back(start);
  if (--to.used) return;
  all.roomy[to.part].erase(page);
  all.shared.erase(found);
  give_whole(all, all.out.find(page));
}

}  // namespace

extern "C" {

// Null where the system has no memory left to map.
void *pages_take(size_t count) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  if (count > SIZE_MAX / 2) return nullptr;
  const size_t size = rounded(count ? count : 1, page);
  Pool &all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  // As large as fits in as often: sizes that differ by little share pages.
  void *found = size <= WHOLE / 2 ? take_part(all, WHOLE / (WHOLE / size) / page * page) : take_whole(all, size);
  all.most = std::max(all.most, all.live);
  shrink(all, all.most - all.live);
  return found;
}

// Whether it was taken here.
int pages_give(void *address) {
  Pool &all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  char *start = static_cast<char *>(address);
  const auto part = all.shared.find(start - reinterpret_cast<uintptr_t>(start) % WHOLE);
  if (part != all.shared.end()) {
    give_part(all, part, start);
    return 1;
  }
  const auto found = all.out.find(address);
  if (found == all.out.end()) return 0;
  give_whole(all, found);
  return 1;
}

// Gives back what is kept until it is no more than `most` bytes; what is mapped now is the most that will be.
void pages_trim(size_t most) {
  Pool &all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  shrink(all, most);
  all.most = all.live + all.spare;
}

// Bytes that are out, that are kept, and that were ever fresh.
void pages_count(size_t *found) {
  Pool &all = pool();
  const std::lock_guard<std::mutex> guard(all.lock);
  found[0] = all.live;
  found[1] = all.spare;
  found[2] = all.mapped;
}
}
