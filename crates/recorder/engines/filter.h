/* The page filter: drops the accesses that cannot change a TLB.

   An engine sees every access of a program and writes only those that may change the entries of a TLB. The
   filter knows the most recently used pages of each set, as many as every modelled TLB has ways. An access to
   one of them is a hit, and changes only their order. The order matters when a page leaves a set: it must be
   the page that the consumer knows as the least recently used. If it is not, the filter first writes the order,
   as touches. So the dropped accesses change no count. src/filter.rs has the proof and chooses filters; its
   tests have the same filter in Rust.

   A direct-mapped table of slots has the pages with the time of their last use, so that instrumented code needs
   a load, a comparison and a store for an access. The code here searches the set of a page that is in no slot.
   Invariant: a page in a slot is also in its set, and the slot has the newer stamp.

   SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGETAX_FILTER_H
#define PAGETAX_FILTER_H

#include "stream.h"

#define PT_SLOTS 8192
#define PT_NO_PAGE (1ULL << 63)

/* A page's first address, and the time of its last use, by an engine's clock that may wrap. */
struct pt_slot {
   pt_u64 page, stamp;
};

/* The pages of a set by way. From the way `oldest` on, cyclically, they are in the order that the consumer
   knows; empty ways come first. */
struct pt_set {
   pt_u64 page[PT_WAYS], stamp[PT_WAYS];
   pt_u64 reported[PT_WAYS]; /* the stamp of the last record or touch of the page */
   pt_u64 address[PT_WAYS];  /* the address in that record */
   pt_u32 oldest;
   pt_u32 unslotted; /* pages in no slot */
};

struct pt_table {
   struct pt_set sets[PT_SETS];
   struct pt_slot slots[PT_SLOTS];
};

/* The tables of a thread, for one side. */
struct pt_tables {
   struct pt_table small, large;
};

static inline pt_u32 pt_set_count(const struct pt_filter *filter)
{
   return filter->ways ? filter->index_mask + 1 : 0;
}

static inline void pt_forget_sets(const struct pt_filter *filter, struct pt_set *sets)
{
   pt_u32 i, way;
   for (i = 0; i < pt_set_count(filter); i++) {
      sets[i].oldest = sets[i].unslotted = 0;
      for (way = 0; way < filter->ways; way++)
         sets[i].page[way] = PT_NO_PAGE;
   }
}

/* Empties a table of unknown content. */
static inline void pt_clear_table(const struct pt_filter *filter, struct pt_table *table)
{
   pt_u32 i;
   for (i = 0; filter->ways && i < PT_SLOTS; i++)
      table->slots[i].page = PT_NO_PAGE;
   pt_forget_sets(filter, table->sets);
}

static inline void pt_clear(const struct pt_side *side, struct pt_tables *tables)
{
   pt_clear_table(&side->small, &tables->small);
   pt_clear_table(&side->large, &tables->large);
}

static inline pt_u64 pt_page(const struct pt_filter *filter, pt_u64 address)
{
   return address >> filter->page_shift << filter->page_shift;
}

static inline struct pt_slot *pt_slot(const struct pt_filter *filter, struct pt_table *table,
                                      pt_u64 address)
{
   return &table->slots[(address >> filter->page_shift) % PT_SLOTS];
}

static inline struct pt_set *pt_set(const struct pt_filter *filter, struct pt_table *table,
                                    pt_u64 address)
{
   return &table->sets[(address >> filter->index_shift) & filter->index_mask];
}

/* Returns the way after another one in the order of a set. */
static inline pt_u32 pt_after(const struct pt_filter *filter, pt_u32 way)
{
   return way + 1 == filter->ways ? 0 : way + 1;
}

/* Returns the way of a page, or the number of ways if it is absent. */
static inline pt_u32 pt_find(const struct pt_filter *filter, const struct pt_set *set, pt_u64 page)
{
   pt_u32 way = 0;
   while (way < filter->ways && set->page[way] != page)
      way++;
   return way;
}

