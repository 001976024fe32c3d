/*
 * A table of numbers that may be larger than this machine's memory.
 *
 *   cc -o remote remote.c $(pkg-config --cflags --libs pagetax)
 *   ./remote 64 16 host-a,host-b      64 MiB, of which 16 stay here; without hosts, compressed here
 */
#include <pagetax.h>
#include <stdio.h>
#include <stdlib.h>

static void print_line(const char *line) {
	fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv) {
	size_t count = (size_t)atol(argc > 1 ? argv[1] : "64") * (1 << 20) / sizeof(double);
	struct pagetax_remote_options options = {0};
	struct pagetax_remote_counts counts;
	double *table, sum = 0;
	size_t i;

	options.resident = (size_t)atol(argc > 2 ? argv[2] : "16") << 20;
	options.servers = argc > 3 ? argv[3] : NULL;
	options.copies = argc > 3 ? 2 : 1;
	options.log = print_line;
	table = pagetax_remote_map(count * sizeof *table, &options);
	if (table == NULL) {
		fprintf(stderr, "%s\n", pagetax_remote_error());
		return 1;
	}
	/* From here on it is memory. */
	for (i = 0; i < count; i++)
		table[i] = (double)i;
	for (i = 0; i < count; i++)
		sum += table[i];
	pagetax_remote_count(table, &counts);
	printf("sum %.0f\n", sum);
	fprintf(stderr, "%llu pages came back, %llu KiB are here\n",
		(unsigned long long)counts.page_ins,
		(unsigned long long)counts.resident_bytes >> 10);
	return pagetax_remote_unmap(table);
}
