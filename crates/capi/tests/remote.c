/* Network memory from C: every page comes back, errors are those of the header. argv: flags, servers. */
#include <errno.h>
#include <pagetax.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGES 4096
#define PAGE 4096
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s\n", __LINE__, pagetax_remote_error()); \
			return 1; \
		} \
	} while (0)

static int fails_with(int result, int error) {
	return result == -1 && errno == error;
}

int main(int argc, char **argv) {
	struct pagetax_remote_options options = {0};
	struct pagetax_remote_counts counts;
	unsigned char *region;
	unsigned page;

	options.resident = 4 << 20;
	options.flags = (unsigned)atoi(argv[1]);
	options.servers = argc > 2 ? argv[2] : NULL;
	options.copies = argc > 2 ? 2 : 0;
	region = pagetax_remote_map((size_t)PAGES * PAGE, &options);
	if (region == NULL) {
		printf("SKIP: %s\n", pagetax_remote_error());
		return errno == EACCES || errno == EPERM ? 0 : 1;
	}
	for (page = 0; page < PAGES; page++)
		memset(region + (size_t)page * PAGE, (int)(page * 7 % 251 + 1), PAGE);
	for (page = 0; page < PAGES; page++)
		CHECK(region[(size_t)page * PAGE + page] == page * 7 % 251 + 1);
	CHECK(pagetax_remote_count(region, &counts) == 0);
	CHECK(counts.page_ins > 0 && counts.page_outs > 0 && counts.resident_bytes <= 4 << 20);
	CHECK(pagetax_remote_evict(region) == 0);
	CHECK(pagetax_remote_discard(region, PAGE, 2 * PAGE) == 0);
	CHECK(region[PAGE] == 0 && region[3 * PAGE] == 22 && region[0] == 1);

	CHECK(fails_with(pagetax_remote_discard(region, 1, PAGE), EINVAL));
	CHECK(fails_with(pagetax_remote_discard(region, 0, (size_t)-PAGE), EINVAL));
	CHECK(fails_with(pagetax_remote_evict(region + PAGE), EINVAL));
	CHECK(pagetax_remote_unmap(region) == 0);
	CHECK(fails_with(pagetax_remote_unmap(region), EINVAL));
	CHECK(pagetax_remote_map(PAGE, NULL) == NULL && errno == EINVAL);
	CHECK(pagetax_remote_map(0, &options) == NULL && errno == EINVAL);
	options.servers = "127.0.0.1:1";
	options.copies = 1;
	CHECK(pagetax_remote_map(PAGE, &options) == NULL && errno == EHOSTUNREACH);
	CHECK(strstr(pagetax_remote_error(), "pagetax serve") != NULL);

	/* Less than a whole TLS configuration is an error, never pages in the clear. */
	for (page = 1; page < 15; page++) {
		if ((page & 7) == 7)
			continue;
		options.tls_cert = page & 1 ? "/dev/null" : NULL;
		options.tls_key = page & 2 ? "/dev/null" : NULL;
		options.tls_ca = page & 4 ? "/dev/null" : NULL;
		options.tls_name = page & 8 ? "name" : NULL;
		options.servers = argc > 2 ? argv[2] : NULL;
		CHECK(pagetax_remote_map(PAGE, &options) == NULL && errno == EINVAL);
		CHECK(strstr(pagetax_remote_error(), "tls_ca") != NULL);
	}
	options.tls_cert = options.tls_key = options.tls_ca = options.tls_name = NULL;
	options.servers = "192.0.2.1:1";
	CHECK(pagetax_remote_map(PAGE, &options) == NULL && errno == EHOSTUNREACH);
	CHECK(strstr(pagetax_remote_error(), "--insecure") != NULL);
	puts("right");
	return 0;
}
