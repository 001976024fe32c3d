/* A Valgrind tool: writes the page changes of a program into a ring (../stream.h).

   What makes it fast: the page filter (../filter.h) is tested in the instrumented code itself, for
   several accesses at once, and only a page that is in no slot calls C. Accesses in a row that differ
   by a constant share a test. Valgrind runs one thread at a time, so that the filter is a plain static
   table; each thread's own is swapped in when it gets its turn.
   Invariant: a group of accesses is tested before any of it is stamped. If all pages stand in their
   slots, stamping them is all that is to be done; if not, C does the group access by access. Then the
   code stamps the first page of each run with the time of the run's last access, the oldest first, which C
   has done as well; where it has not, as the run goes over the end of its page, C remembers the stamp.
   All of that comes before the program's own access of the group's last run, so that its data, asked for
   by C, is on its way: else nothing overlaps with a miss, as what C does fills the processor's window.

   This file: Copyright the pagetax authors. SPDX-License-Identifier: GPL-2.0-or-later OR MIT OR
   Apache-2.0. Linked with Valgrind's core, which is GPL-2.0-or-later: see NOTICE. */

#include "pub_tool_basics.h"
#include "pub_tool_vki.h"
#include "pub_tool_vkiscnums.h"
#include "pub_tool_aspacemgr.h"
#include "pub_tool_libcassert.h"
#include "pub_tool_libcbase.h"
#include "pub_tool_libcfile.h"
#include "pub_tool_libcprint.h"
#include "pub_tool_libcproc.h"
#include "pub_tool_machine.h"
#include "pub_tool_mallocfree.h"
#include "pub_tool_options.h"
#include "pub_tool_threadstate.h"
#include "pub_tool_tooliface.h"

#include "../filter.h"

/* Of the core, but in no header for tools. */
extern SysRes vgPlain_am_shared_mmap_file_float_valgrind(SizeT length, UInt prot, Int fd,
                                                         Off64T offset);
/* What tools may call instead takes no calls from a system call's wrapper, where munmap's calls this. */
extern void vgPlain_discard_translations(Addr start, ULong range, const HChar *who);
extern SysRes vgPlain_do_syscall(UWord number, RegWord, RegWord, RegWord, RegWord, RegWord,
                                 RegWord, RegWord, RegWord);

static const HChar *stream_path = NULL;
static struct pt_header *header = NULL;
static struct pt_writer writer;
static struct pt_side data_side, code_side;

/* Of the running thread. In the tool's own data, below 2^31, so that code reaches them directly. */
static struct pt_tables data_tables, code_tables;
/* Data accesses (low half) and instructions (high half), of all threads: the clock of stamps. */
static ULong counted;
/* As it was at the last PT_COUNTS, and when no stamp was older. */
static ULong counted_before, stamped_since;

/* All bits while accesses are recorded, else none: instrumented code calls C only where a test of its
   has bits in common with it. Its stamps go on, and mean nothing. */
static ULong recording = ~0ULL;
/* Of a sampled recording: its phase, and when that ends, in blocks run by all threads. */
static UInt phase = PT_COUNTED;
static ULong phase_ends;
static ULong luck = 88172645463325252ULL;

/* Of the other threads, by number; made when a thread gets its first turn. */
typedef struct {
   struct pt_kept data, code;
} Kept;
static Kept **threads = NULL;
static ThreadId running = VG_INVALID_THREADID;

static void pt_pause(pt_u32 nth)
{
   if (nth < 64) {
      __builtin_ia32_pause();
   } else if (nth < 256) {
      vgPlain_do_syscall(__NR_sched_yield, 0, 0, 0, 0, 0, 0, 0, 0);
   } else {
      struct vki_timespec time = {0, 100000};
      vgPlain_do_syscall(__NR_nanosleep, (RegWord)&time, 0, 0, 0, 0, 0, 0, 0);
   }
}

static int pt_alive(pt_u32 pid)
{
   SysRes r = vgPlain_do_syscall(__NR_kill, pid, 0, 0, 0, 0, 0, 0, 0);
   return !sr_isError(r) || sr_Err(r) == VKI_EPERM;
}

/* ---- what instrumented code calls ---- */

#define GROUP 8     /* runs in a group at most */
#define UNKNOWN 5   /* of them, such whose address comes as an argument: a helper takes six */
#define ACCESSES 24 /* in a group at most */
#define SPAN 64     /* bytes of a run at most, where its page is not known */

typedef struct {
   UShort tick; /* added to the clock, by its side: its stamp */
   UShort offset, size;
   UChar run, kind;
} Access;

