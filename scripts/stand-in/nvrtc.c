/* NVRTC, which compiles for the GPU itself: its PTX is machine code, so that no driver has to compile it again, and has no line
 * numbers, which make it larger. The library itself is at $STAND_IN_NVRTC. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *real(const char *name) {
  static void *library;
  const char *path = getenv("STAND_IN_NVRTC");
  if (!library) library = dlopen(path ? path : "libnvrtc.so.13", RTLD_NOW | RTLD_LOCAL);
  void *found = library ? dlsym(library, name) : NULL;
  if (!found) {
    fprintf(stderr, "the stand-in's NVRTC: %s\n", dlerror());
    exit(1);
  }
  return found;
}
#define CALL(name, parameters, ...) (((int (*) parameters)real(name))(__VA_ARGS__))

int nvrtcVersion(int *major, int *minor) { return CALL("nvrtcVersion", (int *, int *), major, minor); }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts, const char *const *names) {
  return CALL("nvrtcCreateProgram", (void **, const char *, const char *, int, const char *const *, const char *const *), program, source,
              name, headers, texts, names);
}
int nvrtcDestroyProgram(void **program) { return CALL("nvrtcDestroyProgram", (void **), program); }
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
  const char **kept = malloc((count + 1) * sizeof *kept);
  int left = 0;
  for (int i = 0; i < count; i++)
    if (strcmp(options[i], "-lineinfo")) kept[left++] = options[i];
  int result = CALL("nvrtcCompileProgram", (void *, int, const char *const *), program, left, kept);
  free(kept);
  return result;
}
int nvrtcGetCUBINSize(void *program, size_t *size) { return CALL("nvrtcGetCUBINSize", (void *, size_t *), program, size); }
int nvrtcGetCUBIN(void *program, char *code) { return CALL("nvrtcGetCUBIN", (void *, char *), program, code); }
int nvrtcGetPTXSize(void *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(void *program, char *code) { return nvrtcGetCUBIN(program, code); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return CALL("nvrtcGetProgramLogSize", (void *, size_t *), program, size); }
int nvrtcGetProgramLog(void *program, char *log) { return CALL("nvrtcGetProgramLog", (void *, char *), program, log); }
const char *nvrtcGetErrorString(int result) { return ((const char *(*)(int))real("nvrtcGetErrorString"))(result); }
