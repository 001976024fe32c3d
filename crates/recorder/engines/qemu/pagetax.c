/* A plugin of QEMU's user mode (API version 1): writes the page changes of a program into rings
   (../stream.h), one for each thread, as QEMU runs them in parallel.

   QEMU's generated code cannot test a condition: it calls the plugin for each access, and the filter is
   tested here. Debian ships no header for plugins, so the functions in use are declared below, after
   QEMU's documentation (docs/devel/tcg-plugins.rst).

   SPDX-License-Identifier: MIT OR Apache-2.0 */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../filter.h"

#define EXPORT __attribute__((visibility("default")))
typedef uint64_t plugin_id;
typedef struct {
   const char *target_name;
   struct {
      int min, cur;
   } version;
   bool system_emulation;
   int vcpus[2];
} plugin_info;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { NO_REGS = 0, READS_AND_WRITES = 3 };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
unsigned qemu_plugin_mem_size_shift(uint32_t);
bool qemu_plugin_mem_is_store(uint32_t);
void qemu_plugin_register_vcpu_init_cb(plugin_id, void (*)(plugin_id, unsigned));
void qemu_plugin_register_vcpu_exit_cb(plugin_id, void (*)(plugin_id, unsigned));
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id,
                                           void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned, void *), int,
                                          void *);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, void (*)(unsigned, void *),
                                            int, void *);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *,
                                      void (*)(unsigned, uint32_t, uint64_t, void *), int, int,
                                      void *);
void qemu_plugin_register_vcpu_syscall_cb(plugin_id,
                                          void (*)(plugin_id, unsigned, int64_t, uint64_t, uint64_t,
                                                   uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                                   uint64_t));
void qemu_plugin_register_vcpu_syscall_ret_cb(plugin_id,
                                              void (*)(plugin_id, unsigned, int64_t, int64_t));
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

EXPORT int qemu_plugin_version = 1;

#define THREADS 4096 /* the most that a record can distinguish */

/* A thread of the program. */
typedef struct {
   struct pt_writer writer;
   struct pt_tables data, code;
   pt_u64 clock;                  /* accesses and fetches, for the filter's stamps */
   bool forgets;                  /* its filters are void: another thread has unmapped memory */
   pt_u64 instructions, accesses; /* since the last PT_COUNTS */
   pt_u64 call[2];                /* the first arguments of its current system call */
} Thread;

static struct pt_header *header;
static struct pt_side data_side, code_side;
static pt_u32 process;
static Thread *threads[THREADS];
static pt_u64 heap_start, heap_end;

static void pt_pause(pt_u32 nth)
{
   if (nth < 64) {
      sched_yield();
   } else {
      struct timespec time = {0, 100000};
      nanosleep(&time, NULL);
   }
}

static int pt_alive(pt_u32 pid) { return kill(pid, 0) == 0 || errno == EPERM; }

/* Empties the filters: the next access to any page is written. */
static void forget(Thread *thread)
{
   __atomic_store_n(&thread->forgets, false, __ATOMIC_RELAXED);
   pt_tell(&thread->writer, &data_side, &thread->data, 0);
   pt_tell(&thread->writer, &code_side, &thread->code, PT_CODE);
   pt_forget(&data_side, &thread->data);
   pt_forget(&code_side, &thread->code);
}

static Thread *thread_of(unsigned vcpu)
{
   Thread *thread = threads[vcpu % THREADS];
   if (__builtin_expect(thread && __atomic_load_n(&thread->forgets, __ATOMIC_RELAXED), 0))
      forget(thread);
   if (__builtin_expect(!thread, 0)) {
      thread = calloc(1, sizeof(Thread));
      if (!thread)
         abort();
      pt_clear(&data_side, &thread->data);
      pt_clear(&code_side, &thread->code);
      thread->writer.thread = vcpu;
      pt_claim(&thread->writer, header, process, getpid());
      threads[vcpu % THREADS] = thread;
   }
   return thread;
}

static void write_counts(Thread *thread)
{
   if (thread->instructions)
      pt_write(&thread->writer,
               pt_what(PT_COUNTS, thread->writer.thread, thread->instructions), thread->accesses);
   thread->instructions = thread->accesses = 0;
   pt_publish(&thread->writer);
}

/* ---- callbacks of generated code ---- */

#define COUNTS_EVERY (1 << 20) /* instructions */

/* An instruction's address, its size (4 bits), instructions in its block (12 bits), as a pointer. */
static void *packed(uint64_t address, size_t size, size_t count)
{
   return (void *)(address << 16 | (size & 15) << 12 | (count & 0xfff));
}

static void fetched(unsigned vcpu, void *instruction)
{
   uint64_t address = (uintptr_t)instruction >> 16, size = (uintptr_t)instruction >> 12 & 15;
   Thread *thread = thread_of(vcpu);
   pt_access(&thread->writer, &code_side, &thread->code, PT_FETCH, address, size ? size : 1,
             address, ++thread->clock);
}

static void block_begins(unsigned vcpu, void *first)
{
   Thread *thread = thread_of(vcpu);
   thread->instructions += (uintptr_t)first & 0xfff;
   if (__builtin_expect(thread->instructions >= COUNTS_EVERY, 0))
      write_counts(thread);
   fetched(vcpu, first);
}

static void accessed(unsigned vcpu, uint32_t info, uint64_t address, void *instruction)
{
   Thread *thread = thread_of(vcpu);
   thread->accesses++;
   pt_access(&thread->writer, &data_side, &thread->data,
             qemu_plugin_mem_is_store(info) ? PT_STORE : PT_LOAD, address & PT_ADDRESS_MASK,
             1u << qemu_plugin_mem_size_shift(info), (uintptr_t)instruction, ++thread->clock);
}