/* Accesses near each other, which share a test and a stamp. */
typedef struct {
   Bool fetch;
   UShort beyond; /* from its first byte to its last */
   UShort tick;   /* of its last access */
   Addr lowest;   /* if it is known */
} Extent;

/* The accesses of a group in their order; lives as long as the tool. */
typedef struct {
   UInt count, run_count;
   const Addr *instructions; /* of each access */
   Extent runs[GROUP]; /* those whose address comes as an argument first, in the order of arguments */
   Access accesses[];
} Group;

/* A tick on the clock: of data accesses, or of instructions, as there may be no data access between two
   fetches. */
static ULong clock_of(Bool fetch, UInt tick) { return fetch ? (ULong)tick << 32 : tick; }

/* Slots whose stamps are about to be overwritten by code although that is not so: of a group with a run
   that goes over the end of its page. Of other groups, pages that share a slot are stamped in the order in
   which they came into it. */
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

/* Comes before anybody looks at stamps. A slot that was stamped again since then is right. */
static void set_stamps_right(void)
{
   while (misled_count > 0) {
      misled_count--;
      if (misled[misled_count].slot->stamp == misled[misled_count].wrong)
         misled[misled_count].slot->stamp = misled[misled_count].right;
   }
}

/* Short, as instructions between two misses of the processor's caches keep these from overlapping. */
static inline __attribute__((always_inline)) void process(const Group *group, const Addr *arguments,
                                                          UInt count)
{
   Addr lowest[GROUP], over = 0;
   UInt i;
   /* A page that was not used lately has its data far away. */
   for (i = 0; i < count; i++) {
      lowest[i] = arguments[i];
      __builtin_prefetch((const void *)lowest[i]);
      over |= (lowest[i] + group->runs[i].beyond) ^ lowest[i];
   }
   if (!recording)
      return;
   if (misled_count)
      set_stamps_right();
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

/* ---- instrumentation ---- */

/* A temporary of the program as another one and a constant; constants have no other one. */
typedef struct {
   IRTemp root;
   Long offset;
   Addr now; /* what it is while the block is translated; 0: not known */
} Place;

/* Accesses near each other. */
typedef struct {
   Bool fetch;
   IRTemp root;
   Long low, high; /* offsets of its first byte and behind its last */
   IRExpr *lowest; /* the address at low */
   UInt tick;      /* of its last access */
} Run;

/* A block under construction. */
typedef struct {
   IRSB *out;
   Place *places; /* by temporary */
   UInt run_count, unknown_count, access_count;
   Run runs[GROUP];
   Access accesses[ACCESSES];
   Long offsets[ACCESSES];
   Addr where[ACCESSES]; /* the instruction of each */
   ThreadId thread;
   IRExpr *began;            /* the clock when the block began */
   ULong added;              /* to the clock since then */
   UInt instructions, ticks; /* and what is not yet added: instructions and accesses */
   Addr instruction;
   Addr code_page; /* of the fetch tested last; 1: none */
   Int known_at;   /* the statement before which all addresses of the group are known */
} Block;

#define SLOT_SHIFT 4 /* log2 of sizeof(struct pt_slot) */

static IRExpr *word(ULong value) { return IRExpr_Const(IRConst_U64(value)); }

static IRExpr *assign(IRSB *out, IRType type, IRExpr *value)
{
   IRTemp temp = newIRTemp(out->tyenv, type);
   addStmtToIRSB(out, IRStmt_WrTmp(temp, value));
   return IRExpr_RdTmp(temp);
}

static IRExpr *binop(IRSB *out, IROp op, IRExpr *a, IRExpr *b)
{
   return assign(out, Ity_I64, IRExpr_Binop(op, a, b));
}

static IRExpr *shift_right(IRSB *out, IRExpr *value, UInt by)
{
   return by == 0 ? value : binop(out, Iop_Shr64, value, IRExpr_Const(IRConst_U8(by)));
}

/* The slot of an address, as an offset into its table or, for a constant, its address. */
static IRExpr *slot_of(IRSB *out, const struct pt_filter *filter, struct pt_table *table,
                       IRExpr *address)
{
   if (address->tag == Iex_Const)
      return word((ULong)pt_slot(filter, table, address->Iex.Const.con->Ico.U64));
   IRExpr *scaled = shift_right(out, address, filter->page_shift - SLOT_SHIFT);
   return binop(out, Iop_And64, scaled, word((PT_SLOTS - 1) << SLOT_SHIFT));
}

/* The address of a part of a slot; an expression of its own at each use, to become part of it. */
static IRExpr *part_of(IRSB *out, IRExpr *slot, struct pt_table *table, UInt part)
{
   if (slot->tag == Iex_Const)
      return word(slot->Iex.Const.con->Ico.U64 + part);
   return binop(out, Iop_Add64, slot, word((ULong)table->slots + part));
}

/* What the address and the page in its slot differ in. */
static IRExpr *difference(IRSB *out, IRExpr *address, IRExpr *slot, struct pt_table *table)
{
   IRExpr *page = assign(out, Ity_I64,
                         IRExpr_Load(Iend_LE, Ity_I64,
                                     part_of(out, slot, table, offsetof(struct pt_slot, page))));
   return binop(out, Iop_Xor64, address, page);
}

static void stamp(IRSB *out, const struct pt_filter *filter, IRExpr *slot, struct pt_table *table,
                  IRExpr *time)
{
   if (filter->ways < 2)
      return; /* of one page there is no order */
   IRExpr *at = part_of(out, slot, table, offsetof(struct pt_slot, stamp));
   addStmtToIRSB(out, IRStmt_Store(Iend_LE, at, time));
}

static const struct pt_side *side_of(const Run *run)
{
   return run->fetch ? &code_side : &data_side;
}

static struct pt_tables *tables_of(const Run *run)
{
   return run->fetch ? &code_tables : &data_tables;
}

/* Bits from small.page_shift on are set if a page of the run is not in its slot. */
static IRExpr *test_of(IRSB *out, const Run *run, IRExpr *slots[2])
{
   const struct pt_side *side = side_of(run);
   struct pt_tables *tables = tables_of(run);
   IRExpr *address = run->lowest;
   UInt shift = side->small.page_shift;
   ULong beyond = run->high - run->low - 1;
   if (address->tag == Iex_Const) {
      ULong first = address->Iex.Const.con->Ico.U64;
      /* Where all is on one page the difference is none at all. */
      if (first >> shift == (first + beyond) >> shift) {
         address = word(first >> shift << shift);
         beyond = 0;
      }
   }
   slots[0] = slot_of(out, &side->small, &tables->small, address);
   IRExpr *test = difference(out, address, slots[0], &tables->small);
   if (beyond)
      test = binop(out, Iop_Add64, test, word(beyond));
   if (side->large.ways) {
      slots[1] = slot_of(out, &side->large, &tables->large, address);
      IRExpr *large = difference(out, address, slots[1], &tables->large);
      test = binop(out, Iop_Or64, test, shift_right(out, large, side->large.page_shift - shift));
   }
   return test;
}

/* Calls C for the group if the guard holds. */
static void call_group(Block *block, IRExpr *guard)
{
   UInt count = block->access_count;
   Group *group =
      VG_(malloc)("pagetax.group", sizeof(Group) + count * (sizeof(Access) + sizeof(Addr)));
   Addr *instructions = (Addr *)&group->accesses[count];
   IRExpr *a[UNKNOWN], **args, *descriptor = mkIRExpr_HWord((HWord)group);
   UInt i, to, unknown = 0, known = block->unknown_count, number[GROUP];
   group->count = count;
   group->instructions = instructions;
   group->run_count = block->run_count;
   for (i = 0; i < group->run_count; i++) {
      const Run *run = &block->runs[i];
      Bool is_known = run->lowest->tag == Iex_Const;
      to = number[i] = is_known ? known++ : unknown++;
      group->runs[to] = (Extent){.fetch = run->fetch,
                                 .beyond = run->high - run->low - 1,
                                 .tick = run->tick,
                                 .lowest = is_known ? run->lowest->Iex.Const.con->Ico.U64 : 0};
      if (!is_known)
         a[to] = run->lowest;
   }
   for (i = 0; i < count; i++) {
      UInt run = block->accesses[i].run;
      instructions[i] = block->where[i];
      group->accesses[i] = block->accesses[i];
      group->accesses[i].run = number[run];
      group->accesses[i].offset = block->offsets[i] - block->runs[run].low;
   }
   switch (unknown) {
   case 0: args = mkIRExprVec_1(descriptor); break;
   case 1: args = mkIRExprVec_2(descriptor, a[0]); break;
   case 2: args = mkIRExprVec_3(descriptor, a[0], a[1]); break;
   case 3: args = mkIRExprVec_4(descriptor, a[0], a[1], a[2]); break;
   case 4: args = mkIRExprVec_5(descriptor, a[0], a[1], a[2], a[3]); break;
   default: args = mkIRExprVec_6(descriptor, a[0], a[1], a[2], a[3], a[4]); break;
   }
   IRDirty *call = unsafeIRDirty_0_N(0, group_calls[unknown].name,
                                     VG_(fnptr_to_fnentry)(group_calls[unknown].function), args);
   call->guard = guard;
   addStmtToIRSB(block->out, IRStmt_Dirty(call));
   block->run_count = block->unknown_count = block->access_count = 0;
}

/* The clock, and a number on top of it. */
static IRExpr *time_of(Block *block, ULong sum)
{
   if (!block->began)
      block->began =
         assign(block->out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, word((ULong)&counted)));
   sum += block->added;
   return sum ? binop(block->out, Iop_Add64, block->began, word(sum)) : block->began;
}

