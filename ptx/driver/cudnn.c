/* cuDNN's backend API by its documentation: convolutions of 16 bits and their gradients, one product after the other on the host, over a
 * driver whose calls are done when they return. What it is asked for beyond what is here is an error (3000, not supported), and so are
 * attributes of another type or count, and descriptors that are not finalized. CUDNN_NO_PLANS makes it know no engine, CUDNN_FAILS fail
 * when a plan is executed, and CUDNN_WRONG compute something else.
 *
 * With MOST_PRODUCTS, it is part of a stand-in that computes nothing (scripts/gpu-compile): convolutions of more products are not computed,
 * and each is a line of the file $STAND_IN_LAUNCHES, if there is to be one. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1001, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum { HANDLE = 0, DATA_TYPE = 1, INT64 = 3, FLOAT = 4, VOID_PTR = 6, CONVOLUTION_MODE = 7, HEUR_MODE = 8, NOTE = 11, DESCRIPTOR = 15 };
enum { CONVOLUTION = 1, ENGINE = 2, CONFIG = 3, HEURISTIC = 4, PLAN = 5, FORWARD = 10, FILTER = 11, DATA = 12, GRAPH = 15, PACK = 16, TENSOR = 17 };
enum { F16 = 2, BF16 = 9, MOST = 8 };

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes);
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes);

struct descriptor {
  int kind, finalized;
  /* CONVOLUTION */
  int64_t dims, strides[MOST], before[MOST], after[MOST], dilations[MOST];
  int sums, mode;
  /* TENSOR */
  int64_t rank, sizes[MOST], distances[MOST], id, alignment;
  int type;
  /* Operations: the convolution, x, w and y. GRAPH, HEURISTIC, CONFIG, PLAN: what they are of. */
  struct descriptor *parts[4];
  float alpha, beta;
  void *handle;
  /* PACK */
  int64_t ids[3];
  uint64_t addresses[3], workspace;
};

static int numbers(int64_t *to, int most, int type, int64_t count, const void *from) {
  if (type != INT64 || count < 1 || count > most) return BAD_PARAM;
  memcpy(to, from, count * 8);
  return SUCCESS;
}
static int choice(int *to, int expected, int type, int64_t count, const void *from) {
  if (type != expected || count != 1) return BAD_PARAM;
  memcpy(to, from, 4);
  return SUCCESS;
}
static int part(struct descriptor **to, int type, int64_t count, const void *from) {
  if (type != DESCRIPTOR || count != 1) return BAD_PARAM;
  memcpy(to, from, sizeof *to);
  return (*to)->finalized ? SUCCESS : BAD_PARAM;
}

size_t cudnnGetVersion(void) { return 90000; }
const char *cudnnGetErrorString(int status) {
  return status == NOT_SUPPORTED ? "not supported" : status == BAD_PARAM ? "bad parameter" : status == EXECUTION_FAILED ? "execution failed" : "error";
}
int cudnnCreate(void **handle) { return (*handle = malloc(1)) ? SUCCESS : NOT_INITIALIZED; }
int cudnnDestroy(void *handle) { free(handle); return SUCCESS; }
int cudnnSetStream(void *handle, void *stream) { return handle ? SUCCESS : BAD_PARAM; }
int cudnnBackendCreateDescriptor(int kind, struct descriptor **made) {
  int known = (kind >= CONVOLUTION && kind <= PLAN) || (kind >= FORWARD && kind <= DATA) || (kind >= GRAPH && kind <= TENSOR);
  if (!known) return NOT_SUPPORTED;
  if (!(*made = calloc(1, sizeof **made))) return NOT_INITIALIZED;
  (*made)->kind = kind;
  return SUCCESS;
}
int cudnnBackendDestroyDescriptor(struct descriptor *it) { free(it); return SUCCESS; }

