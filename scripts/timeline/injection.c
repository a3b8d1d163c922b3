/* Writes a line for each kernel, copy and fill of a process on the GPU, from its start to its end: what the GPU does, and when it waits.
 *
 * CUDA's driver loads this library into a program if CUDA_INJECTION64_PATH names it. Lines go to $TIMELINE.PID, separated by tabs:
 * start and end in ns, stream, grid, block, registers, shared memory or bytes, name. `scripts/timeline/read` sums them up.
 *
 * With CUPTI's header and library of PyTorch's or NVIDIA's Python packages (nvidia-cuda-cupti), of the CUDA version of the GPU machine:
 *   cc -shared -fPIC -O2 -o timeline.so scripts/timeline/injection.c -I CUPTI/include -I CUDA/include -L CUPTI/lib -l:libcupti.so.13
 * and there, with CUPTI's folder in LD_LIBRARY_PATH:
 *   CUDA_INJECTION64_PATH=$PWD/timeline.so TIMELINE=timeline scripts/gpu-run .gpu-cpp/steps.tar.xz bench-gpu_steps:gpt2/8 */
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <pthread.h>
static FILE *out;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void CUPTIAPI requested(uint8_t **buffer, size_t *size, size_t *records) {
  *size = 8 << 20; *records = 0;
  if (posix_memalign((void **)buffer, 8, *size)) *buffer = 0;
}
static void CUPTIAPI completed(CUcontext c, uint32_t s, uint8_t *buffer, size_t size, size_t valid) {
  CUpti_Activity *r = 0;
  pthread_mutex_lock(&lock);
  while (cuptiActivityGetNextRecord(buffer, valid, &r) == CUPTI_SUCCESS) {
    if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || r->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
      CUpti_ActivityKernel10 *k = (void *)r;
      fprintf(out, "%llu\t%llu\t%u\t%d,%d,%d\t%d,%d,%d\t%d\t%d\t%s\n", (unsigned long long)k->start, (unsigned long long)k->end, k->streamId,
        k->gridX, k->gridY, k->gridZ, k->blockX, k->blockY, k->blockZ, k->registersPerThread, k->dynamicSharedMemory + k->staticSharedMemory, k->name);
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      CUpti_ActivityMemcpy6 *k = (void *)r;
      fprintf(out, "%llu\t%llu\t%u\t-\t-\t0\t%llu\tmemcpy %d\n", (unsigned long long)k->start, (unsigned long long)k->end, k->streamId, (unsigned long long)k->bytes, k->copyKind);
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      CUpti_ActivityMemset4 *k = (void *)r;
      fprintf(out, "%llu\t%llu\t%u\t-\t-\t0\t%llu\tmemset\n", (unsigned long long)k->start, (unsigned long long)k->end, k->streamId, (unsigned long long)k->bytes);
    }
  }
  fflush(out);
  pthread_mutex_unlock(&lock);
  free(buffer);
}
static void finish(void) { cuptiActivityFlushAll(1); fflush(out); }
int InitializeInjection(void) {
  char path[4096];
  const char *to = getenv("TIMELINE");
  snprintf(path, sizeof path, "%s.%d", to ? to : "timeline", (int)getpid());
  out = fopen(path, "w");
  if (!out) return 0;
  cuptiActivityRegisterCallbacks(requested, completed);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  cuptiActivityFlushPeriod(500);
  atexit(finish);
  return 1;
}
