/* A Valgrind tool: writes the page changes of a program into a ring (../stream.h).

   What makes it fast: the page filter is tested in the instrumented code itself, for several accesses
   at once, and only a page change calls C. Valgrind runs one thread at a time, so that the filter is a
   plain static table; each thread's own is swapped in when it gets its turn.
   Invariant: a group of accesses is tested against the filter as it was before the group. If none
   passes, none would have changed it, so testing them one by one would give the same; if one
   passes, C tests all of them one by one, in their order.

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

#include "../stream.h"

/* Of the core, but in no header for tools. */
extern SysRes vgPlain_am_shared_mmap_file_float_valgrind(SizeT length, UInt prot, Int fd,
                                                         Off64T offset);
extern SysRes vgPlain_do_syscall(UWord number, RegWord, RegWord, RegWord, RegWord, RegWord,
                                 RegWord, RegWord, RegWord);

static const HChar *stream_path = NULL;
static struct pt_header *header = NULL;
static struct pt_writer writer;
static struct pt_side data_side, code_side;

/* Of the running thread. In the tool's own data, below 2^31, so that code reaches them directly. */
static struct pt_slots data_slots, code_slots;
/* Instructions (low half) and data accesses (high half) since the last PT_COUNTS. */
static ULong counted;

/* Of the other threads, by number; made when a thread gets its first turn. */
typedef struct {
   struct pt_slots data, code;
} ThreadSlots;
static ThreadSlots **threads = NULL;
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

#define GROUP 5 /* accesses in a group at most: a helper takes six arguments */

typedef struct {
   Addr instruction;
   UShort size, kind;
} Access;

/* The accesses of a group in their order; lives as long as the tool. */
typedef struct {
   UInt count;
   Access accesses[GROUP];
} Group;

static inline void one(const Access *access, Addr address)
{
   if (access->kind == PT_FETCH)
      pt_access(&writer, &code_side, &code_slots, PT_FETCH, address, access->size, address);
   else
      pt_access(&writer, &data_side, &data_slots, access->kind, address, access->size,
                access->instruction);
}

static void group1(const Group *g, Addr a) { one(&g->accesses[0], a); }

static void group2(const Group *g, Addr a, Addr b)
{
   one(&g->accesses[0], a);
   one(&g->accesses[1], b);
}

static void group3(const Group *g, Addr a, Addr b, Addr c)
{
   group2(g, a, b);
   one(&g->accesses[2], c);
}

static void group4(const Group *g, Addr a, Addr b, Addr c, Addr d)
{
   group3(g, a, b, c);
   one(&g->accesses[3], d);
}

static void group5(const Group *g, Addr a, Addr b, Addr c, Addr d, Addr e)
{
   group4(g, a, b, c, d);
   one(&g->accesses[4], e);
}

static const struct {
   const HChar *name;
   void *function;
} group_calls[GROUP] = {{"group1", &group1}, {"group2", &group2}, {"group3", &group3},
                        {"group4", &group4}, {"group5", &group5}};

/* ---- instrumentation ---- */

/* A block under construction. */
typedef struct {
   IRSB *out;
   Group *group; /* none: no access waits for its test */
   IRExpr *addresses[GROUP];
   IRExpr *test; /* not 0 if an access of the group passes */
   ULong counted; /* instructions and accesses not yet added */
   Addr instruction;
   Addr code_page; /* of the fetch tested last; 1: none */
} Block;

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

/* What stands in the slot of an address. */
static IRExpr *slot_of(IRSB *out, const struct pt_filter *filter, pt_u64 *slots, IRExpr *address)
{
   if (address->tag == Iex_Const) {
      pt_u64 *slot = pt_slot(filter, slots, address->Iex.Const.con->Ico.U64);
      return assign(out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, word((ULong)slot)));
   }
   if (filter->index_mask == 0)
      return assign(out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, word((ULong)slots)));
   IRExpr *scaled = shift_right(out, address, filter->index_shift - 3);
   IRExpr *offset = binop(out, Iop_And64, scaled, word((ULong)filter->index_mask << 3));
   IRExpr *at = binop(out, Iop_Add64, offset, word((ULong)slots));
   return assign(out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, at));
}

