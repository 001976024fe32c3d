/* A Valgrind tool: writes the page changes of a program into a ring (../stream.h).

   Speed: instrumented code itself tests the page filter (../filter.h), for several accesses at once. It
   calls C only for a page that is in no slot. Accesses in a row that differ by a constant share a test.
   Valgrind runs one thread at a time, so the filter is a plain static table. Each thread's own sets are
   swapped in when the thread gets its turn.
   Invariant: a group of accesses is tested before any of it is stamped. If all pages are in their slots,
   the code only stamps them. If not, C processes the group access by access. Then the code stamps the first
   page of each run with the time of the run's last access, the oldest first. C has done the same, except if
   the run crosses the end of its page: then C remembers the stamp.
   All of that comes before the program's own access of the group's last run. C has prefetched its data, so
   the miss overlaps with C's work, which would otherwise fill the processor's window.

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

/* Functions of the core that no header for tools declares. */
extern SysRes vgPlain_am_shared_mmap_file_float_valgrind(SizeT length, UInt prot, Int fd,
                                                         Off64T offset);
/* The tools' own interface refuses calls from a system call's wrapper; munmap's wrapper calls this. */
extern void vgPlain_discard_translations(Addr start, ULong range, const HChar *who);
extern SysRes vgPlain_do_syscall(UWord number, RegWord, RegWord, RegWord, RegWord, RegWord,
                                 RegWord, RegWord, RegWord);

static const HChar *stream_path = NULL;
static struct pt_header *header = NULL;
static struct pt_writer writer;
static struct pt_side data_side, code_side;

/* The tables of the running thread. The tool's data is below 2^31, so code addresses them directly. */
static struct pt_tables data_tables, code_tables;
/* The clock of stamps: data accesses (low half) and instructions (high half) of all threads. */
static ULong counted;
/* The clock at the last PT_COUNTS, and a time that no stamp precedes. */
static ULong counted_before, stamped_since;

/* All bits set while accesses are recorded, else 0. Instrumented code masks its tests with it, so that it
   calls C only while recording. Its stamps go on and have no meaning. */
static ULong recording = ~0ULL;
/* The stage of a sampled recording, and its end, in blocks run by all threads. */
static UInt phase = PT_COUNTED;
static ULong phase_ends;
static ULong rng_state = 88172645463325252ULL;

/* The sets of the other threads, by number; allocated when a thread gets its first turn. */
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

#include "zeros.h"
#include "groups.h"
#include "instrument.h"

/* ---- passes of the core that are skipped ---- */

/* These replace the core's functions where other files call them (the linker's --wrap, in
   src/toolchain.rs). It saves a tenth of the time of a translation. The core checks each block's types three
   times; with --sanity-level=3 it still does. */
extern Int vgPlain_clo_sanity_level;
extern void __real_sanityCheckIRSB(const IRSB *, const HChar *, Bool, IRType);

void __wrap_sanityCheckIRSB(const IRSB *block, const HChar *caller, Bool flat, IRType word)
{
   if (vgPlain_clo_sanity_level >= 3)
      __real_sanityCheckIRSB(block, caller, flat, word);
}

/* The core optimizes a block before it is instrumented, and again afterwards, in vain. */
IRSB *__wrap_cprop_BB(IRSB *block) { return block; }
void __wrap_do_deadcode_BB(IRSB *block) {}

/* ---- events of the core ---- */

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
   correct_stamps();
   pt_keep(&data_side, &kept->data, &data_tables);
   pt_keep(&code_side, &kept->code, &code_tables);
}

/* Empties the filters of the running thread. */
static void forget_running(void)
{
   correct_stamps();
   pt_forget(&data_side, &data_tables);
   pt_forget(&code_side, &code_tables);
}

/* Empties the filters of all threads. */
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

/* Writes the order that the filters of all threads know, before they are emptied. */
static void write_all_orders(void)
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

/* Lengths in blocks; the core reports each 100,000. One block in ten is recorded, one in fifteen counted.
   TLBs keep their entries from the last burst, and the first third of each burst warms them up. */
#define WARM 100000
#define COUNT 200000
#define SKIP 2700000

/* Begins the next stage of a sampled recording, if it is due. The gap between bursts is random, from 0 to
   twice its mean, so that it does not keep step with a loop of the program. */
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
      write_all_orders();
      recording = 0;
      phase = PT_SKIPPED;
      rng_state ^= rng_state << 13;
      rng_state ^= rng_state >> 7;
      rng_state ^= rng_state << 17;
      phase_ends = blocks + rng_state % (2 * SKIP);
   }
   pt_write(&writer, pt_what(PT_PHASE, writer.thread, phase), 0);
}

/* Handles a thread's turn that begins, or goes on after a system call or after `blocks`. */
static void start_client_code(ThreadId tid, ULong blocks)
{
   write_counts();
   next_phase(blocks);
   if (counted - stamped_since > 1ULL << 61) {
      write_all_orders();
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

/* The kernel flushes the translations from all TLBs, so the accesses that follow must be written. */
static void unmapped(Addr a, SizeT length)
{
   write_all_orders();
   forget_all();
   write_mapping(a, length, PT_HINT_GONE);
}

static void remapped(Addr from, Addr to, SizeT length)
{
   unmapped(from, length);
   write_mapping(to, length, PT_HINT_NONE);
}

/* Large pages are possible from now on: discards all code, so that new code tests for them, too. */
static void expect_large_pages(void)
{
   if (!data_side.large_on_demand)
      return;
   write_all_orders();
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
   /* After an exec the ring is no longer mapped, and records must not wait while the program sleeps. */
   if (number == __NR_execve && writer.control)
      pt_wait(&writer, 0);
}

static void write_use(ThreadId tid, Addr a, SizeT length, UInt use)
{
   if (length)
      pt_write(&writer, pt_what(PT_USE, tid, a), (length & PT_ADDRESS_MASK) | (ULong)use << 56);
}

static void system_call_reads(CorePart part, ThreadId tid, const HChar *what, Addr a, SizeT length)
{
   if (part == Vg_CoreSysCall)
      write_use(tid, a, length, PT_READ);
}

static void system_call_wrote(CorePart part, ThreadId tid, Addr a, SizeT length)
{
   if (part == Vg_CoreSysCall)
      write_use(tid, a, length, PT_WRITTEN);
}

#define ADVICE_DONTNEED 4
#define ADVICE_FREE 8

static void post_syscall(ThreadId tid, UInt number, UWord *args, UInt count, SysRes result)
{
   if (number == __NR_madvise && !sr_isError(result) &&
       (args[2] == ADVICE_DONTNEED || args[2] == ADVICE_FREE))
      write_use(tid, args[0], args[1], PT_DROPPED);
}

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
   tells_zeros = header->zeros != 0;
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
   VG_(track_die_mem_munmap)(unmapped);
   VG_(track_copy_mem_remap)(remapped);
   VG_(track_pre_mem_read)(system_call_reads);
   VG_(track_post_mem_write)(system_call_wrote);
}

VG_DETERMINE_INTERFACE_VERSION(pre_clo_init)
