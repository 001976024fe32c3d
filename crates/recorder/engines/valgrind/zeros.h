/* Tells which pages are all zeros while the program does not use them. A pager drops such pages instead of storing
   them. Part of the translation unit of pagetax.c.

   A direct-mapped table has the pages used last. A page that another one displaces waits in a queue before it is
   read: the accesses of a group come here before the program has made them. If it was used meanwhile, it is in the
   table again. Limit: a thread may go on with the page that it used last, without coming here, after another thread
   had its turn.

   This file: Copyright the pagetax authors. SPDX-License-Identifier: GPL-2.0-or-later OR MIT OR
   Apache-2.0. Linked with Valgrind's core, which is GPL-2.0-or-later: see NOTICE. */

#define LAST_USED 256 /* as many pages as the smallest memory of `pagetax remote` */
#define QUEUED 32     /* more than the accesses of a group */

static Bool tells_zeros = False;
static Addr last_used[LAST_USED], displaced[QUEUED];
static UInt displaced_count;

static Bool is_zeros(Addr page)
{
   const NSegment *segment = VG_(am_find_nsegment)(page);
   const ULong *words = (const ULong *)page;
   UInt i;
   if (!segment || segment->kind != SkAnonC || !segment->hasR)
      return False;
   for (i = 0; i < PT_PAGE / sizeof(ULong); i++)
      if (words[i])
         return False;
   return True;
}

static __attribute__((noinline)) void displace(Addr page)
{
   Addr *queued = &displaced[displaced_count++ % QUEUED];
   if (*queued && last_used[*queued / PT_PAGE % LAST_USED] != *queued && is_zeros(*queued))
      pt_write(&writer, pt_what(PT_USE, writer.thread, *queued), PT_PAGE | (ULong)PT_ZEROS << 56);
   *queued = page;
}

static inline void use_page(Addr address)
{
   Addr page = address / PT_PAGE * PT_PAGE;
   Addr *slot = &last_used[page / PT_PAGE % LAST_USED];
   if (*slot == page)
      return;
   if (*slot)
      displace(*slot);
   *slot = page;
}

/* Notes an access. */
static inline void use_for_zeros(Addr address, SizeT size)
{
   use_page(address);
   if ((address ^ (address + size - 1)) / PT_PAGE)
      use_page(address + size - 1);
}