/* pt_passes as code: bits from small.page_shift on are set if the access passes. */
static IRExpr *test_of(IRSB *out, const struct pt_side *side, struct pt_slots *slots,
                       IRExpr *address, UInt size)
{
   IRExpr *test =
      binop(out, Iop_Xor64, address, slot_of(out, &side->small, slots->small, address));
   if (size > 1)
      test = binop(out, Iop_Add64, test, word(size - 1));
   if (side->large.used) {
      IRExpr *large =
         binop(out, Iop_Xor64, address, slot_of(out, &side->large, slots->large, address));
      large = shift_right(out, large, side->large.page_shift - side->small.page_shift);
      test = binop(out, Iop_Or64, test, large);
   }
   return shift_right(out, test, side->small.page_shift);
}

/* Ends the group: the call, made if any of its accesses passes. */
static void end_group(Block *block)
{
   Group *group = block->group;
   IRExpr **args;
   IRDirty *call;
   if (!group)
      return;
   IRExpr *descriptor = mkIRExpr_HWord((HWord)group);
   IRExpr **a = block->addresses;
   switch (group->count) {
   case 1: args = mkIRExprVec_2(descriptor, a[0]); break;
   case 2: args = mkIRExprVec_3(descriptor, a[0], a[1]); break;
   case 3: args = mkIRExprVec_4(descriptor, a[0], a[1], a[2]); break;
   case 4: args = mkIRExprVec_5(descriptor, a[0], a[1], a[2], a[3]); break;
   default: args = mkIRExprVec_6(descriptor, a[0], a[1], a[2], a[3], a[4]); break;
   }
   call = unsafeIRDirty_0_N(0, group_calls[group->count - 1].name,
                            VG_(fnptr_to_fnentry)(group_calls[group->count - 1].function), args);
   call->guard = assign(block->out, Ity_I1, IRExpr_Unop(Iop_CmpNEZ64, block->test));
   addStmtToIRSB(block->out, IRStmt_Dirty(call));
   block->group = NULL;
}

/* Adds an access to the group, after the statement that makes it. */
static void add_access(Block *block, UInt kind, IRExpr *address, UInt size)
{
   Bool fetch = kind == PT_FETCH;
   IRExpr *test = test_of(block->out, fetch ? &code_side : &data_side,
                          fetch ? &code_slots : &data_slots, address, size);
   if (!block->group) {
      block->group = VG_(malloc)("pagetax.group", sizeof(Group));
      block->group->count = 0;
      block->test = test;
   } else {
      block->test = binop(block->out, Iop_Or64, block->test, test);
   }
   UInt nth = block->group->count++;
   block->group->accesses[nth] = (Access){block->instruction, size, kind};
   block->addresses[nth] = address;
   if (block->group->count == GROUP)
      end_group(block);
}

static void add_data(Block *block, UInt kind, IRExpr *address, UInt size)
{
   block->counted += 1ULL << 32;
   add_access(block, kind, address, size);
}

/* An access that happens only under a guard, and is too rare for a test in code. */
static void add_guarded(Block *block, UInt kind, IRExpr *address, UInt size, IRExpr *guard)
{
   end_group(block);
   add_data(block, kind, address, size);
   if (block->group) {
      block->test = assign(block->out, Ity_I64, IRExpr_Unop(Iop_1Uto64, guard));
      end_group(block);
   }
}

/* Adds what was counted so far to the counter in memory: before each way out. */
static void add_counts(Block *block)
{
   if (block->counted == 0)
      return;
   IRExpr *at = word((ULong)&counted);
   IRExpr *old = assign(block->out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, at));
   IRExpr *sum = binop(block->out, Iop_Add64, old, word(block->counted));
   addStmtToIRSB(block->out, IRStmt_Store(Iend_LE, at, sum));
   block->counted = 0;
}