static void reverse(IRStmt **first, IRStmt **end)
{
   for (; first < --end; first++) {
      IRStmt *other = *first;
      *first = *end;
      *end = other;
   }
}

/* The statements from `from` on come before those from `to` on. */
static void move_before(IRSB *out, Int to, Int from)
{
   reverse(out->stmts + to, out->stmts + from);
   reverse(out->stmts + from, out->stmts + out->stmts_used);
   reverse(out->stmts + to, out->stmts + out->stmts_used);
}

/* Two runs may be on one page: the one whose last access comes last must stamp it last. */
static void put_in_order(const Run *runs, UInt count, UInt *order)
{
   UInt i, to;
   for (i = 0; i < count; i++) {
      for (to = i; to > 0 && runs[order[to - 1]].tick > runs[i].tick; to--)
         order[to] = order[to - 1];
      order[to] = i;
   }
}

/* Ends the group: its test, the call, its stamps; all of them come as soon as the addresses are known. */
static void end_group(Block *block)
{
   IRSB *out = block->out;
   Int end = out->stmts_used;
   IRExpr *slots[GROUP][2], *test = NULL;
   UInt i, order[GROUP];
   if (block->run_count == 0)
      return;
   for (i = 0; i < block->run_count; i++) {
      IRExpr *one = test_of(out, &block->runs[i], slots[i]);
      test = test ? binop(out, Iop_Or64, test, one) : one;
   }
   if (header->sample)
      test = binop(out, Iop_And64, test,
                   assign(out, Ity_I64,
                          IRExpr_Load(Iend_LE, Ity_I64, word((ULong)&recording))));
   test = shift_right(out, test, data_side.small.page_shift);
   UInt count = block->run_count;
   call_group(block, assign(out, Ity_I1, IRExpr_Unop(Iop_CmpNEZ64, test)));
   put_in_order(block->runs, count, order);
   for (i = 0; i < count; i++) {
      const Run *run = &block->runs[order[i]];
      IRExpr *time = time_of(block, clock_of(run->fetch, run->tick));
      stamp(out, &side_of(run)->small, slots[order[i]][0], &tables_of(run)->small, time);
      stamp(out, &side_of(run)->large, slots[order[i]][1], &tables_of(run)->large, time);
   }
   move_before(out, block->known_at, end);
}