/* Returns the time of the last use of a way's page. */
static inline pt_u64 pt_used(const struct pt_filter *filter, struct pt_table *table,
                             struct pt_set *set, pt_u32 way)
{
   struct pt_slot *slot = pt_slot(filter, table, set->page[way]);
   if (slot->page == set->page[way])
      set->stamp[way] = slot->stamp;
   return set->stamp[way];
}

/* Compares two ways with current stamps. Two parts of one access have the same stamp: the upper page comes
   last. */
static inline int pt_is_before(const struct pt_set *set, pt_u32 a, pt_u32 b)
{
   long long since = set->stamp[a] - set->stamp[b];
   return since < 0 || (since == 0 && set->page[a] < set->page[b]);
}

/* Removes a page from its slot, and keeps its stamp in its set. */
static void pt_leave_slot(const struct pt_filter *filter, struct pt_table *table,
                                 struct pt_slot *slot)
{
   if (slot->page == PT_NO_PAGE)
      return;
   struct pt_set *set = pt_set(filter, table, slot->page);
   set->stamp[pt_find(filter, set, slot->page)] = slot->stamp;
   set->unslotted++;
   slot->page = PT_NO_PAGE;
}

/* Removes all pages from their slots. */
static inline void pt_leave_slots(const struct pt_filter *filter, struct pt_table *table)
{
   pt_u32 i, way;
   for (i = 0; i < pt_set_count(filter); i++)
      for (way = 0; way < filter->ways; way++)
         if (table->sets[i].page[way] != PT_NO_PAGE)
            pt_leave_slot(filter, table, pt_slot(filter, table, table->sets[i].page[way]));
}

static inline void pt_forget_table(const struct pt_filter *filter, struct pt_table *table)
{
   pt_leave_slots(filter, table);
   pt_forget_sets(filter, table->sets);
}

/* Empties a filter: an access to any page is written. */
static inline void pt_forget(const struct pt_side *side, struct pt_tables *tables)
{
   pt_forget_table(&side->small, &tables->small);
   pt_forget_table(&side->large, &tables->large);
}

/* The sets of a thread that is not running. */
struct pt_kept {
   struct pt_set small[PT_SETS], large[PT_SETS];
};

static inline void pt_copy_sets(const struct pt_filter *filter, struct pt_set *to,
                                const struct pt_set *from)
{
   pt_u32 i;
   for (i = 0; i < pt_set_count(filter); i++)
      to[i] = from[i];
}

/* Saves the sets of a thread. Leaves the tables with empty slots. */
static inline void pt_keep(const struct pt_side *side, struct pt_kept *kept,
                           struct pt_tables *tables)
{
   pt_leave_slots(&side->small, &tables->small);
   pt_leave_slots(&side->large, &tables->large);
   pt_copy_sets(&side->small, kept->small, tables->small.sets);
   pt_copy_sets(&side->large, kept->large, tables->large.sets);
}

/* Restores the sets of a thread. The tables must have empty slots. */
static inline void pt_resume(const struct pt_side *side, struct pt_tables *tables,
                             const struct pt_kept *kept)
{
   pt_copy_sets(&side->small, tables->small.sets, kept->small);
   pt_copy_sets(&side->large, tables->large.sets, kept->large);
}

static inline void pt_forget_kept(const struct pt_side *side, struct pt_kept *kept)
{
   pt_forget_sets(&side->small, kept->small);
   pt_forget_sets(&side->large, kept->large);
}

/* Writes the order of a set. Pages that the consumer knows in this order, from the oldest one on, stay; it
   writes touches for the others. */
