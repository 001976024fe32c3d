/* The slow path of instrumented code: passes each access of a group to the page filter (../filter.h).
   Part of the translation unit of pagetax.c.

   This file: Copyright the pagetax authors. SPDX-License-Identifier: GPL-2.0-or-later OR MIT OR
   Apache-2.0. Linked with Valgrind's core, which is GPL-2.0-or-later: see NOTICE. */

#define GROUP 8     /* the most runs of a group */
#define UNKNOWN 5   /* the most runs whose address is an argument: a helper takes six arguments */
#define ACCESSES 24 /* the most accesses of a group */
#define SPAN 64     /* the most bytes of a run whose page is unknown */

typedef struct {
   UShort tick; /* the access's stamp is the clock plus this, by its side */
   UShort offset, size;
   UChar run, kind;
} Access;

/* Accesses near each other that share a test and a stamp. */
typedef struct {
   Bool fetch;
   UShort beyond; /* the distance from its first byte to its last */
   UShort tick;   /* the tick of its last access */
   Addr lowest;   /* its first byte, if that is known */
} Extent;

/* The accesses of a group in their order; lives as long as the tool. */
typedef struct {
   UInt count, run_count;
   const Addr *instructions; /* of each access */
   Extent runs[GROUP]; /* those whose address comes as an argument first, in the order of arguments */
   Access accesses[];
} Group;

/* Returns a tick as a clock value: of data accesses, or of instructions, because there may be no data
   access between two fetches. */
static ULong clock_of(Bool fetch, UInt tick) { return fetch ? (ULong)tick << 32 : tick; }

/* Slots whose stamps the code is about to overwrite with wrong ones: those of a group with a run that
   crosses the end of its page. In other groups, pages that share a slot are stamped in the order in which
   they entered it. */
static struct {
   struct pt_slot *slot;
   ULong right, wrong;
} misled[2 * GROUP];
static UInt misled_count;

static inline void expect_wrong_stamp(const struct pt_filter *filter, struct pt_table *table, Addr lowest,
                               const Extent *run)
{
   if (filter->ways < 2)
      return;
   struct pt_slot *slot = pt_slot(filter, table, lowest);
   if (((slot->page ^ lowest) | ((lowest + run->beyond) ^ lowest)) >> filter->page_shift) {
      misled[misled_count].slot = slot;
      misled[misled_count].right = slot->stamp;
      misled[misled_count++].wrong = counted + clock_of(run->fetch, run->tick);
   }
}

static __attribute__((noinline)) void expect_wrong_stamps(const Group *group, const Addr *lowest)
{
   UInt i;
   for (i = 0; i < group->run_count; i++) {
      const Extent *run = &group->runs[i];
      const struct pt_side *side = run->fetch ? &code_side : &data_side;
      struct pt_tables *tables = run->fetch ? &code_tables : &data_tables;
      expect_wrong_stamp(&side->small, &tables->small, lowest[i], run);
      expect_wrong_stamp(&side->large, &tables->large, lowest[i], run);
   }
}

/* Corrects the stamps, before anything reads them. A slot that was stamped again since then is right. */
static void correct_stamps(void)
{
   while (misled_count > 0) {
      misled_count--;
      if (misled[misled_count].slot->stamp == misled[misled_count].wrong)
         misled[misled_count].slot->stamp = misled[misled_count].right;
   }
}

/* Processes a group. It is short, because instructions between two cache misses keep them from
   overlapping. */
static inline __attribute__((always_inline)) void process(const Group *group, const Addr *arguments,
                                                          UInt count)
{
   Addr lowest[GROUP], over = 0;
   UInt i;
   /* The data of a page that was not used recently is probably in no cache. */
   for (i = 0; i < count; i++) {
      lowest[i] = arguments[i];
      __builtin_prefetch((const void *)lowest[i]);
      over |= (lowest[i] + group->runs[i].beyond) ^ lowest[i];
   }
   if (!recording)
      return;
   if (misled_count)
      correct_stamps();
   for (; i < group->run_count; i++) {
      lowest[i] = group->runs[i].lowest;
      over |= (lowest[i] + group->runs[i].beyond) ^ lowest[i];
   }
   for (i = 0; i < group->count; i++) {
      const Access *access = &group->accesses[i];
      Addr address = lowest[access->run] + access->offset;
      ULong stamp = counted + clock_of(access->kind == PT_FETCH, access->tick);
      if (access->kind == PT_FETCH)
         pt_access(&writer, &code_side, &code_tables, PT_FETCH, address, 1, address, stamp);
      else
         pt_access(&writer, &data_side, &data_tables, access->kind, address, access->size,
                   group->instructions[i], stamp);
      if (tells_zeros && access->kind != PT_FETCH)
         use_for_zeros(address, access->size);
   }
   if (over >> data_side.small.page_shift)
      expect_wrong_stamps(group, lowest);
}

static void group0(const Group *g) { process(g, NULL, 0); }
static void group1(const Group *g, Addr a) { process(g, (Addr[]){a}, 1); }
static void group2(const Group *g, Addr a, Addr b) { process(g, (Addr[]){a, b}, 2); }
static void group3(const Group *g, Addr a, Addr b, Addr c) { process(g, (Addr[]){a, b, c}, 3); }

static void group4(const Group *g, Addr a, Addr b, Addr c, Addr d)
{
   process(g, (Addr[]){a, b, c, d}, 4);
}

static void group5(const Group *g, Addr a, Addr b, Addr c, Addr d, Addr e)
{
   process(g, (Addr[]){a, b, c, d, e}, 5);
}

static const struct {
   const HChar *name;
   void *function;
} group_calls[UNKNOWN + 1] = {{"group0", &group0}, {"group1", &group1}, {"group2", &group2},
                              {"group3", &group3}, {"group4", &group4}, {"group5", &group5}};
