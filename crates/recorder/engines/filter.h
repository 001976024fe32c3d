/* The page filter: which accesses an engine drops, and what it writes instead.

   Purpose: an engine sees every access of a program and passes on only those that may change what a
   TLB holds. Of each set it knows the pages used last, as many as every TLB that is fed has ways: an
   access to one of them is a hit, and changes no more than their order. The order matters when the
   next page comes into the set; then those pages whose order has changed are written first, as
   touches, and dropping the rest has changed no count. Why this is exact, and how filters are chosen,
   is told in src/filter.rs, whose tests have the same filter once more.

   Pages are found in a direct-mapped table of slots, with the time of their last use, so that
   instrumented code needs a load, a comparison and a store for an access. What is in no slot is looked
   for in its set, here. Invariant: what stands in a slot stands in its set; of what stands in both, the
   slot has the newer stamp.

   SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGETAX_FILTER_H
#define PAGETAX_FILTER_H

#include "stream.h"

#define PT_SLOTS 256
#define PT_NO_PAGE (1ULL << 63)

/* A page's first address, and when it was used last: by a clock of the engine's that may wrap. */
struct pt_slot {
   pt_u64 page, stamp;
};

/* The same in a set, with the address that was written last of it. */
struct pt_way {
   pt_u64 page, stamp, address;
};

struct pt_table {
   struct pt_slot slots[PT_SLOTS];
   /* In the order that the consumer knows, newest first. */
   struct pt_way sets[PT_SETS][PT_WAYS];
};

/* Of a thread, for one side. */
struct pt_tables {
   struct pt_table small, large;
};

static inline void pt_forget_table(const struct pt_filter *filter, struct pt_table *table)
{
   pt_u32 i, way;
   if (!filter->ways)
      return;
   for (i = 0; i < PT_SLOTS; i++)
      table->slots[i] = (struct pt_slot){PT_NO_PAGE, 0};
   for (i = 0; i <= filter->index_mask; i++)
      for (way = 0; way < filter->ways; way++)
         table->sets[i][way] = (struct pt_way){PT_NO_PAGE, 0, 0};
}

static inline void pt_forget(const struct pt_side *side, struct pt_tables *tables)
{
   pt_forget_table(&side->small, &tables->small);
   pt_forget_table(&side->large, &tables->large);
}

static inline struct pt_slot *pt_slot(const struct pt_filter *filter, struct pt_table *table,
                                      pt_u64 address)
{
   return &table->slots[(address >> filter->page_shift) % PT_SLOTS];
}

static inline struct pt_way *pt_set(const struct pt_filter *filter, struct pt_table *table,
                                    pt_u64 address)
{
   return table->sets[(address >> filter->index_shift) & filter->index_mask];
}

/* Whether a was used after b. Two parts of one access have one stamp: the upper page comes last. */
static inline int pt_is_newer(struct pt_way a, struct pt_way b)
{
   return a.stamp == b.stamp ? a.page > b.page : (long long)(a.stamp - b.stamp) > 0;
}

/* Tells the consumer the order of a set, where it has changed. */
static void pt_tell_order(struct pt_writer *w, const struct pt_filter *filter,
                          struct pt_table *table, struct pt_way *set, pt_u32 which)
{
   struct pt_way known[PT_WAYS];
   int count, i, place, changed = 0;
   for (count = 0; count < (int)filter->ways && set[count].page != PT_NO_PAGE; count++) {
      struct pt_slot *slot = pt_slot(filter, table, set[count].page);
      if (slot->page == set[count].page)
         set[count].stamp = slot->stamp;
      known[count] = set[count];
      changed |= count && pt_is_newer(set[count], set[count - 1]);
   }
   if (!changed)
      return;
   for (i = 1; i < count; i++) {
      struct pt_way moved = set[i];
      for (place = i; place > 0 && pt_is_newer(moved, set[place - 1]); place--)
         set[place] = set[place - 1];
      set[place] = moved;
   }
   /* The oldest ones that the consumer knows in this order stay; the others are used once more. */
   for (i = place = count - 1; i >= 0; i--, place--) {
      while (place >= 0 && known[place].page != set[i].page)
         place--;
      if (place < 0)
         break;
   }
   for (; i >= 0; i--)
      pt_write(w, pt_what(PT_TOUCH, w->thread, set[i].address), which);
}