/* The root and the offset of an address. */
static Place place_of(const Block *block, const IRExpr *address)
{
   if (address->tag == Iex_Const)
      return (Place){.root = IRTemp_INVALID, .offset = address->Iex.Const.con->Ico.U64};
   return block->places[address->Iex.RdTmp.tmp];
}

/* Learns what a temporary is: another one and a constant, perhaps. */
static void note_place(Block *block, IRTemp temp, const IRExpr *value)
{
   if (value->tag == Iex_RdTmp)
      block->places[temp] = place_of(block, value);
   if (value->tag == Iex_Get && value->Iex.Get.ty == Ity_I64)
      VG_(get_shadow_regs_area)(block->thread, (UChar *)&block->places[temp].now, 0,
                                value->Iex.Get.offset, sizeof(Addr));
   if (value->tag != Iex_Binop || value->Iex.Binop.arg1->tag != Iex_RdTmp ||
       value->Iex.Binop.arg2->tag != Iex_Const)
      return;
   IROp op = value->Iex.Binop.op;
   if (op == Iop_Add64 || op == Iop_Sub64) {
      Long by = value->Iex.Binop.arg2->Iex.Const.con->Ico.U64;
      block->places[temp] = place_of(block, value->Iex.Binop.arg1);
      block->places[temp].offset += op == Iop_Add64 ? by : -by;
   }
}

/* Whether a run can grow by an access: it stays short, and on one page as far as can be told. */
static Bool fits(const Run *run, Bool fetch, Place place, UInt size)
{
   Long low = run->low < place.offset ? run->low : place.offset;
   Long high = place.offset + size > run->high ? place.offset + size : run->high;
   UInt shift = data_side.small.page_shift;
   if (run->fetch != fetch || run->root != place.root)
      return False;
   if (place.root != IRTemp_INVALID && (high - low > SPAN || !place.now))
      return high - low <= SPAN;
   return (place.now + low) >> shift == (place.now + high - 1) >> shift;
}