static __attribute__((noinline)) void pt_tell_order(struct pt_writer *w, const struct pt_filter *filter,
                          struct pt_table *table, struct pt_set *set, pt_u32 which)
{
   struct {
      pt_u64 page, stamp, address;
      pt_u32 known; /* its place in the order that the consumer knows */
   } ordered[PT_WAYS];
   pt_u32 count = 0, empty, i, nth, way = set->oldest, order[PT_WAYS], known[PT_WAYS];
   int touches = 0;
   for (nth = 0; nth < filter->ways; nth++, way = pt_after(filter, way)) {
      if (set->page[way] == PT_NO_PAGE)
         continue;
      known[way] = nth;
      pt_used(filter, table, set, way);
      for (i = count++; i > 0 && pt_is_before(set, way, order[i - 1]); i--)
         order[i] = order[i - 1];
      order[i] = way;
   }
   for (i = 0; i < count; i++) {
      way = order[i];
      ordered[i].page = set->page[way];
      ordered[i].stamp = set->stamp[way];
      ordered[i].address = set->address[way];
      ordered[i].known = known[way];
   }
   empty = filter->ways - count;
   set->oldest = 0;
   for (i = 0; i < empty; i++)
      set->page[i] = PT_NO_PAGE;
   for (i = 0; i < count; i++) {
      set->page[empty + i] = ordered[i].page;
      set->stamp[empty + i] = set->reported[empty + i] = ordered[i].stamp;
      set->address[empty + i] = ordered[i].address;
      touches |= i > 0 && ordered[i].known < ordered[i - 1].known;
      if (touches)
         pt_write(w, pt_what(PT_TOUCH, w->thread, ordered[i].address), which);
   }
}

/* Returns 1 if the way that was written longest ago is also the least recently used. */
static inline int pt_is_reported_in_order(const struct pt_filter *filter, struct pt_table *table,
                                      struct pt_set *set)
{
   pt_u32 way;
   for (way = 0; way < filter->ways; way++) {
      pt_used(filter, table, set, way);
      if (pt_is_before(set, way, set->oldest))
         return 0;
   }
   return 1;
}

/* Evicts the least recently used page from a full set, and from its slot. */
static inline void pt_leave(struct pt_writer *w, const struct pt_filter *filter,
                            struct pt_table *table, struct pt_set *set, pt_u32 which)
{
   if (pt_used(filter, table, set, set->oldest) != set->reported[set->oldest] &&
       !pt_is_reported_in_order(filter, table, set))
      pt_tell_order(w, filter, table, set, which);
   struct pt_slot *slot = pt_slot(filter, table, set->page[set->oldest]);
   if (slot->page == set->page[set->oldest])
      slot->page = PT_NO_PAGE;
   else
      set->unslotted--;
}

/* Returns 1 if the filter holds the page of an address, and stamps it. */
static inline int pt_holds(const struct pt_filter *filter, struct pt_table *table, pt_u64 address,
                           pt_u64 stamp)
{
   struct pt_slot *slot = pt_slot(filter, table, address);
   pt_u64 page = pt_page(filter, address);
   if (slot->page != page) {
      struct pt_set *set = pt_set(filter, table, address);
      if (set->unslotted == 0 || pt_find(filter, set, page) == filter->ways)
         return 0;
      pt_leave_slot(filter, table, slot);
      set->unslotted--;
      slot->page = page;
   }
   slot->stamp = stamp;
   return 1;
}

/* Makes a page of a set its newest; the caller is about to write it. */
static void pt_renew(const struct pt_filter *filter, struct pt_table *table, pt_u64 address,
                     pt_u64 stamp)
{
   struct pt_set *set = pt_set(filter, table, address);
   pt_u64 page = pt_page(filter, address);
   pt_u32 next, way = pt_find(filter, set, page);
   for (; (next = pt_after(filter, way)) != set->oldest; way = next) {
      set->page[way] = set->page[next];
      set->stamp[way] = set->stamp[next];
      set->reported[way] = set->reported[next];
      set->address[way] = set->address[next];
   }
   set->page[way] = page;
   set->stamp[way] = set->reported[way] = stamp;
   set->address[way] = address;
}

