/* cuBLASLt, which has an algorithm for every product, and computes none. What creates something leaves it as it is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cublasLtMatmulHeuristicResult_t: the algorithm, the workspace, the state, waves and reserved. */
struct result {
  unsigned long long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int asked,
                                   struct result *found, int *count) {
  (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
  *count = asked > 0;
  if (*count) memset(found, 0, sizeof *found);
  return 0;
}

/* A line of the launches that the driver writes down. */
int cublasLtMatmul(void) {
  const char *path = getenv("STAND_IN_LAUNCHES");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) fprintf(file, "cublasLtMatmul\n"), fclose(file);
  return 0;
}
