/* A CUDA driver that computes nothing, and says that it is an NVIDIA H200. Programs compile on it what they would launch on one.
 *
 * Memory is the host's, and copies between host and device are made, those within the device and kernels are not. What scripts/
 * gpu-compile appends answers every other function of the driver with success. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long address;
enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 101, NOT_FOUND = 500 };
static const size_t MEMORY = 150109880320;

/* Something to tell streams, events, modules and functions apart by. */
static void *new_handle(void) {
  static size_t last = 0x1000;
  return (void *)__sync_add_and_fetch(&last, 16);
}

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGet(int *device, int number) { *device = number; return number == 0 ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA H200", length); return SUCCESS; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { strncpy(id, "0000:00:05.0", length); return SUCCESS; }
int cuDeviceGetUuid_v2(void *uuid, int device) { memset(uuid, 7, 16); return SUCCESS; }
int cuDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = MEMORY; return SUCCESS; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *total = MEMORY; *free = MEMORY - (1 << 30); return SUCCESS; }

/* By the numbers of CUdevice_attribute; all others are 1. */
static const int ATTRIBUTES[][2] = {
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64},           /* threads of a block */
    {5, 2147483647}, {6, 65535}, {7, 65535},            /* blocks of a grid */
    {8, 49152}, {81, 233472}, {97, 232448},             /* shared memory of a block, of a processor, and if asked for */
    {9, 65536}, {10, 32}, {12, 65536}, {82, 65536},     /* constant memory, threads of a warp, registers */
    {13, 1980000}, {16, 132}, {38, 62914560},           /* clock, processors, cache */
    {39, 2048}, {106, 32},                              /* threads and blocks of a processor */
    {75, 9}, {76, 0},                                   /* compute capability */
};
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 1;
  for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
    if (ATTRIBUTES[i][0] == attribute) *value = ATTRIBUTES[i][1];
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = new_handle(); return SUCCESS; }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = new_handle(); return SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { *event = new_handle(); return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { *module = new_handle(); return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return (*function = strdup(name)) ? SUCCESS : OUT_OF_MEMORY; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 64; return SUCCESS; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) { *blocks = 1; return SUCCESS; }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *launch) { *clusters = 66; return SUCCESS; }
int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = new_handle(); return SUCCESS; }
int cuDeviceGetMemPool(void **pool, int device) { *pool = new_handle(); return SUCCESS; }
int cuGetErrorName(int error, const char **name) { *name = "the stand-in's"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in"; return SUCCESS; }
/* NVRTC asks for these, and does without. */
int cuGetExportTable(const void **table, const void *id) { *table = NULL; return NOT_FOUND; }
int cuGetProcAddress(const char *name, void **function, int version, address flags) { *function = NULL; return NOT_FOUND; }
int cuGetProcAddress_v2(const char *name, void **function, int version, address flags, int *status) { *function = NULL; return NOT_FOUND; }

/* Pages that are never touched take no memory. The first one of an allocation holds its size. */
static const size_t PAGE = 4096;
int cuMemAlloc_v2(address *pointer, size_t bytes) {
  size_t all = (bytes + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
  char *pages = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return OUT_OF_MEMORY;
  *(size_t *)pages = all;
  *pointer = (address)(pages + PAGE);
  return SUCCESS;
}
int cuMemFree_v2(address pointer) {
  char *pages = (char *)pointer - PAGE;
  if (pointer) munmap(pages, *(size_t *)pages);
  return SUCCESS;
}
int cuMemAllocAsync(address *pointer, size_t bytes, void *stream) { return cuMemAlloc_v2(pointer, bytes); }
int cuMemFreeAsync(address pointer, void *stream) { return cuMemFree_v2(pointer); }
int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) { return (*pointer = malloc(bytes + 1)) ? SUCCESS : OUT_OF_MEMORY; }
int cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }
int cuMemFreeHost(void *pointer) { free(pointer); return SUCCESS; }

int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) { memcpy(to, (void *)from, bytes); return SUCCESS; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { return cuMemcpyDtoH_v2(to, from, bytes); }
int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return SUCCESS; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) { return cuMemcpyHtoD_v2(to, from, bytes); }

/* CUDA_MEMCPY2D; memory of type 1 is the host's. */
struct side { size_t x, y; int type; void *host; address device; void *array; size_t pitch; };
struct copy { struct side from, to; size_t width, height; };
static char *row_of(const struct side *side, size_t row) {
  char *start = side->type == 1 ? side->host : (char *)side->device;
  return start + (side->y + row) * side->pitch + side->x;
}
int cuMemcpy2DAsync_v2(const struct copy *copy, void *stream) {
  for (size_t row = 0; row < copy->height; row++) memcpy(row_of(&copy->to, row), row_of(&copy->from, row), copy->width);
  return SUCCESS;
}

/* Half a millisecond to one, and another each time, so that autotune does not always pick the same. */
int cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
  static unsigned events;
  unsigned hash = __sync_add_and_fetch(&events, 1) * 2654435761u;
  *milliseconds = 0.5f + ((hash ^ hash >> 15) % 1000) * 0.0005f;
  return SUCCESS;
}
int cuEventElapsedTime(float *milliseconds, void *start, void *end) { return cuEventElapsedTime_v2(milliseconds, start, end); }

/* Refuses what a GPU refuses: autotune tries other kernels then. */
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *start, const address *sizes, const address *strides,
                           const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
  for (unsigned i = 0; i < rank; i++)
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256) return INVALID_VALUE;
  for (unsigned i = 0; i + 1 < rank; i++)
    if (strides[i] % 16) return INVALID_VALUE;
  return SUCCESS;
}

/* A launch is a line of the file $STAND_IN_LAUNCHES, if there is to be one: the kernel, its blocks and its threads. */
static FILE *launches(void) {
  static FILE *file;
  const char *path = getenv("STAND_IN_LAUNCHES");
  if (!file && path && (file = fopen(path, "a"))) setvbuf(file, NULL, _IOLBF, 4096);
  return file;
}
struct launch { unsigned blocks[3], threads[3]; };
static int launch(const char *kernel, const struct launch *of) {
  FILE *file = launches();
  if (file)
    fprintf(file, "%s\t%u,%u,%u\t%u,%u,%u\n", kernel, of->blocks[0], of->blocks[1], of->blocks[2], of->threads[0], of->threads[1],
            of->threads[2]);
  return SUCCESS;
}
int cuLaunchKernel(void *function, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  return launch(function, &(struct launch){{bx, by, bz}, {tx, ty, tz}});
}
int cuLaunchKernelEx(const struct launch *config, void *function, void **parameters, void **extra) { return launch(function, config); }
