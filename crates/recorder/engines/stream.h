/* The stream of page changes: the layout of the shared memory, and the engines' side of it. The reader is
   src/ring.rs. A change here needs the same change there, and a new PT_VERSION.

   SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGETAX_STREAM_H
#define PAGETAX_STREAM_H

#define PT_MAGIC 0x7274736b63617274ULL
#define PT_VERSION 8
#define PT_PAGE 4096
#define PT_SETS 64 /* the most sets of a filter */
#define PT_WAYS 8  /* the most pages of a set */

typedef unsigned int pt_u32;
typedef unsigned long long pt_u64;

/* The pages that every TLB certainly holds: those used last in each set (filter.h). */
struct pt_filter {
   pt_u32 page_shift;  /* log2 of the smallest page that it distinguishes */
   pt_u32 index_shift; /* the set of an address: (address >> index_shift) & index_mask */
   pt_u32 index_mask;
   pt_u32 ways; /* 0: there is no such filter */
};

/* The filters of small and of large pages. An access is dropped if both hold its page. */
struct pt_side {
   struct pt_filter small, large;
   pt_u32 large_on_demand; /* large pages exist only after a system call that requests them */
};

/* The native engine's status. It lies in shared memory because a program may end without running the
   engine again. */
struct pt_native {
   pt_u64 state;          /* 0: not started; 1: on; else the reason why it is off (src/native.rs) */
   pt_u64 ends[6];        /* bursts by the reason of their end (src/native.rs) */
   pt_u64 instructions;   /* instructions in bursts */
   pt_u64 counted;        /* instructions counted between bursts */
   pt_u64 cpu_ns;         /* CPU time that bursts represent */
   pt_u64 unseen_threads; /* threads without a timer */
   char text[256];        /* the place of an internal error */
};

/* The first page of the shared memory. The consumer writes it before any engine starts. */
struct pt_header {
   pt_u64 magic;
   pt_u32 version;
   pt_u32 ring_count;
   pt_u64 ring_records; /* a power of two */
   pt_u32 consumer_pid; /* engines stop writing when this process has ended */
   pt_u32 follow;       /* forked children write too */
   pt_u32 sample;       /* only bursts are recorded */
   pt_u32 zeros;        /* engines that can tell pages of zeros do */
   struct pt_side data, code;
   pt_u32 stop;       /* set by the consumer when it stops reading */
   pt_u32 unrecorded; /* counted by engines: processes or threads that found no free ring */
   pt_u32 processes;  /* counted by engines: the next number of pt_new_process */
   struct pt_native native;
};

/* A ring's writer: a thread, or a process whose threads take turns. Any writer may claim a free ring. */
enum { PT_FREE = 0, PT_CLAIMED = 1, PT_ENDED = 2 };
struct pt_control {
   pt_u32 state;
   pt_u32 pid;
   pt_u32 process; /* the number of an address space; exec makes a new one with the same pid */
   pt_u32 warm_up; /* set by the consumer: instructions of the next warm-up; 0: not known */
   pt_u64 pad1[6];
   pt_u64 head; /* records written; only the engine stores */
   pt_u64 pad2[7];
   pt_u64 tail; /* records read; only the consumer stores */
   pt_u64 pad3[7];
};

/* what: an address or a count (48 bits), the kind (4), the thread (12). where: depends on the kind. */
struct pt_record {
   pt_u64 what, where;
};
enum {
   PT_FETCH = 1, /* an instruction on another page; where: the instruction */
   PT_LOAD = 2,  /* what: the address; where: the instruction */
   PT_STORE = 3,
   PT_COUNTS = 4, /* what: instructions since the last such record; where: data accesses */
   PT_MAPPING = 5, /* memory that begins at what has changed; where: length, hint << 56 */
   PT_PHASE = 7,   /* what: the stage of all threads of the process from here on. where, if it is PT_COUNTED:
                      the thread's instructions since its last burst, or 0 if bursts are equally likely
                      everywhere. PT_FIRST is set if the thread has not counted yet: its number may have
                      belonged to another thread. */
   PT_USE = 8, /* memory that begins at what was used in a way that no access shows. where: length,
                  enum pt_use << 56 */
   PT_TOUCH = 6    /* what: an address whose page was used since its last record; where: enum pt_touch */
};
/* The filter that a touch is for, with PT_CODE for the instruction side. */
enum { PT_ALL = 0, PT_SMALL = 1, PT_LARGE = 2, PT_CODE = 4 };
/* The stages of a sampled recording: nothing is recorded, TLBs warm up, or accesses count. */
enum { PT_SKIPPED = 0, PT_WARMING = 1, PT_COUNTED = 2 };
#define PT_FIRST (1ULL << 63)
enum { PT_HINT_NONE = 0, PT_HINT_HEAP = 1, PT_HINT_STACK = 2, PT_HINT_GONE = 3 };

/* A system call read, wrote or dropped memory; or its bytes were all zero when it had not been used for a while,
   and are until its next use. */
