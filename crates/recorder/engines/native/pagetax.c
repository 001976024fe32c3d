/* The C half of the native engine (crates/dbt). It processes the blocks whose pages are not all in the
   filter's slots (../filter.h), and writes page changes into a ring (../stream.h). One thread at a time
   calls it.

   SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "../filter.h"

#include <stddef.h>
#include <sys/syscall.h>

/* An access of a block. Its address is a logged value plus an offset. */
struct pn_access {
   pt_u64 instruction;
   long long offset;
   pt_u32 bytes;
   unsigned char kind;
   unsigned char slot;   /* of the frame; 0: the offset is the address */
   unsigned char repeat; /* slot of rcx before a repeated instruction, the next has it after; 0: once */
   unsigned char flags;
};
enum { PN_FS = 1, PN_FIRST = 2 /* of the accesses of a repeated instruction */ };

struct pn_block {
   pt_u64 start;
   pt_u32 bytes, instructions;
   const struct pn_access *accesses;
   pt_u32 access_count;
};

/* A filter whose slots lie in the first 2 GiB. */
struct pn_filter {
   pt_u32 page_shift; /* 0: no such filter */
   pt_u32 slots;
};

struct pn_side {
   struct pn_filter small, large;
};

static struct pt_header *header;
static struct pt_writer writer;
static struct pt_tables *tables; /* of data and of code */
#define data_tables tables[0]
#define code_tables tables[1]
/* The header's filters, without the one of large pages while the program has none. */
static struct pt_side data_side, code_side;
static pt_u64 instructions_of_runs, accesses_of_runs;

/* Makes a system call without the C library, which would change the program's errno. */
static long call3(long number, long a, long b, long c)
{
   long result;
   __asm__ volatile("syscall"
                    : "=a"(result)
                    : "a"(number), "D"(a), "S"(b), "d"(c)
                    : "rcx", "r11", "memory");
   return result;
}

static void pt_pause(pt_u32 nth)
{
   long time[2] = {0, 100000};
   if (nth < 64)
      __builtin_ia32_pause();
   else if (nth < 256)
      call3(SYS_sched_yield, 0, 0, 0);
   else
      call3(SYS_nanosleep, (long)time, 0, 0);
}

static int pt_alive(pt_u32 pid)
{
   long result = call3(SYS_kill, pid, 0, 0);
   return result == 0 || result == -1; /* EPERM */
}

/* A header without a consumer: everything runs as usual, and nothing is written. */
static struct pt_header none = {.data = {{12, 12, 63, 4}, {21, 21, 7, 4}, 1},
                                .code = {{12, 12, 31, 4}, {0, 0, 0, 0}, 1}};

static int has_large; /* the program has requested large pages */

static void use_sides(void)
{
   data_side = header->data;
   code_side = header->code;
   if (data_side.large_on_demand && !has_large)
      data_side.large.ways = code_side.large.ways = 0;
   pt_clear(&data_side, &data_tables);
   pt_clear(&code_side, &code_tables);
}

pt_u64 pn_table_bytes(void) { return 2 * sizeof *tables; }

/* Returns 1 if `memory` is a consumer's and has a ring for us. `of_tables` is zeroed memory for the tables. */
int pn_open(void *memory, pt_u64 bytes, pt_u32 pid, void *of_tables)
{
   header = memory ? memory : &none;
   tables = of_tables;
   if (!memory) {
      use_sides();
      return 1;
   }
   if (bytes < sizeof *header || !pt_is_ours(header) || pt_bytes(header) > bytes || !header->sample)
      return 0;
   use_sides();
   pt_claim(&writer, header, pt_new_process(header), pid);
   pt_write(&writer, pt_what(PT_PHASE, 0, PT_SKIPPED), 0);
   pt_publish(&writer);
   return writer.control != NULL;
}

/* Returns the place of the engine's status. */
struct pt_native *pn_native(void) { return &header->native; }

static void describe(struct pn_filter *to, const struct pt_filter *filter, struct pt_table *table)
{
   to->page_shift = filter->ways ? filter->page_shift : 0;
   to->slots = (pt_u32)(unsigned long)table->slots;
}

/* Describes the filters for the code that tests slots. */
void pn_sides(struct pn_side sides[2])
{
   describe(&sides[0].small, &data_side.small, &data_tables.small);
   describe(&sides[0].large, &data_side.large, &data_tables.large);
   describe(&sides[1].small, &code_side.small, &code_tables.small);
   describe(&sides[1].large, &code_side.large, &code_tables.large);
}