int cudnnBackendSetAttribute(struct descriptor *it, int name, int type, int64_t count, const void *values) {
  if (it->finalized) return BAD_PARAM;
  switch (it->kind) {
    case CONVOLUTION:
      switch (name) {
        case 100: return choice(&it->sums, DATA_TYPE, type, count, values);
        case 101: return choice(&it->mode, CONVOLUTION_MODE, type, count, values);
        case 102: return numbers(it->dilations, MOST, type, count, values);
        case 103: return numbers(it->strides, MOST, type, count, values);
        case 104: return numbers(it->after, MOST, type, count, values);
        case 105: return numbers(it->before, MOST, type, count, values);
        case 106: return numbers(&it->dims, 1, type, count, values);
      }
      break;
    case TENSOR:
      switch (name) {
        case 900: return numbers(&it->alignment, 1, type, count, values);
        case 901: return choice(&it->type, DATA_TYPE, type, count, values);
        case 902: it->rank = count; return numbers(it->sizes, MOST, type, count, values);
        case 903: return it->rank && it->rank != count ? BAD_PARAM : numbers(it->distances, MOST, type, count, values);
        case 906: return numbers(&it->id, 1, type, count, values);
      }
      break;
    /* Their attributes are in orders of their own: alpha, beta, the convolution, and w, x, y; w, dx, dy; dw, x, dy. */
    case FORWARD: case FILTER: case DATA: {
      int at = name - (it->kind == FORWARD ? 700 : it->kind == DATA ? 706 : 712);
      if (at == 0 || at == 1) {
        if (type != FLOAT || count != 1) return BAD_PARAM;
        memcpy(at ? &it->beta : &it->alpha, values, 4);
        return SUCCESS;
      }
      if (at < 0 || at > 5) break;
      return part(&it->parts[(int[]){0, 2, 1, 3}[at - 2]], type, count, values);
    }
    case GRAPH:
      if (name == 801) return part(&it->parts[0], type, count, values);
      if (name == 800 && type == HANDLE && count == 1) return memcpy(&it->handle, values, sizeof it->handle), SUCCESS;
      break;
    case HEURISTIC:
      if (name == 201) return part(&it->parts[0], type, count, values);
      if (name == 200) return choice(&it->mode, HEUR_MODE, type, count, values);
      break;
    case PLAN:
      if (name == 401) return part(&it->parts[0], type, count, values);
      if (name == 400 && type == HANDLE && count == 1) return memcpy(&it->handle, values, sizeof it->handle), SUCCESS;
      break;
    case PACK:
      if (name == 1000) return count == 3 ? numbers(it->ids, 3, type, count, values) : BAD_PARAM;
      if (name == 1001 && type == VOID_PTR && count == 3) return memcpy(it->addresses, values, 24), SUCCESS;
      if (name == 1003 && type == VOID_PTR && count == 1) return memcpy(&it->workspace, values, 8), SUCCESS;
      break;
  }
  return NOT_SUPPORTED;
}

static int has_sizes(const struct descriptor *operation) {
  const struct descriptor *by = operation->parts[0], *x = operation->parts[1], *w = operation->parts[2], *y = operation->parts[3];
  if (!by || !x || !w || !y || operation->alpha != 1 || operation->beta != 0) return 0;
  if (x->rank != by->dims + 2 || w->rank != x->rank || y->rank != x->rank || x->type != w->type || x->type != y->type) return 0;
  if (x->sizes[1] % w->sizes[1] || y->sizes[1] != w->sizes[0] || y->sizes[0] != x->sizes[0]) return 0;
  if (w->sizes[0] % (x->sizes[1] / w->sizes[1])) return 0;
  for (int dim = 0; dim < by->dims; dim++) {
    int64_t covered = x->sizes[dim + 2] + by->before[dim] + by->after[dim] - by->dilations[dim] * (w->sizes[dim + 2] - 1) - 1;
    if (covered < 0 || y->sizes[dim + 2] != covered / by->strides[dim] + 1) return 0;
  }
  return 1;
}

int cudnnBackendFinalize(struct descriptor *it) {
  int fine = 1;
  switch (it->kind) {
    case CONVOLUTION:
      fine = it->sums == 0 && it->mode == 1 && it->dims >= 2 && it->dims <= 3;
      for (int dim = 0; dim < it->dims; dim++) fine &= it->strides[dim] > 0 && it->dilations[dim] > 0;
      break;
    case TENSOR: fine = it->rank >= 4 && it->distances[0] && it->id && it->alignment && (it->type == F16 || it->type == BF16); break;
    case FORWARD: case FILTER: case DATA: fine = has_sizes(it); break;
    case GRAPH: case PLAN: fine = it->handle && it->parts[0]; break;
    case HEURISTIC: fine = it->parts[0] && (it->mode == 2 || it->mode == 3); break;
    case PACK: fine = it->ids[0] && it->addresses[0]; break;
    default: fine = 0;
  }
  it->finalized = fine;
  return fine ? SUCCESS : BAD_PARAM;
}

int cudnnBackendGetAttribute(struct descriptor *it, int name, int type, int64_t most, int64_t *count, void *values) {
  if (it->kind == HEURISTIC && name == 202 && type == DESCRIPTOR) {
    *count = getenv("CUDNN_NO_PLANS") ? 0 : 1;
    if (most > 0 && *count) {
      struct descriptor *config = *(struct descriptor **)values;
      config->parts[0] = it->parts[0];
      config->finalized = 1;
    }
    return SUCCESS;
  }
  if (it->kind == CONFIG && name == 300 && type == DESCRIPTOR && most > 0) {
    (*(struct descriptor **)values)->finalized = 1;
    return *count = 1, SUCCESS;
  }
  if (it->kind == ENGINE && name == 1303 && type == NOTE) return *count = 0, SUCCESS;
  /* A workspace, of which the first and the last byte are written when the plan is executed. */
  if (it->kind == PLAN && name == 402 && type == INT64 && most > 0) return *count = 1, *(int64_t *)values = 100, SUCCESS;
  return NOT_SUPPORTED;
}