/* Inserts a page that is not in its set, as its newest. */
static inline __attribute__((always_inline)) void
pt_enter(struct pt_writer *w, const struct pt_filter *filter, struct pt_table *table,
         pt_u64 address, pt_u64 stamp, pt_u32 which)
{
   struct pt_set *set = pt_set(filter, table, address);
   struct pt_slot *slot = pt_slot(filter, table, address);
   pt_u64 page = pt_page(filter, address);
   if (set->page[set->oldest] != PT_NO_PAGE)
      pt_leave(w, filter, table, set, which);
   if (slot->page != PT_NO_PAGE)
      pt_leave_slot(filter, table, slot);
   *slot = (struct pt_slot){page, stamp};
   pt_u32 way = set->oldest;
   set->oldest = pt_after(filter, way);
   set->page[way] = page;
   set->stamp[way] = set->reported[way] = stamp;
   set->address[way] = address;
}

/* Processes one page of an access, with two filters. */
static void pt_use_both(struct pt_writer *w, const struct pt_side *side, struct pt_tables *tables,
                        pt_u32 kind, pt_u64 address, pt_u64 instruction, pt_u64 stamp)
{
   pt_u32 code = kind == PT_FETCH ? PT_CODE : 0;
   int small = pt_holds(&side->small, &tables->small, address, stamp);
   int large = pt_holds(&side->large, &tables->large, address, stamp);
   if (small && large)
      return;
   if (small)
      pt_renew(&side->small, &tables->small, address, stamp);
   else
      pt_enter(w, &side->small, &tables->small, address, stamp, code | PT_SMALL);
   if (large)
      pt_renew(&side->large, &tables->large, address, stamp);
   else
      pt_enter(w, &side->large, &tables->large, address, stamp, code | PT_LARGE);
   pt_write(w, pt_what(kind, w->thread, address), instruction);
}

/* Processes one page of an access. */
static void pt_use(struct pt_writer *w, const struct pt_side *side, struct pt_tables *tables,
                   pt_u32 kind, pt_u64 address, pt_u64 instruction, pt_u64 stamp)
{
   if (side->large.ways) {
      pt_use_both(w, side, tables, kind, address, instruction, stamp);
      return;
   }
   if (pt_holds(&side->small, &tables->small, address, stamp))
      return;
   pt_enter(w, &side->small, &tables->small, address, stamp,
            (kind == PT_FETCH ? PT_CODE : 0) | PT_ALL);
   pt_write(w, pt_what(kind, w->thread, address), instruction);
}

/* Processes one access, on one page or on two. Stamps must not decrease. */
static inline void pt_access(struct pt_writer *w, const struct pt_side *side,
                             struct pt_tables *tables, pt_u32 kind, pt_u64 address, pt_u32 size,
                             pt_u64 instruction, pt_u64 stamp)
{
   pt_u64 last = address + size - 1;
   struct pt_slot *slot = pt_slot(&side->small, &tables->small, address);
   if (!(((slot->page ^ address) | (last ^ address)) >> side->small.page_shift) &&
       !side->large.ways) {
      slot->stamp = stamp;
      return;
   }
   pt_use(w, side, tables, kind, address, instruction, stamp);
   if ((address ^ last) >> side->small.page_shift)
      pt_use(w, side, tables, kind, last >> side->small.page_shift << side->small.page_shift,
             instruction, stamp);
}

/* Writes the order of all sets, before the filter forgets them or stamps wrap. */
static void pt_tell_table(struct pt_writer *w, const struct pt_filter *filter,
                          struct pt_table *table, pt_u32 which)
{
   pt_u32 i;
   for (i = 0; i < pt_set_count(filter); i++)
      pt_tell_order(w, filter, table, &table->sets[i], which);
}

static void pt_tell(struct pt_writer *w, const struct pt_side *side, struct pt_tables *tables,
                    pt_u32 code)
{
   pt_tell_table(w, &side->small, &tables->small,
                 code | (side->large.ways ? PT_SMALL : PT_ALL));
   pt_tell_table(w, &side->large, &tables->large, code | PT_LARGE);
}

#endif