static void forget(void)
{
   pt_forget(&data_side, &data_tables);
   pt_forget(&code_side, &code_tables);
}

static void write_mapping(pt_u64 start, pt_u64 length, pt_u32 hint)
{
   pt_write(&writer, pt_what(PT_MAPPING, writer.thread, start),
            (length & PT_ADDRESS_MASK) | (pt_u64)hint << 56);
}

/* Begins a burst. Mappings may have changed since the last one; TLBs begin with their entries from then. */
void pn_begin(pt_u32 thread)
{
   writer.thread = thread;
   forget();
   write_mapping(0, 0, PT_HINT_NONE);
}

void pn_phase(pt_u32 phase, pt_u64 gap)
{
   if (phase == PT_SKIPPED) {
      pt_tell(&writer, &data_side, &data_tables, 0);
      pt_tell(&writer, &code_side, &code_tables, PT_CODE);
   }
   pt_write(&writer, pt_what(PT_PHASE, writer.thread, phase), gap);
   pt_publish(&writer);
}

pt_u32 pn_warm_up(void)
{
   return writer.control ? __atomic_load_n(&writer.control->warm_up, __ATOMIC_RELAXED) : 0;
}

/* Writes the order that the filters know, and empties them. */
static void write_order_and_forget(void)
{
   pt_tell(&writer, &data_side, &data_tables, 0);
   pt_tell(&writer, &code_side, &code_tables, PT_CODE);
   forget();
}

/* Expects large pages from now on. Returns 1 if that is new: the code that tests slots is then obsolete. */
int pn_expect_large(void)
{
   if (has_large || !data_side.large_on_demand)
      return 0;
   write_order_and_forget();
   has_large = 1;
   use_sides();
   return 1;
}

void pn_gone(pt_u64 start, pt_u64 length)
{
   write_order_and_forget();
   write_mapping(start, length, PT_HINT_GONE);
}

void pn_close(void) { pt_end(&writer); }

static pt_u64 fetch(const struct pn_block *block, pt_u64 clock)
{
   pt_u64 address = block->start, last = address + block->bytes - 1;
   for (;;) {
      pt_access(&writer, &code_side, &code_tables, PT_FETCH, address, 1, address, ++clock);
      if (address >> 12 == last >> 12)
         return clock;
      address = ((address >> 12) + 1) << 12;
   }
}

/* Processes all elements of a repeated instruction, page by page. Returns their number. */
static pt_u64 repeated(const struct pn_access *access, pt_u64 address, const pt_u64 *frame, pt_u64 *clock)
{
   pt_u64 count = frame[access->repeat] - frame[access->repeat + 1];
   pt_u64 end = address + count * access->bytes;
   while (address < end) {
      pt_u64 next = ((address >> 12) + 1) << 12;
      pt_access(&writer, &data_side, &data_tables, access->kind, address, 1, access->instruction,
                ++*clock);
      address = next;
   }
   return count;
}

/* Processes one block access by access. Returns the clock. */
pt_u64 pn_run(const struct pn_block *block, const pt_u64 *frame, pt_u64 fs, pt_u64 clock)
{
   pt_u64 i;
   clock = fetch(block, clock);
   instructions_of_runs += block->instructions;
   for (i = 0; i < block->access_count; i++) {
      const struct pn_access *access = &block->accesses[i];
      pt_u64 address = access->offset + (access->slot ? frame[access->slot] : 0);
      if (access->flags & PN_FS)
         address += fs;
      if (access->repeat) {
         pt_u64 count = repeated(access, address, frame, &clock);
         accesses_of_runs += count;
         /* The other engines count one instruction for each element, and one for the end of the loop. */
         if (access->flags & PN_FIRST)
            instructions_of_runs += count;
      } else {
         accesses_of_runs++;
         pt_access(&writer, &data_side, &data_tables, access->kind, address, access->bytes,
                   access->instruction, ++clock);
      }
   }
   return clock;
}

/* Writes the counts of a drained log: those of this file and those of the caller, given here. Returns the
   instructions of both. */
pt_u64 pn_took(pt_u64 instructions, pt_u64 accesses)
{
   instructions += instructions_of_runs;
   accesses += accesses_of_runs;
   instructions_of_runs = accesses_of_runs = 0;
   pt_write(&writer, pt_what(PT_COUNTS, writer.thread, instructions), accesses);
   pt_publish(&writer);
   return instructions;
}