static void translated(plugin_id id, struct qemu_plugin_tb *block)
{
   size_t i, count = qemu_plugin_tb_n_insns(block);
   pt_u32 shift = code_side.small.page_shift;
   uint64_t page = 0;
   for (i = 0; i < count; i++) {
      struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(block, i);
      uint64_t address = qemu_plugin_insn_vaddr(insn), size = qemu_plugin_insn_size(insn);
      uint64_t last = address + (size ? size - 1 : 0);
      if (i == 0)
         qemu_plugin_register_vcpu_tb_exec_cb(block, block_begins, NO_REGS,
                                              packed(address, size, count));
      else if (address >> shift != page || last >> shift != page)
         qemu_plugin_register_vcpu_insn_exec_cb(insn, fetched, NO_REGS, packed(address, size, 0));
      page = last >> shift;
      qemu_plugin_register_vcpu_mem_cb(insn, accessed, NO_REGS, READS_AND_WRITES,
                                       (void *)(uintptr_t)address);
   }
}

/* ---- the program's memory ---- */

/* The numbers of system calls that change mappings, by instruction set. */
static struct {
   int64_t mmap, munmap, mremap, brk;
} calls = {9, 11, 25, 12};

static void write_mapping(Thread *thread, pt_u64 start, pt_u64 length, pt_u32 hint)
{
   pt_write(&thread->writer, pt_what(PT_MAPPING, thread->writer.thread, start),
            (length & PT_ADDRESS_MASK) | (pt_u64)hint << 56);
}

static void call_begins(plugin_id id, unsigned vcpu, int64_t number, uint64_t a, uint64_t b,
                        uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h)
{
   Thread *thread = thread_of(vcpu);
   thread->call[0] = a;
   thread->call[1] = b;
   write_counts(thread);
}

/* The kernel flushes the translations from all TLBs, so the accesses that follow must be written. Other
   threads notice a little later, as on a real machine. */
static void unmapped(Thread *thread, pt_u64 start, pt_u64 length)
{
   int i;
   for (i = 0; i < THREADS; i++)
      if (threads[i] && threads[i] != thread)
         __atomic_store_n(&threads[i]->forgets, true, __ATOMIC_RELAXED);
   forget(thread);
   write_mapping(thread, start, length, PT_HINT_GONE);
}

static void call_ends(plugin_id id, unsigned vcpu, int64_t number, int64_t result)
{
   Thread *thread = thread_of(vcpu);
   if (result < 0 && result > -4096)
      return;
   if (number == calls.mmap) {
      write_mapping(thread, result, thread->call[1], PT_HINT_NONE);
   } else if (number == calls.munmap || number == calls.mremap) {
      unmapped(thread, thread->call[0], thread->call[1]);
   } else if (number == calls.brk) {
      if (!heap_start)
         heap_start = heap_end = result;
      if ((pt_u64)result > heap_end)
         write_mapping(thread, heap_end, result - heap_end, PT_HINT_HEAP);
      heap_end = result;
   }
}

/* ---- start and end ---- */

static void thread_ends(plugin_id id, unsigned vcpu)
{
   Thread *thread = threads[vcpu % THREADS];
   if (!thread)
      return;
   threads[vcpu % THREADS] = NULL;
   write_counts(thread);
   pt_end(&thread->writer);
   free(thread);
}

static void program_ends(plugin_id id, void *data)
{
   int i;
   for (i = 0; i < THREADS; i++)
      thread_ends(id, i);
}

/* Starts a new writer in a forked child, which has one thread and its own address space. */
static void forked(void)
{
   int i;
   process = pt_new_process(header);
   for (i = 0; i < THREADS; i++) {
      Thread *thread = threads[i];
      if (!thread)
         continue;
      thread->writer.control = NULL;
      thread->instructions = thread->accesses = 0;
      pt_forget(&data_side, &thread->data);
      pt_forget(&code_side, &thread->code);
      if (header->follow)
         pt_claim(&thread->writer, header, process, getpid());
   }
}

static int map_stream(const char *path)
{
   struct stat info;
   int fd = open(path, O_RDWR | O_CLOEXEC);
   if (fd < 0 || fstat(fd, &info) != 0)
      return -1;
   header = mmap(NULL, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
   close(fd);
   if (header == MAP_FAILED || !pt_is_ours(header) || pt_bytes(header) > (pt_u64)info.st_size)
      return -1;
   return 0;
}

EXPORT int qemu_plugin_install(plugin_id id, const plugin_info *info, int argc, char **argv)
{
   const char *path = argc > 0 && strncmp(argv[0], "stream=", 7) == 0 ? argv[0] + 7 : NULL;
   if (!path || map_stream(path) != 0) {
      fprintf(stderr, "this plugin is started by `pagetax trapstat`\n");
      return -1;
   }
   if (strcmp(info->target_name, "aarch64") == 0 || strcmp(info->target_name, "riscv64") == 0) {
      calls.mmap = 222;
      calls.munmap = 215;
      calls.mremap = 216;
      calls.brk = 214;
   }
   data_side = header->data;
   code_side = header->code;
   process = pt_new_process(header);
   pthread_atfork(NULL, NULL, forked);
   qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
   qemu_plugin_register_vcpu_syscall_cb(id, call_begins);
   qemu_plugin_register_vcpu_syscall_ret_cb(id, call_ends);
   qemu_plugin_register_vcpu_exit_cb(id, thread_ends);
   qemu_plugin_register_atexit_cb(id, program_ends, NULL);
   return 0;
}