/* The page in a slot makes room, and keeps its stamp in its set. */
static inline void pt_leave_slot(const struct pt_filter *filter, struct pt_table *table,
                                 struct pt_slot *slot)
{
   if (slot->page == PT_NO_PAGE)
      return;
   struct pt_way *way = pt_set(filter, table, slot->page);
   while (way->page != slot->page)
      way++;
   way->stamp = slot->stamp;
   slot->page = PT_NO_PAGE;
}

/* Whether the filter holds the page of an address, which is used now. */
static inline int pt_holds(const struct pt_filter *filter, struct pt_table *table, pt_u64 address,
                           pt_u64 stamp)
{
   struct pt_slot *slot = pt_slot(filter, table, address);
   pt_u64 page = address >> filter->page_shift << filter->page_shift;
   if (slot->page != page) {
      struct pt_way *set = pt_set(filter, table, address);
      pt_u32 way;
      for (way = 0; way < filter->ways && set[way].page != page; way++) {
      }
      if (way == filter->ways)
         return 0;
      pt_leave_slot(filter, table, slot);
      slot->page = page;
   }
   slot->stamp = stamp;
   return 1;
}

/* A page is about to be written as used: it becomes the newest of its set. */
static void pt_enter(struct pt_writer *w, const struct pt_filter *filter, struct pt_table *table,
                     pt_u64 address, pt_u64 stamp, int held, pt_u32 which)
{
   pt_u64 page = address >> filter->page_shift << filter->page_shift;
   struct pt_way *set = pt_set(filter, table, address);
   pt_u32 way = filter->ways - 1;
   if (held) {
      for (way = 0; set[way].page != page; way++) {
      }
   } else {
      pt_tell_order(w, filter, table, set, which);
      struct pt_slot *leaves = pt_slot(filter, table, set[way].page);
      if (leaves->page == set[way].page)
         leaves->page = PT_NO_PAGE;
   }
   for (; way > 0; way--)
      set[way] = set[way - 1];
   set[0] = (struct pt_way){page, stamp, address};
   if (!held)
      pt_holds(filter, table, address, stamp);
}

/* One page of an access. */
static void pt_use(struct pt_writer *w, const struct pt_side *side, struct pt_tables *tables,
                   pt_u32 kind, pt_u64 address, pt_u64 instruction, pt_u64 stamp)
{
   pt_u32 code = kind == PT_FETCH ? PT_CODE : 0;
   int small = pt_holds(&side->small, &tables->small, address, stamp), large = 1;
   if (side->large.ways)
      large = pt_holds(&side->large, &tables->large, address, stamp);
   if (small && large)
      return;
   pt_enter(w, &side->small, &tables->small, address, stamp, small,
            code | (side->large.ways ? PT_SMALL : PT_ALL));
   if (side->large.ways)
      pt_enter(w, &side->large, &tables->large, address, stamp, large, code | PT_LARGE);
   pt_write(w, pt_what(kind, w->thread, address), instruction);
}

/* One access, by its first byte and its size: on one page or on two. Stamps must not decrease. */
static inline void pt_access(struct pt_writer *w, const struct pt_side *side,
                             struct pt_tables *tables, pt_u32 kind, pt_u64 address, pt_u32 size,
                             pt_u64 instruction, pt_u64 stamp)
{
   pt_u64 last = address + size - 1;
   pt_use(w, side, tables, kind, address, instruction, stamp);
   if ((address ^ last) >> side->small.page_shift)
      pt_use(w, side, tables, kind, last >> side->small.page_shift << side->small.page_shift,
             instruction, stamp);
}

/* Tells the order of all sets, before the filter forgets them or stamps wrap. */
static void pt_tell_table(struct pt_writer *w, const struct pt_filter *filter,
                          struct pt_table *table, pt_u32 which)
{
   pt_u32 i;
   for (i = 0; filter->ways && i <= filter->index_mask; i++)
      pt_tell_order(w, filter, table, table->sets[i], which);
}

static void pt_tell(struct pt_writer *w, const struct pt_side *side, struct pt_tables *tables,
                    pt_u32 code)
{
   pt_tell_table(w, &side->small, &tables->small,
                 code | (side->large.ways ? PT_SMALL : PT_ALL));
   pt_tell_table(w, &side->large, &tables->large, code | PT_LARGE);
}

#endif