static float load(const uint16_t *from, int type) {
  uint32_t bits = (uint32_t)*from << 16;
  float value;
  _Float16 half;
  memcpy(&value, &bits, 4);
  memcpy(&half, from, 2);
  return type == F16 ? half : value;
}
static uint16_t stored(float value, int type) {
  uint32_t bits;
  uint16_t code;
  _Float16 half = value;
  memcpy(&code, &half, 2);
  if (type == F16) return code;
  memcpy(&bits, &value, 4);
  return isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* The elements of a tensor that lies without gaps. */
static int64_t elements(const struct descriptor *tensor) {
  int64_t count = 1;
  for (int dim = 0; dim < tensor->rank; dim++) count *= tensor->sizes[dim];
  return count;
}

struct run {
  const struct descriptor *by, *x, *w, *y;
  int kind;
  float *values[3];
};

static void each_pixel(const struct run *run, int dim, int64_t x, int64_t w, int64_t y) {
  if (dim == run->by->dims) {
    float *a = run->values[0] + x, *b = run->values[1] + w, *c = run->values[2] + y;
    if (run->kind == FORWARD) *c += *a * *b;
    else if (run->kind == DATA) *a += *b * *c;
    else *b += *a * *c;
    return;
  }
  for (int64_t out = 0; out < run->y->sizes[dim + 2]; out++)
    for (int64_t tap = 0; tap < run->w->sizes[dim + 2]; tap++) {
      int64_t in = out * run->by->strides[dim] + tap * run->by->dilations[dim] - run->by->before[dim];
      if (in < 0 || in >= run->x->sizes[dim + 2]) continue;
      each_pixel(run, dim + 1, x + in * run->x->distances[dim + 2], w + tap * run->w->distances[dim + 2], y + out * run->y->distances[dim + 2]);
    }
}

static int is_left_out(const struct run *run) {
#ifdef MOST_PRODUCTS
  const char *path = getenv("STAND_IN_LAUNCHES");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) fprintf(file, "cudnnBackendExecute\n"), fclose(file);
  return elements(run->w) * (elements(run->y) / run->y->sizes[1]) > MOST_PRODUCTS;
#else
  return 0;
#endif
}

int cudnnBackendExecute(void *handle, struct descriptor *plan, struct descriptor *pack) {
  if (!plan->finalized || !pack->finalized || plan->handle != handle || !pack->workspace) return BAD_PARAM;
  if (getenv("CUDNN_FAILS")) return EXECUTION_FAILED;
  const struct descriptor *operation = plan->parts[0]->parts[0]->parts[0];
  struct run run = {operation->parts[0], operation->parts[1], operation->parts[2], operation->parts[3], operation->kind, {0}};
  const struct descriptor *tensors[3] = {run.x, run.w, run.y};
  int wanted = run.kind == FORWARD ? 2 : run.kind == DATA ? 0 : 1, status = SUCCESS;
  uint64_t output = 0;
  if (is_left_out(&run)) return SUCCESS;
  if (cuMemcpyHtoD_v2(pack->workspace, "", 1) || cuMemcpyHtoD_v2(pack->workspace + 99, "", 1)) return EXECUTION_FAILED;
  for (int at = 0; at < 3 && !status; at++) {
    int64_t count = elements(tensors[at]);
    uint16_t *codes = malloc(count * 2);
    uint64_t address = 0;
    for (int id = 0; id < 3; id++) address = pack->ids[id] == tensors[at]->id ? pack->addresses[id] : address;
    run.values[at] = calloc(count, sizeof(float));
    if (!codes || !run.values[at] || !address || address % tensors[at]->alignment) status = BAD_PARAM;
    else if (at == wanted) output = address;
    else if (cuMemcpyDtoH_v2(codes, address, count * 2)) status = EXECUTION_FAILED;
    else for (int64_t i = 0; i < count; i++) run.values[at][i] = load(codes + i, tensors[at]->type);
    free(codes);
  }
  int64_t outputs = run.w->sizes[0] / (run.x->sizes[1] / run.w->sizes[1]);
  for (int64_t image = 0; !status && image < run.x->sizes[0]; image++)
    for (int64_t out = 0; out < run.w->sizes[0]; out++)
      for (int64_t in = 0; in < run.w->sizes[1]; in++)
        each_pixel(&run, 0, image * run.x->distances[0] + (out / outputs * run.w->sizes[1] + in) * run.x->distances[1],
                   out * run.w->distances[0] + in * run.w->distances[1], image * run.y->distances[0] + out * run.y->distances[1]);
  if (!status) {
    int64_t count = elements(tensors[wanted]);
    uint16_t *codes = malloc(count * 2);
    for (int64_t i = 0; codes && i < count; i++) codes[i] = stored(run.values[wanted][i] + (getenv("CUDNN_WRONG") ? 1 : 0), tensors[wanted]->type);
    if (!codes || cuMemcpyHtoD_v2(output, codes, count * 2)) status = EXECUTION_FAILED;
    free(codes);
  }
  for (int at = 0; at < 3; at++) free(run.values[at]);
  return status;
}