/* The run that an access belongs to; a new one takes its address. */
static Run *run_of(Block *block, Bool fetch, IRExpr *address, UInt size)
{
   Place place = place_of(block, address);
   Bool known = address->tag == Iex_Const;
   UInt i;
   for (i = 0; i < block->run_count; i++)
      if (fits(&block->runs[i], fetch, place, size))
         break;
   Run *run = &block->runs[i];
   if (i == block->run_count) {
      if (i == GROUP || (!known && block->unknown_count == UNKNOWN)) {
         end_group(block);
         run = &block->runs[0];
      }
      *run = (Run){fetch, place.root, place.offset, place.offset + size, address, 0};
      block->run_count++;
      block->unknown_count += !known;
      block->known_at = block->out->stmts_used;
   }
   if (place.offset < run->low) {
      run->low = place.offset;
      run->lowest = address;
      block->known_at = block->out->stmts_used;
   }
   if (place.offset + size > run->high)
      run->high = place.offset + size;
   return run;
}

/* Adds an access to the group; what its address is made of is known by now. */
static void add_access(Block *block, UInt kind, IRExpr *address, UInt size, UInt tick)
{
   if (block->access_count == ACCESSES)
      end_group(block);
   Run *run = run_of(block, kind == PT_FETCH, address, size);
   UInt nth = block->access_count++;
   run->tick = tick;
   block->offsets[nth] = place_of(block, address).offset;
   block->where[nth] =
      kind == PT_FETCH ? address->Iex.Const.con->Ico.U64 : block->instruction;
   block->accesses[nth] =
      (Access){.tick = tick, .size = size, .run = run - block->runs, .kind = kind};
}

static void add_data(Block *block, UInt kind, IRExpr *address, UInt size)
{
   add_access(block, kind, address, size, ++block->ticks);
}

static void add_fetch(Block *block, Addr address)
{
   add_access(block, PT_FETCH, word(address), 1, block->instructions - 1);
}

/* An access that happens only under a guard, and is too rare for a test in code. */
static void add_guarded(Block *block, UInt kind, IRExpr *address, UInt size, IRExpr *guard)
{
   end_group(block);
   add_data(block, kind, address, size);
   call_group(block, guard);
}

/* Adds what was counted so far to the clock: before each way out. */
static void add_counts(Block *block)
{
   ULong sum = (ULong)block->instructions << 32 | block->ticks;
   if (sum == 0)
      return;
   IRExpr *now = time_of(block, sum);
   addStmtToIRSB(block->out, IRStmt_Store(Iend_LE, word((ULong)&counted), now));
   block->added += sum;
   block->instructions = block->ticks = 0;
}

/* An instruction begins: its fetch, if it is on another page than the one before in this block, or on two. */
static void add_instruction(Block *block, Addr address, UInt length)
{
   UInt shift = code_side.small.page_shift;
   Addr last = address + (length ? length - 1 : 0);
   block->instruction = address;
   block->instructions++;
   if (block->code_page != address >> shift)
      add_fetch(block, address);
   if (last >> shift != address >> shift)
      add_fetch(block, last >> shift << shift);
   block->code_page = last >> shift;
}

static UInt size_of(const Block *block, const IRExpr *value)
{
   return sizeofIRType(typeOfIRExpr(block->out->tyenv, value));
}

static void add_load_guarded(Block *block, const IRLoadG *load)
{
   IRType type = Ity_INVALID, wide = Ity_INVALID;
   typeOfIRLoadGOp(load->cvt, &wide, &type);
   add_guarded(block, PT_LOAD, load->addr, sizeofIRType(type), load->guard);
}

static void add_dirty(Block *block, const IRDirty *dirty)
{
   if (dirty->mFx == Ifx_None)
      return;
   if (dirty->mFx != Ifx_Write)
      add_guarded(block, PT_LOAD, dirty->mAddr, dirty->mSize, dirty->guard);
   if (dirty->mFx != Ifx_Read)
      add_guarded(block, PT_STORE, dirty->mAddr, dirty->mSize, dirty->guard);
}

static void add_cas(Block *block, const IRCAS *cas)
{
   UInt size = size_of(block, cas->dataLo) * (cas->dataHi ? 2 : 1);
   add_data(block, PT_LOAD, cas->addr, size);
   add_data(block, PT_STORE, cas->addr, size);
}

/* What is to be done for a statement of the program; the statement itself follows, except after
   loads into temporaries, whose addresses are known before as well. */
