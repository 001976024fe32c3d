/*
 * Page sizes under control, by the interface of Solaris 9: link with -lpagetax (pkg-config pagetax).
 *
 * Code that asks for large pages inside `#ifdef MC_HAT_ADVISE` compiles as it is with
 * `-include pagetax.h`. All functions return -1 and set errno where they fail.
 */
#ifndef PAGETAX_H
#define PAGETAX_H

#include <stddef.h> /* and no other: they heed macros that a source defines only after -include */

#ifdef __cplusplus
extern "C" {
#endif

/* The command of memcntl, and its argument. */
#define MC_HAT_ADVISE 7

/* mha_cmd: what is advised. */
#define MHA_MAPSIZE_VA 0x1     /* addr and len, multiples of the page size */
#define MHA_MAPSIZE_BSSBRK 0x2 /* bss and heap, now and as it grows; addr and len 0 */
#define MHA_MAPSIZE_STACK 0x4  /* the main thread's stack, by the main thread; addr and len 0 */

struct memcntl_mha {
	unsigned int mha_cmd;
	unsigned int mha_flags; /* 0 */
	size_t mha_pagesize;    /* of getpagesizes, or 0: as the system likes */
};

/*
 * cmd is MC_HAT_ADVISE, arg points to a struct memcntl_mha, attr and mask are 0.
 * EINVAL: a bad argument, or a page size that the system does not have. ENOMEM: addr to addr + len is not
 * mapped throughout. EAGAIN: the system lacks the resources.
 * BSSBRK is best called first thing in main, while there are no other threads.
 */
int memcntl(void *addr, size_t len, int cmd, void *arg, int attr, int mask);

/*
 * Writes at most nelem page sizes that memcntl can give, smallest first; returns how many it wrote.
 * With NULL and 0, how many there are. EINVAL: nelem is negative, or NULL with another nelem.
 */
int getpagesizes(size_t pagesizes[], int nelem);

/* Requests of meminfo. */
#define MEMINFO_SHIFT 16
#define MEMINFO_MASK (0xff << MEMINFO_SHIFT)
#define MEMINFO_VPHYSICAL (0x01 << MEMINFO_SHIFT)  /* physical address; seen by root alone */
#define MEMINFO_VLGRP (0x02 << MEMINFO_SHIFT)      /* memory node */
#define MEMINFO_VPAGESIZE (0x03 << MEMINFO_SHIFT)  /* page size */
#define MEMINFO_VREPLCNT (0x04 << MEMINFO_SHIFT)   /* number of replicas: 0 */
#define MEMINFO_VREPL (0x05 << MEMINFO_SHIFT)      /* a replica: never valid */
#define MEMINFO_VREPL_LGRP (0x06 << MEMINFO_SHIFT) /* its node: never valid */
#define MEMINFO_PLGRP (0x07 << MEMINFO_SHIFT)      /* node of a physical address */

#define MAX_MEMINFO_CNT 256
#define MAX_MEMINFO_REQ 31

/*
 * For each of addr_count addresses answers info_count requests, in outdata[address * info_count +
 * request]. Bit 0 of validity[address] tells whether the address is good, bit 1 + request whether
 * that answer is.
 */
int meminfo(const __UINT64_TYPE__ inaddr[], int addr_count, const unsigned int info_req[],
	    int info_count, __UINT64_TYPE__ outdata[], unsigned int validity[]);

/*
 * Network memory: a region that may be larger than this machine's memory. At most so much of it is
 * resident; the rest lies on memory servers (pagetax serve), and each page comes, proven by its
 * checksum, when it is touched. A page that is lost is SIGBUS. Children of a fork do not have regions.
 */
#define PAGETAX_REMOTE_OVERCOMMIT 1     /* map also what the servers could not take now */
#define PAGETAX_REMOTE_DISCOVER 2       /* look for more servers on the local network */
#define PAGETAX_REMOTE_USER_MODE_ONLY 4 /* do without system calls into missing pages: EFAULT */
/*
 * The faulting thread fetches its page in a SIGBUS handler; no thread of the library does (x86-64). Faster if
 * one thread waits at a time. System calls into missing pages fail with EFAULT. Threads must not block SIGBUS,
 * and must leave 32 KiB of stack. A SIGBUS handler that is installed after the map must pass on other faults.
 */
#define PAGETAX_REMOTE_IN_PLACE 8

/* Use servers beyond loopback without TLS: everybody on the network can read and change the pages. */
#define PAGETAX_REMOTE_INSECURE 16

/* Compress writes over slow links with TLS, too: the sizes on the network then tell how well pages compress. */
#define PAGETAX_REMOTE_COMPRESS_TLS 32

struct pagetax_remote_options {
	size_t resident;      /* most bytes in this machine's memory, at least 128 KiB */
	const char *servers;  /* "host[:port],..."; NULL: compressed inside the process; or "valkey://host,..." */
	unsigned int copies;  /* 1 to 3 of each page, on as many servers; 0 is 1 */
	unsigned int flags;
	const char *tls_cert; /* PEM files: all three, or all NULL for no TLS */
	const char *tls_key;
	const char *tls_ca;
	const char *tls_name; /* in the servers' certificates; NULL: the host's */
	/*
	 * Receives a line for each event that no function returns: a lost page, servers that come and go.
	 * NULL: no log. Any thread may call it; with PAGETAX_REMOTE_IN_PLACE, a SIGBUS handler.
	 */
	void (*log)(const char *line);
};

struct pagetax_remote_counts {
	__UINT64_TYPE__ faults, page_ins, page_outs, resident_bytes;
};

/*
 * Zeros, size bytes rounded up to whole pages. NULL: EINVAL, a bad argument; ENOMEM, more than the
 * servers can take; EHOSTUNREACH, too few servers, one that refuses, or one beyond loopback without TLS;
 * or userfaultfd's reason.
 */
void *pagetax_remote_map(size_t size, const struct pagetax_remote_options *options);

/* These take the address that map returned, and fail with EINVAL for any other. */
int pagetax_remote_unmap(void *region);
int pagetax_remote_discard(void *region, size_t offset, size_t len); /* whole pages: zeros again */
int pagetax_remote_evict(void *region);                              /* all pages to the servers */
int pagetax_remote_count(void *region, struct pagetax_remote_counts *counts);

/* Why the calling thread's last pagetax_remote function failed, in English. */
const char *pagetax_remote_error(void);

#ifdef __cplusplus
}
#endif

#endif