/* An instruction begins: its fetch, if it is on another page than the one before in this block. */
static void add_instruction(Block *block, Addr address, UInt length)
{
   UInt shift = code_side.small.page_shift;
   block->instruction = address;
   block->counted++;
   if (length == 0)
      length = 1;
   if (block->code_page != address >> shift)
      add_access(block, PT_FETCH, word(address), length);
   else if ((address + length - 1) >> shift != address >> shift)
      add_access(block, PT_FETCH, word(address + length - 1), 1);
   block->code_page = (address + length - 1) >> shift;
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
   Block block = {.out = deepCopyIRSBExceptStmts(in), .code_page = 1};
   Int i = 0;
   /* What comes before the first instruction is no access of the program's. */
   for (; i < in->stmts_used && in->stmts[i]->tag != Ist_IMark; i++)
      addStmtToIRSB(block.out, in->stmts[i]);
   for (; i < in->stmts_used; i++) {
      instrument_statement(&block, in->stmts[i]);
      addStmtToIRSB(block.out, in->stmts[i]);
   }
   end_group(&block);
   add_counts(&block);
   return block.out;
}

/* ---- what the core tells ---- */

static void write_counts(void)
{
   if (counted)
      pt_write(&writer, pt_what(PT_COUNTS, writer.thread, (UInt)counted), counted >> 32);
   counted = 0;
}

static void write_mapping(Addr start, SizeT length, UInt hint)
{
   pt_write(&writer, pt_what(PT_MAPPING, writer.thread, start),
            (length & PT_ADDRESS_MASK) | (ULong)hint << 56);
}

static ThreadSlots *slots_of(ThreadId tid)
{
   if (!threads[tid]) {
      threads[tid] = VG_(malloc)("pagetax.thread", sizeof(ThreadSlots));
      pt_forget(&threads[tid]->data);
      pt_forget(&threads[tid]->code);
      SizeT size = VG_(thread_get_stack_size)(tid);
      writer.thread = tid;
      if (size)
         write_mapping(VG_(thread_get_stack_max)(tid) + 1 - size, size, PT_HINT_STACK);
   }
   return threads[tid];
}

/* A thread's turn begins, or goes on after a system call or so many blocks. */
static void start_client_code(ThreadId tid, ULong blocks)
{
   write_counts();
   pt_publish(&writer);
   if (tid == running)
      return;
   if (running != VG_INVALID_THREADID && threads[running]) {
      threads[running]->data = data_slots;
      threads[running]->code = code_slots;
   }
   ThreadSlots *slots = slots_of(tid);
   data_slots = slots->data;
   code_slots = slots->code;
   writer.thread = running = tid;
}

static void thread_exit(ThreadId tid)
{
   if (tid == running)
      write_counts();
   VG_(free)(threads[tid]);
   threads[tid] = NULL;
   if (tid == running)
      running = VG_INVALID_THREADID;
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
   UInt tid;
   for (tid = 0; tid < VG_N_THREADS; tid++) {
      if (threads[tid]) {
         pt_forget(&threads[tid]->data);
         pt_forget(&threads[tid]->code);
      }
   }
   pt_forget(&data_slots);
   pt_forget(&code_slots);
   write_mapping(a, length, PT_HINT_GONE);
}

static void remapped(Addr from, Addr to, SizeT length)
{
   gone(from, length);
   write_mapping(to, length, PT_HINT_NONE);
}

static void pre_syscall(ThreadId tid, UInt number, UWord *args, UInt count)
{
   write_counts();
   pt_publish(&writer);
   /* What was mapped is gone after an exec, and a sleeper's records should not wait with it. */
   if (number == __NR_execve && writer.control)
      pt_wait(&writer, 0);
}

static void post_syscall(ThreadId tid, UInt number, UWord *args, UInt count, SysRes result) {}

static void forked(ThreadId tid)
{
   counted = 0;
   writer.control = NULL;
   if (header->follow)
      pt_claim(&writer, header, pt_new_process(header), VG_(getpid)());
   pt_forget(&data_slots);
   pt_forget(&code_slots);
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
   pt_forget(&data_slots);
   pt_forget(&code_slots);
   threads = VG_(calloc)("pagetax.threads", VG_N_THREADS, sizeof(ThreadSlots *));
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