static void instrument_statement(Block *block, IRStmt *st)
{
   switch (st->tag) {
   case Ist_IMark:
      add_instruction(block, st->Ist.IMark.addr, st->Ist.IMark.len);
      break;
   case Ist_WrTmp:
      note_place(block, st->Ist.WrTmp.tmp, st->Ist.WrTmp.data);
      if (st->Ist.WrTmp.data->tag == Iex_Load)
         add_data(block, PT_LOAD, st->Ist.WrTmp.data->Iex.Load.addr,
                  sizeofIRType(st->Ist.WrTmp.data->Iex.Load.ty));
      break;
   case Ist_Store:
      add_data(block, PT_STORE, st->Ist.Store.addr, size_of(block, st->Ist.Store.data));
      break;
   case Ist_LoadG:
      add_load_guarded(block, st->Ist.LoadG.details);
      break;
   case Ist_StoreG:
      add_guarded(block, PT_STORE, st->Ist.StoreG.details->addr,
                  size_of(block, st->Ist.StoreG.details->data), st->Ist.StoreG.details->guard);
      break;
   case Ist_Dirty:
      add_dirty(block, st->Ist.Dirty.details);
      break;
   case Ist_CAS:
      add_cas(block, st->Ist.CAS.details);
      break;
   case Ist_LLSC:
      add_data(block, st->Ist.LLSC.storedata ? PT_STORE : PT_LOAD, st->Ist.LLSC.addr,
               st->Ist.LLSC.storedata
                  ? size_of(block, st->Ist.LLSC.storedata)
                  : sizeofIRType(typeOfIRTemp(block->out->tyenv, st->Ist.LLSC.result)));
      break;
   case Ist_Exit:
      end_group(block);
      add_counts(block);
      break;
   default:
      break;
   }
}

static IRSB *instrument(VgCallbackClosure *closure, IRSB *in, const VexGuestLayout *layout,
                        const VexGuestExtents *extents, const VexArchInfo *host, IRType guest_word,
                        IRType host_word)
{
   Block block = {
      .out = deepCopyIRSBExceptStmts(in), .code_page = 1, .thread = closure->tid};
   Int i, temps = in->tyenv->types_used;
   block.places = VG_(malloc)("pagetax.places", (temps + 1) * sizeof(Place));
   for (i = 0; i < temps; i++)
      block.places[i] = (Place){.root = i};
   i = 0;
   /* What comes before the first instruction is no access of the program's. */
   for (; i < in->stmts_used && in->stmts[i]->tag != Ist_IMark; i++)
      addStmtToIRSB(block.out, in->stmts[i]);
   for (; i < in->stmts_used; i++) {
      instrument_statement(&block, in->stmts[i]);
      addStmtToIRSB(block.out, in->stmts[i]);
   }
   end_group(&block);
   add_counts(&block);
   VG_(free)(block.places);
   return block.out;
}

/* ---- what the core need not do ---- */

/* These stand in for the core's functions of these names where it calls them from outside of their files
   (the linker's --wrap, in src/toolchain.rs): a tenth of the time of a translation.
   It proves each block's types three times; with --sanity-level=3 it still does. */
extern Int vgPlain_clo_sanity_level;
extern void __real_sanityCheckIRSB(const IRSB *, const HChar *, Bool, IRType);

void __wrap_sanityCheckIRSB(const IRSB *block, const HChar *caller, Bool flat, IRType word)
{
   if (vgPlain_clo_sanity_level >= 3)
      __real_sanityCheckIRSB(block, caller, flat, word);
}

/* It cleans a block up before it is instrumented, and again after that: then there is nothing to find. */
IRSB *__wrap_cprop_BB(IRSB *block) { return block; }
void __wrap_do_deadcode_BB(IRSB *block) {}

/* ---- what the core tells ---- */

static void write_counts(void)
{
   ULong since = counted - counted_before;
   if (since)
      pt_write(&writer, pt_what(PT_COUNTS, writer.thread, since >> 32), (UInt)since);
   counted_before = counted;
}

static void write_mapping(Addr start, SizeT length, UInt hint)
{
   pt_write(&writer, pt_what(PT_MAPPING, writer.thread, start),
            (length & PT_ADDRESS_MASK) | (ULong)hint << 56);
}

static Kept *kept_of_thread(ThreadId tid)
{
   if (!threads[tid]) {
      threads[tid] = VG_(malloc)("pagetax.thread", sizeof(Kept));
      pt_forget_kept(&data_side, &threads[tid]->data);
      pt_forget_kept(&code_side, &threads[tid]->code);
      SizeT size = VG_(thread_get_stack_size)(tid);
      writer.thread = tid;
      if (size)
         write_mapping(VG_(thread_get_stack_max)(tid) + 1 - size, size, PT_HINT_STACK);
   }
   return threads[tid];
}