enum pt_use { PT_READ = 1, PT_WRITTEN = 2, PT_DROPPED = 3, PT_ZEROS = 4 };

#define PT_ADDRESS_BITS 48
#define PT_ADDRESS_MASK ((1ULL << PT_ADDRESS_BITS) - 1)

static inline pt_u64 pt_what(pt_u32 kind, pt_u32 thread, pt_u64 value)
{
   return (value & PT_ADDRESS_MASK) | ((pt_u64)kind << 48) | ((pt_u64)(thread & 0xfff) << 52);
}

/* A ring as its writer sees it. */
struct pt_writer {
   struct pt_header *header;
   struct pt_control *control; /* 0: nothing is written */
   struct pt_record *records;
   pt_u64 mask, head, tail_seen;
   pt_u32 thread;
};

/* Defined by each engine: yields the CPU; returns 1 if a process is alive. */
static void pt_pause(pt_u32 nth);
static int pt_alive(pt_u32 pid);

static inline void pt_publish(struct pt_writer *w)
{
   if (w->control)
      __atomic_store_n(&w->control->head, w->head, __ATOMIC_RELEASE);
}

/* Waits until at most `left` records are unread. Stops writing if the consumer has stopped or ended. */
static __attribute__((noinline)) void pt_wait(struct pt_writer *w, pt_u64 left)
{
   pt_u32 nth = 0;
   pt_publish(w);
   for (;;) {
      w->tail_seen = __atomic_load_n(&w->control->tail, __ATOMIC_ACQUIRE);
      if (w->head - w->tail_seen <= left)
         return;
      nth++;
      if (__atomic_load_n(&w->header->stop, __ATOMIC_RELAXED) ||
          (nth % 1024 == 0 && !pt_alive(w->header->consumer_pid))) {
         w->control = 0;
         return;
      }
      pt_pause(nth);
   }
}

/* Records are published in blocks: each publication takes a cache line from the consumer's CPU. */
#define PT_BLOCK 64
#define PT_AHEAD 32

static inline void pt_write(struct pt_writer *w, pt_u64 what, pt_u64 where)
{
   if (!w->control)
      return;
   if (w->head - w->tail_seen > w->mask) {
      pt_wait(w, w->mask);
      if (!w->control)
         return;
   }
   w->records[w->head & w->mask] = (struct pt_record){what, where};
   /* The next slots lie in the consumer's cache. Getting one takes as long as a few cache misses. */
   __builtin_prefetch(&w->records[(w->head + PT_AHEAD) & w->mask], 1);
   w->head++;
   if (w->head % PT_BLOCK == 0)
      pt_publish(w);
}

static inline struct pt_control *pt_control_of(struct pt_header *header, pt_u32 ring)
{
   pt_u64 bytes = PT_PAGE + header->ring_records * sizeof(struct pt_record);
   return (struct pt_control *)((char *)header + PT_PAGE + ring * bytes);
}

static inline pt_u64 pt_bytes(const struct pt_header *header)
{
   return PT_PAGE + header->ring_count * (PT_PAGE + header->ring_records * sizeof(struct pt_record));
}

static inline int pt_is_ours(const struct pt_header *header)
{
   return header->magic == PT_MAGIC && header->version == PT_VERSION;
}

/* Returns a new number for an address space. */
static inline pt_u32 pt_new_process(struct pt_header *header)
{
   return __atomic_fetch_add(&header->processes, 1, __ATOMIC_RELAXED);
}

/* Claims a free ring. Waits if none is free, because the consumer frees the rings of ended writers. */
static void pt_claim(struct pt_writer *w, struct pt_header *header, pt_u32 process, pt_u32 pid)
{
   pt_u32 nth, ring;
   w->header = header;
   w->control = 0;
   w->mask = header->ring_records - 1;
   for (nth = 0; nth < 2000 && !header->stop; nth++) {
      for (ring = 0; ring < header->ring_count; ring++) {
         struct pt_control *control = pt_control_of(header, ring);
         pt_u32 expected = PT_FREE;
         if (!__atomic_compare_exchange_n(&control->state, &expected, PT_CLAIMED, 0,
                                          __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
         w->control = control;
         w->records = (struct pt_record *)((char *)control + PT_PAGE);
         w->head = w->tail_seen = __atomic_load_n(&control->tail, __ATOMIC_ACQUIRE);
         control->process = process;
         __atomic_store_n(&control->pid, pid, __ATOMIC_RELEASE);
         return;
      }
      if (!pt_alive(header->consumer_pid))
         break;
      pt_pause(nth + 1000);
   }
   __atomic_fetch_add(&header->unrecorded, 1, __ATOMIC_RELAXED);
}

/* Ends the writer. Waits until all records are read, because the consumer reads /proc of the process. */
static void pt_end(struct pt_writer *w)
{
   if (!w->control)
      return;
   pt_wait(w, 0);
   if (w->control)
      __atomic_store_n(&w->control->state, PT_ENDED, __ATOMIC_RELEASE);
   w->control = 0;
}

#endif
