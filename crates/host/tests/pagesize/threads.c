/* A program whose threads notice any disturbance: waits must not fail with EINTR, sums must be right,
 * and two threads take turns under a lock. Ends when its standard input does. Prints "ok" or "failed";
 * errors go to stderr. The argument is the MiB of memory to get from malloc and fill (default 16). */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static atomic_int stop, failures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static long turns;

static void failed(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	failures++;
}

static void *waits(void *unused)
{
	struct epoll_event event = { .events = EPOLLIN };
	int set = epoll_create1(0), file = eventfd(0, EFD_NONBLOCK);
	epoll_ctl(set, EPOLL_CTL_ADD, file, &event);
	while (!stop)
		if (epoll_wait(set, &event, 1, 20) != 0)
			failed("epoll_wait");
	return unused;
}

static void *sleeps(void *unused)
{
	struct timespec pause = { 0, 3000000 };
	while (!stop)
		if (nanosleep(&pause, NULL))
			failed("nanosleep");
	return unused;
}

static void *counts(void *unused)
{
	while (!stop) {
		unsigned long sum = 0;
		for (unsigned long i = 0; i < 100000; i++)
			sum += i * i;
		if (sum != 333328333350000UL)
			failed("sum");
		usleep(2000);
	}
	return unused;
}

static void *takes_turns(void *odd)
{
	struct timespec late;
	pthread_mutex_lock(&lock);
	while (!stop) {
		while (!stop && (turns & 1) != (long)odd) {
			clock_gettime(CLOCK_REALTIME, &late);
			late.tv_sec += 1;
			pthread_cond_timedwait(&turn, &lock, &late);
		}
		turns++;
		pthread_cond_broadcast(&turn);
		if (turns % 64 == 0) {
			pthread_mutex_unlock(&lock);
			usleep(1000);
			pthread_mutex_lock(&lock);
		}
	}
	pthread_cond_broadcast(&turn);
	pthread_mutex_unlock(&lock);
	return odd;
}

int main(int argc, char **argv)
{
	size_t bytes = (size_t)(argc > 1 ? atoi(argv[1]) : 16) << 20, chunk = 100000;
	size_t chunks = bytes / chunk;
	char **memory = malloc(chunks * sizeof *memory);
	pthread_t threads[5];
	char byte;
	for (size_t i = 0; i < chunks; i++)
		memset(memory[i] = malloc(chunk), (int)(i & 0x7f), chunk);
	pthread_create(&threads[0], NULL, waits, NULL);
	pthread_create(&threads[1], NULL, sleeps, NULL);
	pthread_create(&threads[2], NULL, counts, NULL);
	pthread_create(&threads[3], NULL, takes_turns, (void *)0);
	pthread_create(&threads[4], NULL, takes_turns, (void *)1);
	puts("up");
	fflush(stdout);
	if (read(0, &byte, 1) != 0)
		failed("read");
	stop = 1;
	for (int i = 0; i < 5; i++)
		pthread_join(threads[i], NULL);
	for (size_t i = 0; i < chunks; i++)
		for (size_t j = 0; j < chunk; j += 499)
			if (memory[i][j] != (char)(i & 0x7f))
				failures++;
	if (!turns)
		failed("turns");
	puts(failures ? "failed" : "ok");
	return failures != 0;
}