static void swap_in(const Kept *kept)
{
   pt_resume(&data_side, &data_tables, &kept->data);
   pt_resume(&code_side, &code_tables, &kept->code);
}

static void swap_out(Kept *kept)
{
   set_stamps_right();
   pt_keep(&data_side, &kept->data, &data_tables);
   pt_keep(&code_side, &kept->code, &code_tables);
}

/* The filters of the running thread begin anew. */
static void forget_running(void)
{
   set_stamps_right();
   pt_forget(&data_side, &data_tables);
   pt_forget(&code_side, &code_tables);
}

/* All threads' do. */
static void forget_all(void)
{
   UInt tid;
   for (tid = 0; tid < VG_N_THREADS; tid++) {
      if (threads[tid]) {
         pt_forget_kept(&data_side, &threads[tid]->data);
         pt_forget_kept(&code_side, &threads[tid]->code);
      }
   }
   forget_running();
   stamped_since = counted;
}

/* Before that, the consumer is told what they know. */
static void tell_all(void)
{
   UInt tid;
   if (!recording)
      return;
   if (running != VG_INVALID_THREADID && threads[running])
      swap_out(threads[running]);
   for (tid = 0; tid < VG_N_THREADS; tid++) {
      if (threads[tid]) {
         writer.thread = tid;
         swap_in(threads[tid]);
         pt_tell(&writer, &data_side, &data_tables, 0);
         pt_tell(&writer, &code_side, &code_tables, PT_CODE);
      }
   }
   if (running != VG_INVALID_THREADID)
      writer.thread = running;
}

/* In blocks; threads are looked at each 100,000. One in ten is recorded, one in fifteen counted: TLBs
   keep what they held at the end of the last burst, and a third of each burst brings them up to date. */
#define WARM 100000
#define COUNT 200000
#define SKIP 2700000

/* The next phase of a sampled recording, if it is time. The gap between bursts is drawn, from nothing
   to twice its mean, so that it does not keep step with a loop of the program's. */
static void next_phase(ULong blocks)
{
   if (!header->sample || blocks < phase_ends)
      return;
   switch (phase) {
   case PT_SKIPPED:
      forget_all();
      recording = ~0ULL;
      phase = PT_WARMING;
      phase_ends = blocks + WARM;
      break;
   case PT_WARMING:
      phase = PT_COUNTED;
      phase_ends = blocks + COUNT;
      break;
   default:
      tell_all();
      recording = 0;
      phase = PT_SKIPPED;
      luck ^= luck << 13;
      luck ^= luck >> 7;
      luck ^= luck << 17;
      phase_ends = blocks + luck % (2 * SKIP);
   }
   pt_write(&writer, pt_what(PT_PHASE, writer.thread, phase), 0);
}

/* A thread's turn begins, or goes on after a system call or so many blocks. */
static void start_client_code(ThreadId tid, ULong blocks)
{
   write_counts();
   next_phase(blocks);
   if (counted - stamped_since > 1ULL << 61) {
      tell_all();
      forget_all();
   }
   pt_publish(&writer);
   if (tid == running)
      return;
   if (running != VG_INVALID_THREADID && threads[running])
      swap_out(threads[running]);
   swap_in(kept_of_thread(tid));
   writer.thread = running = tid;
}

static void thread_exit(ThreadId tid)
{
   if (tid == running)
      write_counts();
   VG_(free)(threads[tid]);
   threads[tid] = NULL;
   if (tid == running) {
      running = VG_INVALID_THREADID;
      forget_running();
   }
}

static void new_startup(Addr a, SizeT length, Bool r, Bool w, Bool x, ULong handle)
{
   write_mapping(a, length, PT_HINT_NONE);
}

static void new_mmap(Addr a, SizeT length, Bool r, Bool w, Bool x, ULong handle)
{
   write_mapping(a, length, PT_HINT_NONE);
}

static void new_brk(Addr a, SizeT length, ThreadId tid)
{
   write_mapping(a, length, PT_HINT_HEAP);
}

/* The kernel takes the translations from all TLBs: accesses that follow must not be dropped. */
static void gone(Addr a, SizeT length)
{
   tell_all();
   forget_all();
   write_mapping(a, length, PT_HINT_GONE);
}

static void remapped(Addr from, Addr to, SizeT length)
{
   gone(from, length);
   write_mapping(to, length, PT_HINT_NONE);
}

/* From now on there may be large pages: code that tests for them, too, replaces what there is. */
static void expect_large_pages(void)
{
   if (!data_side.large_on_demand)
      return;
   tell_all();
   data_side = header->data;
   code_side = header->code;
   data_side.large_on_demand = code_side.large_on_demand = 0;
   pt_clear(&data_side, &data_tables);
   pt_clear(&code_side, &code_tables);
   forget_all();
   vgPlain_discard_translations(0x1000, 1ULL << 47, "pagetax");
}

#define ADVICE_HUGE 14
#define ADVICE_COLLAPSE 25
#define MAP_HUGE 0x40000
#define SHM_HUGE 04000

static Bool asks_for_large_pages(UInt number, const UWord *args)
{
   switch (number) {
   case __NR_madvise: return args[2] == ADVICE_HUGE || args[2] == ADVICE_COLLAPSE;
   case __NR_mmap: return (args[3] & MAP_HUGE) != 0;
   case __NR_shmget: return (args[2] & SHM_HUGE) != 0;
   default: return False;
   }
}

static void pre_syscall(ThreadId tid, UInt number, UWord *args, UInt count)
{
   write_counts();
   if (asks_for_large_pages(number, args))
      expect_large_pages();
   pt_publish(&writer);
   /* What was mapped is gone after an exec, and a sleeper's records should not wait with it. */
   if (number == __NR_execve && writer.control)
      pt_wait(&writer, 0);
}

static void post_syscall(ThreadId tid, UInt number, UWord *args, UInt count, SysRes result) {}

static void forked(ThreadId tid)
{
   counted_before = counted;
   writer.control = NULL;
   if (header->follow)
      pt_claim(&writer, header, pt_new_process(header), VG_(getpid)());
   if (header->sample)
      pt_write(&writer, pt_what(PT_PHASE, writer.thread, phase), 0);
   forget_running();
}

static void finish(Int exit_code)
{
   write_counts();
   pt_end(&writer);
}

static Bool option(const HChar *arg) { return VG_STR_CLO(arg, "--stream", stream_path); }

static void usage(void) { VG_(printf)("    --stream=PATH   shared memory of the consumer\n"); }

static void debug_usage(void) {}

static void map_stream(void)
{
   SysRes fd = VG_(open)(stream_path, VKI_O_RDWR, 0);
   struct vg_stat info;
   if (sr_isError(fd) || VG_(fstat)(sr_Res(fd), &info) != 0)
      VG_(fmsg_bad_option)("--stream", "cannot open %s: is the consumer alive?\n", stream_path);
   SysRes mapped = vgPlain_am_shared_mmap_file_float_valgrind(
      info.size, VKI_PROT_READ | VKI_PROT_WRITE, sr_Res(fd), 0);
   VG_(close)(sr_Res(fd));
   if (sr_isError(mapped))
      VG_(fmsg_bad_option)("--stream", "cannot map %s\n", stream_path);
   header = (struct pt_header *)sr_Res(mapped);
   if (!pt_is_ours(header) || pt_bytes(header) > (ULong)info.size)
      VG_(fmsg_bad_option)("--stream", "%s is of another version of pagetax\n", stream_path);
}

static void post_clo_init(void)
{
   if (!stream_path)
      VG_(fmsg_bad_option)("--stream", "this tool is started by `pagetax trapstat`\n");
   map_stream();
   data_side = header->data;
   code_side = header->code;
   if (data_side.large_on_demand)
      data_side.large.ways = code_side.large.ways = 0;
   pt_clear(&data_side, &data_tables);
   pt_clear(&code_side, &code_tables);
   threads = VG_(calloc)("pagetax.threads", VG_N_THREADS, sizeof(Kept *));
   pt_claim(&writer, header, pt_new_process(header), VG_(getpid)());
   VG_(atfork)(NULL, NULL, forked);
}

static void pre_clo_init(void)
{
   VG_(details_name)("pagetax");
   VG_(details_version)(NULL);
   VG_(details_description)("page changes of a program, for TLB models");
   VG_(details_copyright_author)("the pagetax authors.");
   VG_(details_bug_reports_to)("the pagetax authors");
   VG_(details_avg_translation_sizeB)(400);
   VG_(basic_tool_funcs)(post_clo_init, instrument, finish);
   VG_(needs_command_line_options)(option, usage, debug_usage);
   VG_(needs_syscall_wrapper)(pre_syscall, post_syscall);
   VG_(track_start_client_code)(start_client_code);
   VG_(track_pre_thread_ll_exit)(thread_exit);
   VG_(track_new_mem_startup)(new_startup);
   VG_(track_new_mem_mmap)(new_mmap);
   VG_(track_new_mem_brk)(new_brk);
   VG_(track_die_mem_munmap)(gone);
   VG_(track_copy_mem_remap)(remapped);
}

VG_DETERMINE_INTERFACE_VERSION(pre_clo_init)
